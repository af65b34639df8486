"""Checkpoints are written while training goes on, and appear whole or not at all, wherever the learner is killed.

The learner that is killed runs this file as a script.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from slipstream.configs.backends import Fsdp2, Megatron
from slipstream.configs.schema import Model
from slipstream.errors import LearnerError
from slipstream.learner import checkpoint as folders
from slipstream.learner.backend import Backend
from slipstream.learner.checkpoint_folder import CheckpointState, checkpoints, path_of, prune
from slipstream.learner.fsdp2 import checkpoint as fsdp2
from slipstream.learner.fsdp2.backend import Fsdp2Backend
from slipstream.learner.megatron import checkpoint as megatron
from slipstream.learner.megatron.backend import MegatronBackend
from slipstream.tests.equality import LOSS, OPTIMIZER, TEMPERATURE, make_model, make_rows
from slipstream.tests.ranks import DEADLINE_S

MOMENTS = ("begun", "written")
"""When to be killed: before the content is written, or before it is flushed."""


class Kind(NamedTuple):
    """A backend, and the module that writes its checkpoints."""

    backend: type[Fsdp2Backend] | type[MegatronBackend]
    config: Fsdp2 | Megatron
    module: ModuleType

    def open(self, model: str) -> Backend:
        return self.backend(
            Model(path=model, dtype="float32"), OPTIMIZER, self.config, temperature=TEMPERATURE, timeout_s=DEADLINE_S
        )  # type: ignore[arg-type]


KINDS = {
    "fsdp2": Kind(Fsdp2Backend, Fsdp2(device="cpu"), fsdp2),
    "megatron": Kind(MegatronBackend, Megatron(device="cpu"), megatron),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return make_model(tmp_path_factory.mktemp("model"), tied=True)


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def backend(kind, model) -> Iterator[Backend]:
    backend = KINDS[kind].open(model)
    yield backend
    backend.close()


def step(backend: Backend, number: int) -> None:
    backend.step(make_rows(number, 0, 1, 8192), LOSS, 1e-2)


def test_a_checkpoint_holds_what_was_there_when_it_was_begun(kind, backend, tmp_path, monkeypatch):
    stepped = threading.Event()
    module = KINDS[kind].module
    write = module.dcp_save

    def late(*arguments, **options):
        assert stepped.wait(DEADLINE_S)
        write(*arguments, **options)

    monkeypatch.setattr(module, "dcp_save", late)
    step(backend, 0)
    begun = dict(backend.named_weights())
    saving = backend.save(path_of(tmp_path, 1), CheckpointState(step=1, version=1))
    step(backend, 1)
    then = dict(backend.named_weights())
    assert not saving.done()
    assert checkpoints(tmp_path) == []
    stepped.set()
    saving.result(DEADLINE_S)
    assert checkpoints(tmp_path)[-1] == path_of(tmp_path, 1)
    backend.load(path_of(tmp_path, 1))
    again = dict(backend.named_weights())
    assert all(torch.equal(again[name], begun[name]) for name in begun)
    step(backend, 1)  # with the moments of then, too
    assert all(torch.equal(tensor, then[name]) for name, tensor in backend.named_weights())


def test_a_checkpoint_that_cannot_be_written_is_named(backend, tmp_path):
    (tmp_path / "file").touch()
    saving = backend.save(path_of(tmp_path / "file", 1), CheckpointState(step=1, version=1))
    with pytest.raises(LearnerError, match=r"step-00000001 could not be written: .*Not a directory") as error:
        saving.result(DEADLINE_S)
    assert not error.value.final


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_it_is_written_leaves_the_one_before(model, tmp_path, kind, backend, moment):
    command = [sys.executable, __file__, kind, model, str(tmp_path), moment]
    assert subprocess.run(command, timeout=DEADLINE_S, check=False).returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob(".step-*")] == [".step-00000002.partial"]
    assert checkpoints(tmp_path) == [path_of(tmp_path, 1)]
    assert backend.load(path_of(tmp_path, 1)) == CheckpointState(step=1, version=11)
    saved = load_file(tmp_path / "weights")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in backend.named_weights())
    backend.save(path_of(tmp_path, 2), CheckpointState(step=2, version=12)).result(DEADLINE_S)
    prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "weights"]
    assert backend.load(path_of(tmp_path, 2)) == CheckpointState(step=2, version=12)


def be_killed(kind: str, model: str, root: Path, moment: str) -> None:
    backend = KINDS[kind].open(model)
    step(backend, 0)
    save_file(dict(backend.named_weights()), root / "weights")
    backend.save(path_of(root, 1), CheckpointState(step=1, version=11)).result(DEADLINE_S)
    step(backend, 1)
    where = {"begun": (KINDS[kind].module, "dcp_save"), "written": (folders, "replace_directory")}
    setattr(*where[moment], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    backend.save(path_of(root, 2), CheckpointState(step=2, version=12)).result(DEADLINE_S)


def test_a_checkpoint_that_is_damaged_names_the_way_past_it(tmp_path: Path) -> None:
    for step in (2, 4, 10):
        path_of(tmp_path, step).mkdir()
        (path_of(tmp_path, step) / folders.STATE_FILE).write_text("{}")
    error = str(folders.unreadable(path_of(tmp_path, 10), EOFError()))
    assert "step-00000010 cannot be loaded: EOFError; " in error
    assert f"move it out of {tmp_path}, or remove it, to resume from the one before, step-00000004" in error
    assert "none before it" in str(folders.unreadable(path_of(tmp_path, 2), EOFError()))


if __name__ == "__main__":
    be_killed(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
