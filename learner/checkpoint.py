"""Checkpoints of any backend, and the exported Hugging Face folder.

    save ──copy──> training goes on
             └──> a thread writes ──flush──rename──> the future is done: the checkpoint is complete

Everything is written and flushed into a hidden sibling, then renamed: a folder named `step-*` is complete (`checkpoint_folder.py`).
It holds the weights that are trained and their AdamW state in the backend's own format, and `state.json`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from pickle import UnpicklingError

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from ..common.fsio import apply_umask, replace_directory
from ..common.image_processor import ImageProcessor
from ..errors import CheckpointError, LearnerError
from ..weightsync.transports import write_safetensors
from .checkpoint_folder import STATE_FILE, CheckpointState, way_past
from .distributed import is_peer_failure
from .model import has_images, load_tokenizer

# Errors that mean missing or damaged files.
READING = (OSError, EOFError, RuntimeError, ValueError, msgspec.DecodeError, UnpicklingError, CheckpointException)

SHARD_BYTES = 1 << 30  # of a file of an exported model

CLOSE_S = 5.0  # longest wait at the learner's end for a write that is under way


class Saver:
    """Writes checkpoints in a thread of its own, the only user of `group`, which holds all ranks, while training goes on."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._thread: threading.Thread | None = None

    def begin(self, directory: Path, state: CheckpointState, write: Callable[[Path], None]) -> Future[None]:
        """Collective. Call `write`, as in `write_directory`, on data that no longer changes, and add `state`. The future is
        done when all is on disk. It raises LearnerError where a rank could not write or was lost; `directory` is then unchanged."""
        written = Future[None]()
        written.set_running_or_notify_cancel()  # a write that is under way ends, whether or not the loop still waits for it

        def write_all(folder: Path) -> None:
            write(folder)
            if dist.get_rank() == 0:
                (folder / STATE_FILE).write_bytes(msgspec.json.encode(state))

        def work() -> None:
            try:
                write_directory(directory, write_all, self.group)
            except BaseException as error:  # the loop that waits for the future raises it
                written.set_exception(error)
            else:
                written.set_result(None)

        # A daemon: a disk that hangs must not keep the process.
        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()
        return written

    def close(self) -> None:
        """Return when the write that was begun has ended, or after `CLOSE_S`."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)


def unreadable(directory: Path, error: BaseException) -> LearnerError:
    """The error for a checkpoint that could not be read: final, unless the cause is a disk or rank that may recover."""
    causes = [failure[0] for failure in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    message = f"checkpoint {directory} cannot be loaded: {_reason(error)}; {way_past(directory)}"
    if any(isinstance(cause, OSError) or is_peer_failure(cause) for cause in causes):
        return LearnerError(message, final=False)
    return CheckpointError(message)


def _reason(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def export(
    directory: Path,
    model: PreTrainedModel,
    weights: Iterator[tuple[str, torch.Tensor]],
    source: str,
    architecture: str | None = None,
) -> None:
    """Collective. A Hugging Face folder of `weights` with the config of `model` and the tokenizer of `source`; `architecture` where
    it is not the class of `model`."""

    def write(folder: Path) -> None:
        dtype = write_weights(folder, weights)
        if dist.get_rank() == 0:
            model.config.architectures = [architecture or type(model).__name__.removeprefix("FSDP")]
            model.config.dtype = dtype
            model.config.save_pretrained(folder)
            if (generation := getattr(model, "generation_config", None)) is not None:  # a classifier has none
                generation.save_pretrained(folder)
            load_tokenizer(source).save_pretrained(folder)
            if has_images(source):
                ImageProcessor(source).image_processor.save_pretrained(folder)
            apply_umask(folder)

    write_directory(directory, write)


def write_weights(folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> torch.dtype | None:
    """Write safetensors of at most `SHARD_BYTES` or a single larger tensor, and where these are several their index; the files of
    one are written before more is taken. Returns the dtype of the first tensor, None where there is none."""
    parts: list[tuple[Path, list[str]]] = []
    held: dict[str, torch.Tensor] = {}
    dtype, total = None, 0

    def flush() -> None:
        parts.append((folder / f"part-{len(parts)}", list(held)))
        write_safetensors(parts[-1][0], list(held), list(held.values()), {"format": "pt"})
        held.clear()

    for name, tensor in weights:
        if held and sum(one.nbytes for one in held.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        held[name] = tensor.cpu()
        dtype, total = dtype or tensor.dtype, total + tensor.nbytes
    if held:
        flush()
    named = ["model.safetensors"] if len(parts) == 1 else []
    named = named or [f"model-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    for (path, _), name in zip(parts, named, strict=True):
        path.rename(folder / name)
    if len(parts) > 1:
        files = {tensor: name for (_, tensors), name in zip(parts, named, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_bytes(msgspec.json.format(msgspec.json.encode(index)))
    return dtype


def write_directory(directory: Path, write: Callable[[Path], None], group: dist.ProcessGroup | None = None) -> None:
    """Collective over `group`. Every rank calls `write` on a hidden folder; it is flushed, then renamed to `directory`.
    Raises LearnerError where a rank could not write, or was lost; `directory` is then unchanged."""
    hidden = directory.with_name(f".{directory.name}.partial")
    first = dist.get_rank() == 0
    try:
        if first:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
        dist.barrier(group)
        write(hidden)
        dist.barrier(group)
        if first:
            replace_directory(directory, hidden)
        dist.barrier(group)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise LearnerError(
            f"{directory} could not be written: {_reason(error)}; look at the disk and at the other ranks' logs",
            final=False,
        ) from error
