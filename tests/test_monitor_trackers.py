"""What the trackers write is read back from their own files with their own readers."""

import importlib.util
import json
import logging
import struct
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest
from slipstream.configs import load
from slipstream.errors import ConfigError
from slipstream.monitor.trackers import check_trackers, open_trackers
from slipstream.monitor.trackers import thread as tracker_thread
from slipstream.monitor.trackers.base import TEXT_TOKENS, SampledTokens, Samples, TrajectorySample
from slipstream.monitor.trackers.thread import TrackerThread, close_trackers
from slipstream.tests.servers import ROOT, needs, python_of

WAIT_S = 120.0


def sample(step, name, **changed):
    """A row, and tokens whose decoded text is their numbers."""
    row = TrajectorySample(step, name, "sums", "task | 1", "finished", 0.5, 1.25, 9, "", "")
    row = msgspec.structs.replace(row, **changed)
    return SampledTokens(row, np.arange(3, dtype=np.int32), np.arange(6, dtype=np.int32))


def decode(ids):
    return " ".join(map(str, ids)) + "\n<b># not markup"


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
            tracker.sampled(2 * opened + step, Samples([sample(2 * opened + step, "3.0.1.0")], decode))
            tracker.log(2 * opened + step, {"reward_mean": 0.25 * step, "staleness_tokens/0": 7.0})
        tracker.evaluated(2 * opened + 1, {"evaluation/reward_mean": 0.75})
        close_trackers([tracker], WAIT_S)


def test_tensorboard_events_are_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rewards = events.Scalars("reward_mean")
    assert [event.step for event in rewards] == [1, 2, 3, 4]
    assert [event.value for event in rewards] == [0.25, 0.5, 0.25, 0.5]
    assert "staleness_tokens/0" in events.Tags()["scalars"]
    assert [event.value for event in events.Scalars("evaluation/reward_mean")] == [0.75, 0.75]
    shown = [event for event in events.Tensors("trajectories/text_summary")]
    assert [event.step for event in shown] == [1, 2, 3, 4]
    text = shown[0].tensor_proto.string_val[0].decode()
    assert "**3.0.1.0** sums task | 1: finished, reward 0.5, staleness 1.25, 9 tokens" in text
    assert "\n    0 1 2 3 4 5\n    <b># not markup" in text  # as code: nothing in it is a mark


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
    assert [row["reward_mean"] for row in history if "reward_mean" in row] == [0.25, 0.5]
    tables = sorted((folder / "wandb").glob("offline-run-*/files/media/table/trajectories_*.json"))
    assert len(tables) == 4
    table = json.loads(tables[0].read_text())
    assert table["columns"] == list(TrajectorySample.__struct_fields__)
    assert table["data"][0][1:6] == ["3.0.1.0", "sums", "task | 1", "finished", 0.5]
    assert table["data"][0][-1] == "0 1 2 3 4 5\n<b># not markup"


