"""One version of the policy on the learner: tensors that are stored until the next, the cut into buckets, and two proofs.

The checksum proves that the bytes arrived. The canary proves that they were loaded: it finds a stale packed copy, a wrong name, a
layer that the loader skipped.

Invariants:
- Every number in a snapshot is finite. A snapshot never changes, and outlives the push: a late replica gets the same bytes.
- The tensors are stored in a file without a name, which the kernel removes with the process: a version takes no memory that another
  process could not have.
- The checksum (xxh3, 64 bit) is over the bytes of all tensors in the plan's order; it does not depend on how they travel. xxhash
  releases the interpreter lock, so an engine's other threads go on.
- Buckets keep the order of tensors. A tensor joins the open bucket where it fits at the next multiple of `ALIGNMENT`, else it
  opens a new one. A bucket is at most `limit` bytes, unless it holds a single larger tensor.
- Packing and unpacking give back the same bits; unpacked tensors are views of their buckets.

Imported by vLLM's and SGLang's processes: only packages that both have may be imported here.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, overload

import msgspec
import torch
import xxhash

from ..common.tasks import in_thread
from ..errors import DeadlineExceeded, StateError, WeightSyncError, with_deadline
from . import fp8
from .plan import Source, TransferPlan

WRITTEN_AT_ONCE = 8 << 20  # bytes that arrive before they are written, in a thread, while the next arrive
WRITE_S = 120.0  # longest write of one such part, which may be one large tensor
ALIGNMENT = 64  # bytes. A cache line; also what vector kernels want of a tensor that is used in place.


class Canary(msgspec.Struct, frozen=True):
    """A fixed prompt of T tokens, and the T - 1 log-probs in nats that the learner computes for it at temperature 1."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def check(self) -> None:
        """Raises StateError where the lengths do not match, WeightSyncError where a log-prob is not finite."""
        if len(self.logprobs) != max(0, len(self.token_ids) - 1):
            raise StateError(
                f"{len(self.logprobs)} canary log-probs for {len(self.token_ids)} tokens; one fewer is needed"
            )
        if not all(map(math.isfinite, self.logprobs)):
            raise WeightSyncError(
                "the learner's own log-probs of the canary are not finite, so its weights are not pushed; lower "
                "learner.optimizer.lr and resume from the checkpoint before"
            )

    def max_difference(self, logprobs: Sequence[float]) -> float:
        """Largest difference in nats between a replica's log-probs and the learner's; infinite where either is not a number."""
        measured = torch.tensor(logprobs, dtype=torch.float64)
        expected = torch.tensor(self.logprobs, dtype=torch.float64)
        if measured.shape != expected.shape:
            return math.inf
        return float(torch.nan_to_num((measured - expected).abs(), nan=math.inf).max())


NO_CANARY = Canary((), ())


class StoredTensors(Sequence[torch.Tensor]):
    """Tensors that were added one by one; each is read when it is asked for, from any thread. `folder` is where the file is, and
    needs the space.

    Attributes:
        layout: dtype and shape of each, on the device `meta`.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.layout: list[torch.Tensor] = []
        self._offsets: list[int] = []
        self._end = 0
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed with the last reference

    def add(self, tensor: torch.Tensor) -> None:
        """Append a tensor in host memory. Raises OSError."""
        data = as_bytes(tensor).numpy().data
        self.layout.append(torch.empty_like(tensor, device="meta"))
        self._offsets.append(self._end)
        while data:
            written = os.pwrite(self._file.fileno(), data, self._end)
            data, self._end = data[written:], self._end + written

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        layout = self.layout[index]
        read = torch.empty(layout.nbytes, dtype=torch.uint8)
        at, left = self._offsets[index], read.numpy().data
        while left:
            count = os.preadv(self._file.fileno(), [left], at)
            if not count:
                raise OSError(f"a file of stored tensors ends before byte {at}")
            left, at = left[count:], at + count
        return read.view(layout.dtype).view(layout.shape)

    def __len__(self) -> int:
        return len(self.layout)


def layout_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Tensors of the same dtypes and shapes; nothing is read."""
    return tensors.layout if isinstance(tensors, StoredTensors) else tensors


class WeightSnapshot(msgspec.Struct, frozen=True):
    """One version's tensors, in host memory or stored in a file."""

    version: int
    names: tuple[str, ...]
    tensors: Sequence[torch.Tensor]
    checksum: str
    canary: Canary = NO_CANARY

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in layout_of(self.tensors))

    def plan(self, source: Source, *, bucket_bytes: int, keep: bool, acks: str, receiver: str) -> TransferPlan:
        return TransferPlan(
            version=self.version,
            names=self.names,
            dtypes=tuple(_named(t.dtype) for t in layout_of(self.tensors)),
            shapes=tuple(tuple(t.shape) for t in layout_of(self.tensors)),
            bucket_bytes=bucket_bytes,
            source=source,
            checksum=self.checksum,
            keep=keep,
            acks=acks,
            receiver=receiver,
        )


