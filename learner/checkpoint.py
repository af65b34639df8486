"""Checkpoints: torch's distributed checkpoint inside a folder that appears whole or not at all.

    root/step-00000010/       weights that are trained and their AdamW state by parameter name, any number of ranks can read them
                   state.json which step and version they are

    save ──copy──> training goes on
             └──> a thread writes ──flush──rename──> the future is done: only now may anybody rely on the checkpoint

Invariants:
- Everything is written and flushed into a hidden sibling, then renamed; a folder named `step-*` is complete.
- Names that start with a dot are leftovers of a crash: they are never read, and the next save or prune removes them.
- What is written is what was there when `save` was called, whatever is trained meanwhile.
"""

from __future__ import annotations

import os
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from transformers import PreTrainedModel

from ..errors import CheckpointError, LearnerError
from . import lora
from .lost import is_lost
from .model import load_tokenizer

STATE_FILE = "state.json"

READING = (
    OSError,
    EOFError,
    RuntimeError,
    ValueError,
    msgspec.DecodeError,
    pickle.UnpicklingError,  # torch's metadata
    CheckpointException,
)
"""What missing and damaged files are told by."""

CLOSE_S = 5.0
"""For a write that is under way when the learner ends: whoever waited for it has done so already, or has given up."""

TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)

MOMENT = ("optimizer.state.", ".exp_avg")
"""Around the name of a trained parameter, the key of its first moment."""

Shapes = Mapping[str, tuple[int, ...]]


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


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and what crashes left behind. One rank calls it, between saves."""
    for path in [*checkpoints(root)[:-keep], *root.glob(".step-*")]:
        shutil.rmtree(path)


def read_state(directory: Path) -> CheckpointState:
    """What a complete checkpoint contains."""
    return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=CheckpointState)


class Saver:
    """Collective. Writes checkpoints beside training: copies what is to be saved, then writes in a thread of its own.

    Args:
        group: all ranks, for this thread alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._thread: threading.Thread | None = None

    def save(
        self, directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: CheckpointState
    ) -> Future[None]:
        """Collective. Begin to write `directory`, replacing one of the same name; the future is done when it is there.

        The future raises LearnerError where any rank could not write, or was lost; then `directory` is as it was before.
        """
        # Copies, CPU tensors too: the next step changes the originals while the thread writes.
        stager = DefaultStager(StagingOptions(False, False, False, False))
        content = stager.stage(_content(model, optimizer))
        stager.close()
        assert isinstance(content, dict)
        written = Future[None]()

        def write(folder: Path) -> None:
            dcp_save(content, checkpoint_id=folder, process_group=self._group)
            if dist.get_rank() == 0:
                (folder / STATE_FILE).write_bytes(msgspec.json.encode(state))

        def work() -> None:
            try:
                appear(directory, write, self._group)
            except BaseException as error:  # whatever it is, the loop that waits for the future raises it
                written.set_exception(error)
            else:
                written.set_result(None)

        # A daemon: a disk that hangs must not keep the process.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()
        return written

    def close(self) -> None:
        """Return when what was begun is written or has failed, or after `CLOSE_S`."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)


def load(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, of: str) -> CheckpointState:
    """Collective. Read `directory` into `model`, which is that `of` a folder, and `optimizer`, sharded as they are now.

    Raises:
        CheckpointError: the folder is incomplete, or of another model.
        LearnerError: it could not be read this time.
    """
    try:
        state = read_state(directory)
        content = _content(model, optimizer)
        entries = FileSystemReader(directory).read_metadata().state_dict_metadata.items()
        # The names of moments are those of what is trained; the state dict of a tied model has its head twice.
        saved = {
            name.removeprefix(MOMENT[0]).removesuffix(MOMENT[1]): tuple(entry.size)
            for name, entry in entries
            if name.startswith(MOMENT[0]) and name.endswith(MOMENT[1]) and isinstance(entry, TensorStorageMetadata)
        }
        trained = {name: tuple(moments["exp_avg"].shape) for name, moments in content["optimizer"]["state"].items()}
        if difference := _difference(saved, trained):
            raise CheckpointError(f"checkpoint {directory} is of another model than {of!r}: {difference}")
        dcp_load(content, checkpoint_id=directory)
    except READING as error:
        raise unreadable(directory, error) from error
    set_state_dict(
        model,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
        options=TRAINED_ONLY,
    )
    return state


def _content(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> STATE_DICT_TYPE:
    """What a checkpoint holds: `model`, trained weights by name, and `optimizer`, AdamW's state and groups by those names."""
    weights, moments = get_state_dict(model, optimizer, options=TRAINED_ONLY)
    return {"model": weights, "optimizer": moments}


def _difference(saved: Shapes, ours: Shapes) -> str | None:
    """Why weights of shapes `saved` are not those of `ours`, in words; None where they are."""
    ranks = [lora.rank_of(shapes) for shapes in (saved, ours)]
    if ranks[0] != ranks[1]:
        held, trained = (f"adapters of rank {rank}" if rank else "all weights" for rank in ranks)
        return f"it holds {held}, and {trained} are trained here; set learner.backend.lora_rank={ranks[0]} to resume it"
    for name in sorted(saved.keys() | ours.keys()):
        there, here = saved.get(name), ours.get(name)
        if there != here:
            return f"there {name} is {_shown(there)}, here {_shown(here)}"
    return None


def _shown(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else f"of shape {list(shape)}"


def unreadable(directory: Path, error: BaseException) -> LearnerError:
    """What to raise where a checkpoint could not be read: final, unless a disk or a rank that may come back was to blame."""
    causes = [told[0] for told in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    passing = any(isinstance(cause, OSError) or is_lost(cause) for cause in causes)
    kind = LearnerError if passing else CheckpointError
    return kind(f"checkpoint {directory} cannot be loaded: {_reason(error)}; resume from another")


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


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


def appear(directory: Path, write: Callable[[Path], None], group: dist.ProcessGroup | None = None) -> None:
    """Collective over `group`. Let every rank `write` into a hidden folder, flush it, then give it its name in one rename.

    Raises:
        LearnerError: a rank could not write, or was lost; then `directory` is as it was before.
    """
    try:
        _appear(directory, write, group)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise LearnerError(
            f"{directory} could not be written: {_reason(error)}; look at the disk and at the other ranks' logs"
        ) from error


def _appear(directory: Path, write: Callable[[Path], None], group: dist.ProcessGroup | None) -> None:
    hidden = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    first = dist.get_rank() == 0
    if first:
        for leftover in (hidden, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        hidden.mkdir(parents=True)
    dist.barrier(group)
    write(hidden)
    dist.barrier(group)
    if first:
        for path in [*hidden.rglob("*"), hidden]:
            _flush(path)
        if directory.exists():
            directory.rename(replaced)
        hidden.rename(directory)
        _flush(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier(group)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