def test_wandb_obeys_its_mode(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    record("wandb", tmp_path)
    assert not list(tmp_path.glob("wandb/*run*"))


def test_wandb_is_named_by_its_own_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name, value in {"PROJECT": "mine", "ENTITY": "us", "RUN_GROUP": "sweep", "NAME": "first"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    record("wandb", tmp_path / "run")
    (file, *_) = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    (run,) = [found.run for found in wandb_records(file) if found.HasField("run")]
    assert (run.project, run.entity, run.run_group, run.display_name) == ("mine", "us", "sweep", "first")


@needs("trackers")
@pytest.mark.full
@pytest.mark.parametrize("name", ["mlflow", "swanlab", "trackio"])
def test_a_tracker_of_another_environment_is_read_back(name, tmp_path):
    """Recorded by the product in the library's own environment, in two processes as of a resumed run, and read by the library."""
    command = [python_of("trackers"), ROOT / "tests" / "tracker_runs.py", name, tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "records nothing" not in done.stderr + done.stdout
    assert "refused a record" not in done.stderr + done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["runs"] == 1
    assert found["rewards"] == {"1": 0.25, "2": 0.5, "3": 0.25, "4": 0.5}
    assert found["config"] == "models/quickstart"
    assert len(found["texts"]) == 4
    assert all("0 1 2 3 4 5\n<b># not markup" in text for text in found["texts"])


# --- whatever a library does, the run goes on ---------------------------------------------------------------------


class Scripted:
    """A tracker whose library fails or hangs as the test wants."""

    def __init__(self, fails=(), hangs=None):
        self.steps, self.fails, self.hangs, self.closed = [], fails, hangs, False

    def log(self, step, values):
        if self.hangs:
            self.hangs.wait(WAIT_S)
        if step in self.fails:
            raise ConnectionError(f"step {step}")
        self.steps.append(step)

    def evaluated(self, version, values):
        self.steps.append(-version)

    def sampled(self, step, rows):
        self.steps.append([row.response for row in rows])

    def close(self):
        self.closed = True


def test_records_arrive_in_their_order_until_the_end():
    tracker = Scripted()
    thread = TrackerThread("name", lambda: tracker)
    thread.log(1, {})
    thread.sampled(1, Samples([sample(1, "a")], lambda ids: str(len(ids))))
    thread.evaluated(1, {})
    close_trackers([thread], WAIT_S)
    assert tracker.steps == [1, ["6"], -1]
    assert tracker.closed


def test_a_tracker_that_cannot_be_opened_is_one_line(caplog):
    def refuse():
        raise ConnectionError("no key")

    thread = TrackerThread("name", refuse)
    for step in range(3):
        thread.log(step, {})
    close_trackers([thread], WAIT_S)
    assert [record.message for record in caplog.records] == ["name records nothing: ConnectionError: no key"]


def test_a_record_that_fails_is_missed_alone_and_logged_once(caplog):
    tracker = Scripted(fails=(1, 2))
    thread = TrackerThread("name", lambda: tracker)
    for step in range(4):
        thread.log(step, {})
    close_trackers([thread], WAIT_S)
    assert tracker.steps == [0, 3]
    assert [record.message for record in caplog.records] == [
        "name refused a record, others may follow: ConnectionError: step 1",
        "name lacks 2 records; metrics.jsonl has them",
    ]


def test_a_tracker_that_hangs_holds_up_neither_the_run_nor_its_end(caplog, monkeypatch):
    monkeypatch.setattr(tracker_thread, "QUEUE", 5)
    going_on = threading.Event()
    tracker = Scripted(hangs=going_on)
    threads = [TrackerThread(name, lambda: tracker) for name in ("one", "two")]
    with caplog.at_level(logging.WARNING):
        for step in range(50):
            for thread in threads:
                thread.log(step, {})
        close_trackers(threads, 0.2)
    messages = [record.message for record in caplog.records]
    assert messages.count("one does not keep up: records are dropped from now on") == 1
    assert "two did not end in time; metrics.jsonl has what it lacks" in messages
    assert len(messages) == 4
    going_on.set()
    for thread in threads:
        thread.join(WAIT_S)


def test_long_texts_are_cut_in_the_middle_and_decoded_once():
    asked = []

    def decode(ids):
        asked.append(len(ids))
        return f"{ids[0]}..{ids[-1]}"

    long = msgspec.structs.replace(sample(1, "a"), response=np.arange(5000, dtype=np.int32))
    samples = Samples([long], decode)
    assert samples.rows() == samples.rows()
    half = TEXT_TOKENS // 2
    assert samples.rows()[0].response == f"0..{half - 1}\n[... {5000 - 2 * half} tokens ...]\n{5000 - half}..4999"
    assert asked == [3, half, half]


def test_an_unknown_tracker_is_refused():
    with pytest.raises(
        ConfigError, match=r"run\.trackers: 'aim' is unknown; allowed: tensorboard, wandb, mlflow, swanlab, trackio"
    ):
        check_trackers(["tensorboard", "aim"])


def test_a_folder_of_the_name_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "swanlab").mkdir()  # where an earlier run recorded
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *(path for path in sys.path if "site-packages" not in path)])
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"run\.trackers: swanlab .*pip install swanlab"):
        check_trackers(["swanlab"])


def test_a_missing_package_names_the_key_and_the_extra(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else real(name, *rest))
    with pytest.raises(ConfigError, match=r"run\.trackers: wandb .*pip install wandb"):
        check_trackers(["wandb"])