async def take_snapshot(
    version: int, named_weights: Iterable[tuple[str, torch.Tensor]], folder: Path, canary: Canary = NO_CANARY
) -> WeightSnapshot:
    """Write the weights to a file without a name in `folder`. Iterating `named_weights` may be a collective: it happens here, in
    the caller's thread, while a thread writes what came before. Raises WeightSyncError: a tensor, or a log-prob of the canary, is
    not finite; the file cannot be written, or not within `WRITE_S` for each part. StateError: the canary has not one log-prob fewer
    than tokens."""
    canary.check()
    try:
        tensors = StoredTensors(folder)
    except OSError as error:
        raise _unwritable(version, folder, error) from error
    names, total = list[str](), xxhash.xxh3_64()

    def write(arrived: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in arrived:
            if not _is_finite(tensor):
                raise WeightSyncError(
                    f"version {version} is not pushed: {name} holds numbers that are not finite in {_named(tensor.dtype)}; lower "
                    "learner.optimizer.lr and resume from the checkpoint before"
                )
            total.update(as_bytes(tensor).numpy().data)
            tensors.add(tensor)

    writing: asyncio.Future[None] | None = None
    arrived: list[tuple[str, torch.Tensor]] = []
    try:
        for name, tensor in named_weights:
            names.append(name)
            arrived.append((name, tensor.detach().cpu()))
            del tensor  # it may be a whole embedding
            if sum(tensor.nbytes for _, tensor in arrived) >= WRITTEN_AT_ONCE:
                if writing is not None:
                    await _written(writing, version, folder)
                writing, arrived = in_thread(functools.partial(write, arrived), f"snapshot-{version}"), []
        if writing is not None:
            await _written(writing, version, folder)
        await _written(in_thread(functools.partial(write, arrived), f"snapshot-{version}"), version, folder)
    except OSError as error:
        raise _unwritable(version, folder, error) from error
    finally:
        if writing is not None:
            writing.cancel()  # where the iteration raises the thread is abandoned, with its file
        del writing  # whose error refers to this frame, and so to the file
    return WeightSnapshot(version, tuple(names), tensors, total.hexdigest(), canary)


async def _written(writing: asyncio.Future[None], version: int, folder: Path) -> None:
    """Raises what the thread raises, and WeightSyncError where the disk hangs: then the thread is abandoned with the file."""
    waits_for = f"a part of version {version} to be written to {folder}"
    try:
        await with_deadline(WRITE_S, writing, who="the learner", waits_for=waits_for, hint="is the disk stuck?")
    except DeadlineExceeded as error:
        raise WeightSyncError(str(error)) from error
    finally:
        del writing


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether every number is; torch compares no numbers in fp8, where all but NaN are."""
    if tensor.dtype == fp8.DTYPE:
        return not bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any())
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


def _unwritable(version: int, folder: Path, error: OSError) -> WeightSyncError:
    return WeightSyncError(
        f"version {version} is not pushed: it cannot be written to {folder}: {error.strerror or error}"
    )


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """The checksum of tensors in host memory, in this order: 16 hex digits."""
    total = xxhash.xxh3_64()
    for tensor in tensors:
        total.update(as_bytes(tensor).numpy().data)
    return total.hexdigest()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[nbytes] view (or copy, where it is not contiguous) of a tensor."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # its strides may be such that torch refuses to view it
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


class Bucket(msgspec.Struct, frozen=True):
    """Tensors `[first, first + len(offsets))` of a plan, each at its byte offset, `nbytes` in all."""

    first: int
    offsets: tuple[int, ...]
    nbytes: int


def cut(sizes: Iterable[int], limit: int) -> Iterator[Bucket]:
    """The buckets for tensors of these sizes in bytes."""
    first, offsets, end = 0, [], 0
    for index, size in enumerate(sizes):
        at = -(-end // ALIGNMENT) * ALIGNMENT
        if offsets and at + size > limit:
            yield Bucket(first, tuple(offsets), end)
            first, offsets, at = index, [], 0
        offsets.append(at)
        end = at + size
    if offsets:
        yield Bucket(first, tuple(offsets), end)


def pack(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[torch.Tensor]:
    """uint8 buckets in host memory that hold the bytes of `tensors`."""
    for bucket in cut((t.nbytes for t in layout_of(tensors)), limit):
        data = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for index, at in enumerate(bucket.offsets, start=bucket.first):
            tensor = as_bytes(tensors[index])
            data[at : at + len(tensor)] = tensor
        yield data


def unpack(plan: TransferPlan, bucket: Bucket, data: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each entry of `bucket`, as views of `data` (uint8[nbytes])."""
    for index, at in enumerate(bucket.offsets, start=bucket.first):
        dtype, shape = dtype_of(plan.dtypes[index]), plan.shapes[index]
        yield plan.names[index], data[at : at + nbytes_of(dtype, shape)].view(dtype).view(shape)


def buckets_of(plan: TransferPlan) -> list[Bucket]:
    """The buckets of a whole plan, in the order in which they travel."""
    sizes = (nbytes_of(dtype_of(d), s) for d, s in zip(plan.dtypes, plan.shapes, strict=True))
    return list(cut(sizes, plan.bucket_bytes))


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype called `name`. Raises WeightSyncError for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"{name!r} is not a torch dtype")
    return dtype


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def nbytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * math.prod(shape)
