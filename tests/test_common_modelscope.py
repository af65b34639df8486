"""ModelScope as a hub: its own client library against a stand-in for its HTTP API on loopback."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from slipstream.common import modelscope
from slipstream.common.modelscope import local_folder
from slipstream.configs import load
from slipstream.configs.environments import Dataset
from slipstream.envs import task_source
from slipstream.errors import ConfigError, HubError
from slipstream.launch.cli.main import main
from slipstream.learner.hub import require_model
from slipstream.learner.model import load_tokenizer, read_config
from slipstream.learner.weight_reader import WeightFiles
from slipstream.tests.modelscope_server import ModelScopeServer, serving
from slipstream.tests.runs import SMALL, check_accounts, ledger, slipstream

KEY = "model.path"
NAME = "modelscope:tiny/policy"
ROWS = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(8)]


@pytest.fixture
def hub(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelScopeServer]:
    """A hub with a model and a data set. What is downloaded lies below `tmp_path`."""
    newer = shutil.copytree(policy, tmp_path / "newer")
    (newer / "pytorch_model.bin").write_bytes(b"of another format")
    (newer / "more").mkdir()
    (newer / "more" / "notes.txt").write_text("in a folder")
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (rows / "test.jsonl").write_text("\n".join(map(json.dumps, ROWS[:3])))
    models = {"models/tiny/policy": {"master": policy, "v2": newer}, "models/tiny/empty": {"master": tmp_path / "none"}}
    with serving(models | {"datasets/tiny/rows": {"master": rows}}) as server:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", server.url)
        monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("MODELSCOPE_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("MODELSCOPE_API_TOKEN", "")
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        yield server


def test_a_tokenizer_and_a_config_come_without_weights(hub: ModelScopeServer, policy: Path) -> None:
    require_model(NAME, KEY)
    tokenizer = load_tokenizer(NAME)
    assert tokenizer.get_vocab() == load_tokenizer(str(policy)).get_vocab()
    assert tokenizer.name_or_path == "tiny/policy"  # by which formats of chats are known
    assert read_config(NAME).vocab_size == read_config(str(policy)).vocab_size
    assert not [asked for asked in hub.asked if asked.endswith(".safetensors")]


def test_weights_are_those_of_the_hub_and_need_no_hub_the_next_time(hub: ModelScopeServer, policy: Path) -> None:
    read_config(NAME)
    first = len(hub.asked)
    got, expected = WeightFiles(NAME), WeightFiles(str(policy))
    assert set(got) == set(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    downloaded = [asked for asked in hub.asked[first:] if asked.startswith("repo ")]
    assert {Path(asked).suffix for asked in downloaded} == {".safetensors"}  # what was here is not asked for again
    asked = list(hub.asked)
    require_model(NAME, KEY)
    load_tokenizer(NAME)
    assert local_folder(NAME, KEY, weights=True) == local_folder(NAME, KEY, weights=False)
    assert hub.asked == asked


def test_a_revision_has_a_folder_of_its_own_and_all_its_files_but_other_formats(
    hub: ModelScopeServer, tmp_path: Path
) -> None:
    newer = Path(local_folder(f"{NAME}@v2", KEY, weights=True))
    assert newer != Path(local_folder(NAME, KEY, weights=True))
    found = {str(path.relative_to(newer)) for path in newer.rglob("*") if path.is_file()}
    there = {str(path.relative_to(tmp_path / "newer")) for path in (tmp_path / "newer").rglob("*") if path.is_file()}
    assert found - {modelscope.MARKS[True]} == there - {"pytorch_model.bin"}


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("modelscope:tiny/absent", ("gave no model of that name", "record not found", "MODELSCOPE_API_TOKEN")),
        (f"{NAME}@v9", ("tiny/policy has no revision v9 on ModelScope; it has master, v2",)),
        ("modelscope:tiny/empty", ("holds no usable config: it has no config.json",)),
        ("modelscope:policy", ("is not of the form modelscope:ORG/NAME or modelscope:ORG/NAME@REVISION",)),
        ("modelscope:../policy", ("is not of the form modelscope:ORG/NAME",)),
        (f"{NAME}@", ("is not of the form modelscope:ORG/NAME",)),
    ],
)
def test_a_name_that_is_not_there_is_one_line_before_anything_starts(
    path: str, words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "quickstart", f"model.path={path}", f"run.dir={tmp_path}/run"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"slipstream: model.path: '{path}'")
    assert line.count("\n") == 1
    assert all(word in line for word in words), line
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("hub")
def test_no_connection_is_one_line_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", nowhere)
    assert main(["train", "quickstart", f"model.path={NAME}", f"run.dir={tmp_path}/run"]) == 2
    line = capsys.readouterr().err
    assert line.startswith(f"slipstream: model.path: '{NAME}': ModelScope's hub at {nowhere} did not answer: ")
    assert "refused" in line
    assert "MODELSCOPE_ENDPOINT names another" in line
    assert line.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("hub")
def test_a_hub_that_says_nothing_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(modelscope, "HUB_S", 0.2)
        with pytest.raises(HubError, match=r"did not answer: no answer within 0\.2 s; is it reached from here\?"):
            require_model(NAME, KEY)


@pytest.mark.usefixtures("hub")
def test_what_another_client_has_downloaded_is_used_where_the_hub_cannot_be_reached(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "cache" / "models" / "tiny--policy" / "snapshots" / "master"
    shutil.copytree(policy, place)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    require_model(NAME, KEY)
    assert local_folder(NAME, KEY, weights=True) == str(place)


def test_a_file_that_does_not_arrive_is_named_and_the_rest_is_not_taken_for_the_whole(
    hub: ModelScopeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.broken.add("model.safetensors")
    with pytest.raises(HubError, match=r"model\.path: 'modelscope:tiny/policy': model\.safetensors could not be"):
        local_folder(NAME, KEY, weights=True)
    hub.broken.clear()
    with monkeypatch.context() as patch:
        patch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
        with pytest.raises(HubError, match="did not answer"):
            local_folder(NAME, KEY, weights=True)
    assert (Path(local_folder(NAME, KEY, weights=True)) / "model.safetensors").is_file()


def test_a_file_outside_of_the_folder_is_refused(hub: ModelScopeServer) -> None:
    hub.more.append({"Name": "evil", "Path": "../../evil", "Type": "blob", "Size": 1})
    with pytest.raises(ConfigError, match=r"lists the file '\.\./\.\./evil', which is outside of its folder"):
        local_folder(NAME, KEY, weights=False)


@pytest.mark.usefixtures("hub")
def test_without_its_package_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    with pytest.raises(
        ConfigError, match=r"'modelscope:tiny/policy' needs the package modelscope-hub .*\.\[modelscope\]"
    ):
        require_model(NAME, KEY)


@pytest.mark.usefixtures("hub")
def test_a_data_set_comes_from_modelscope() -> None:
    section = Dataset(path="modelscope:tiny/rows", reward="exact", evaluation="modelscope:tiny/rows@test")
    source, held_out = task_source(section, "train", 0), task_source(section, "eval", 0)
    assert (len(source), len(held_out)) == (8, 3)
    assert source.task(0).payload["row"] in ROWS
    with pytest.raises(ConfigError, match=r"env\.path: 'modelscope:tiny/absent': .* gave no dataset of that name"):
        task_source(Dataset(path="modelscope:tiny/absent", reward="exact"), "train", 0)
    with pytest.raises(ConfigError, match=r"env\.path: modelscope:tiny/rows@other is no file, and .*other"):
        task_source(Dataset(path="modelscope:tiny/rows@other", reward="exact"), "train", 0)


def test_a_run_trains_a_model_of_modelscope(hub: ModelScopeServer, tmp_path: Path) -> None:
    """Its replicas get the folder, its learner and workers the name."""
    run = tmp_path / "run"
    engine = "rollout.engine.kind=fake"
    slipstream("train", "quickstart", f"model.path={NAME}", f"run.dir={run}", engine, *SMALL, "learner.steps=1")
    assert ledger(run)["trained"] > 0
    check_accounts(run)
    assert load(str(run / "config.yaml")).model.path == NAME
    assert any(asked.endswith("model.safetensors") for asked in hub.asked)
