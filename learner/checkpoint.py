"""Checkpoints of any backend: folders that appear whole or not at all, and the Hugging Face folder that is exported.

    save ──copy──> training goes on
             └──> a thread writes ──flush──rename──> the future is done: only now may anybody rely on the checkpoint

    root/step-00000010/       weights that are trained and their AdamW state, in the backend's own format
                   state.json which step and version they are

Invariants:
- Everything is written and flushed into a hidden sibling, then renamed; a folder named `step-*` is complete.
- Names that start with a dot are leftovers of a crash: they are never read, and the next save or prune removes them.
"""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from ..durable import flush
from ..errors import CheckpointError, LearnerError
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


class CheckpointState(msgspec.Struct, frozen=True):
    """What a checkpoint contains: optimizer batches done, and the policy version that they made."""

    step: int
    version: int


class Saver:
    """Collective. Writes checkpoints beside training, in a thread of its own.

    Args:
        group: all ranks, for that thread alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._thread: threading.Thread | None = None

    def begin(self, directory: Path, state: CheckpointState, write: Callable[[Path], None]) -> Future[None]:
        """Collective. Have `write`, as in `appear`, write what nobody changes any more, and add `state`. The future is done when it
        is all there.

        The future raises LearnerError where any rank could not write, or was lost; then `directory` is as it was before.
        """
        written = Future[None]()

        def write_all(folder: Path) -> None:
            write(folder)
            if dist.get_rank() == 0:
                (folder / STATE_FILE).write_bytes(msgspec.json.encode(state))

        def work() -> None:
            try:
                appear(directory, write_all, self.group)
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


def unreadable(directory: Path, error: BaseException) -> LearnerError:
    """What to raise where a checkpoint could not be read: final, unless a disk or a rank that may come back was to blame."""
    causes = [told[0] for told in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    told = f"checkpoint {directory} cannot be loaded: {_reason(error)}; resume from another"
    if any(isinstance(cause, OSError) or is_lost(cause) for cause in causes):
        return LearnerError(told, final=False)
    return CheckpointError(told)


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
    except (OSError, RuntimeError, CheckpointException, SafetensorError) as error:
        raise LearnerError(
            f"{directory} could not be written: {_reason(error)}; look at the disk and at the other ranks' logs",
            final=False,
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
            flush(path)
        if directory.exists():
            directory.rename(replaced)
        hidden.rename(directory)
        flush(directory.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    dist.barrier(group)
