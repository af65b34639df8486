"""What the trackers write is read back from their own files with their own readers."""

import importlib.util
import json
import struct

import pytest
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.monitor.trackers import check_trackers, open_trackers


def wandb_records(path):
    """Records of a small wandb file: a 7-byte file header, then LevelDB log chunks (crc, length, type, payload)."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    assert len(data) < 1 << 15  # one block, so no record is split
    at, records = 7, []
    while at < len(data):
        _, length, _ = struct.unpack_from("<IHB", data, at)
        records.append(Record.FromString(data[at + 7 : at + 7 + length]))
        at += 7 + length
    return records


def record(name, folder):
    for opened in range(2):  # twice: a resumed run
        (tracker,) = open_trackers([name], folder, load("quickstart"))
        for step in (1, 2):
            tracker.log(2 * opened + step, {"reward_mean": 0.25 * step, "staleness_tokens/0": 7.0})
        tracker.close()


def test_tensorboard_events_are_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rewards = events.Scalars("reward_mean")
    assert [event.step for event in rewards] == [1, 2, 3, 4]
    assert [event.value for event in rewards] == [0.25, 0.5, 0.25, 0.5]
    assert "staleness_tokens/0" in events.Tags()["scalars"]


def test_wandb_records_offline_without_a_key(tmp_path, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    folder = tmp_path / "run"
    record("wandb", folder)
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2
    assert {path.stem.removeprefix("run-") for path in files} == {(folder / "wandb-id").read_text()}
    history = [
        {
            item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
            for item in record.history.item
        }
        for record in wandb_records(files[0])
        if record.HasField("history")
    ]
    assert [row["reward_mean"] for row in history] == [0.25, 0.5]


def test_wandb_obeys_its_mode(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    record("wandb", tmp_path)
    assert not list(tmp_path.glob("wandb/*run*"))


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match=r"run\.trackers: 'mlflow' is unknown; allowed: tensorboard, wandb"):
        check_trackers(["tensorboard", "mlflow"])


def test_a_missing_package_names_the_key_and_the_extra(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else real(name, *rest))
    with pytest.raises(ConfigError, match=r"run\.trackers: wandb .*pip install -e \.\[trackers\]"):
        check_trackers(["wandb"])
