"""Checkpoints: torch's distributed checkpoint inside a folder that appears whole or not at all.

    root/step-00000010/       weights and AdamW state by parameter name, any number of ranks can read them
                   state.json which step and version they are

Invariants:
- Everything is written and flushed into a hidden sibling, then renamed; a folder named `step-*` is complete.
- Names that start with a dot are leftovers of a crash: they are never read, and the next save or prune removes them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import PreTrainedModel

from ..errors import CheckpointError, LearnerError
from .model import load_tokenizer

STATE_FILE = "state.json"


class CheckpointState(msgspec.Struct, frozen=True):
    """What a checkpoint contains: optimizer batches done, and the policy version that they made."""

    step: int
    version: int


def path_of(root: Path, step: int) -> Path:
    """Folder of the checkpoint at `step`."""
    return root / f"step-{step:08d}"


def checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in root.glob("step-*") if (path / STATE_FILE).is_file())


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint, None where there is none."""
    return next(reversed(checkpoints(root)), None)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and what crashes left behind. One rank calls it, between saves."""
    for path in [*checkpoints(root)[:-keep], *root.glob(".step-*")]:
        shutil.rmtree(path)


def read_state(directory: Path) -> CheckpointState:
    """What a complete checkpoint contains."""
    return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=CheckpointState)


def save(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: CheckpointState) -> None:
    """Collective. Write `directory`, replacing one of the same name."""

    def write(folder: Path) -> None:
        weights, moments = get_state_dict(model, optimizer)
        dcp_save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        if dist.get_rank() == 0:
            (folder / STATE_FILE).write_bytes(msgspec.json.encode(state))

    appear(directory, write)


def load(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointState:
    """Collective. Read `directory` into `model` and `optimizer`, sharded as they are now.

    Raises:
        LearnerError: the folder is missing, incomplete, or of another model.
    """
    try:
        state = read_state(directory)
        weights, moments = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": moments}
        dcp_load(content, checkpoint_id=directory)
    except (OSError, msgspec.DecodeError, RuntimeError, ValueError, CheckpointException) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        kind = LearnerError if isinstance(error, OSError) else CheckpointError  # a disk may come back
        raise kind(f"checkpoint {directory} cannot be loaded: {reason}; resume from another") from error
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    return state


def export(directory: Path, model: PreTrainedModel, weights: Iterator[tuple[str, torch.Tensor]], source: str) -> None:
    """Collective. A Hugging Face folder of `weights` with the config of `model` and the tokenizer of `source`."""

    def write(folder: Path) -> None:
        first = dist.get_rank() == 0
        tensors = {name: tensor.cpu() for name, tensor in weights if first}
        if first:
            save_torch_state_dict(tensors, folder, metadata={"format": "pt"})
            model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
            model.config.dtype = next(iter(tensors.values())).dtype
            model.config.save_pretrained(folder)
            if model.generation_config is not None:
                model.generation_config.save_pretrained(folder)
            load_tokenizer(source).save_pretrained(folder)

    appear(directory, write)


def appear(directory: Path, write: Callable[[Path], None]) -> None:
    """Collective. Let every rank `write` into a hidden folder, flush it, then give it its name in one rename."""
    hidden = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    first = dist.get_rank() == 0
    if first:
        for leftover in (hidden, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        hidden.mkdir(parents=True)
    dist.barrier()
    write(hidden)
    dist.barrier()
    if first:
        for path in [*hidden.rglob("*"), hidden]:
            _flush(path)
        if directory.exists():
            directory.rename(replaced)
        hidden.rename(directory)
        _flush(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
