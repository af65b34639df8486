"""One version of the policy on the learner: tensors in host memory in the dtype that travels, the cut into buckets, and two proofs.

The checksum proves that the bytes arrived. The canary proves that they were loaded: it finds a stale packed copy, a wrong name, a
layer that the loader skipped.

Invariants:
- Every number in a snapshot is finite. A snapshot never changes, and outlives the push: a late replica gets the same bytes.
- The checksum (xxh3, 64 bit) is over the bytes of all tensors in the plan's order; it does not depend on how they travel. xxhash
  releases the interpreter lock, so an engine's other threads go on.
- Buckets keep the order of tensors. A tensor joins the open bucket where it fits at the next multiple of `ALIGNMENT`, else it
  opens a new one. A bucket is at most `limit` bytes, unless it holds a single larger tensor.
- Packing and unpacking give back the same bits; unpacked tensors are views of their buckets.

Imported by vLLM's and SGLang's processes: only packages that both have may be imported here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import torch
import xxhash

from ..common.tasks import in_thread
from ..errors import StateError, WeightSyncError
from .plan import Source, TransferPlan

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


class WeightSnapshot(msgspec.Struct, frozen=True):
    """One version's tensors, host memory, all of one dtype."""

    version: int
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    checksum: str
    canary: Canary = NO_CANARY

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def plan(self, source: Source, *, bucket_bytes: int, keep: bool, acks: str, receiver: str) -> TransferPlan:
        return TransferPlan(
            version=self.version,
            names=self.names,
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in self.tensors),
            shapes=tuple(tuple(t.shape) for t in self.tensors),
            bucket_bytes=bucket_bytes,
            source=source,
            checksum=self.checksum,
            keep=keep,
            acks=acks,
            receiver=receiver,
        )


async def take_snapshot(
    version: int, named_weights: Iterable[tuple[str, torch.Tensor]], dtype: str, canary: Canary = NO_CANARY
) -> WeightSnapshot:
    """Copy the weights. Iterating `named_weights` may be a collective: it happens here, in the caller's thread. Raises
    WeightSyncError: a tensor, or a log-prob of the canary, is not finite. StateError: the canary has not one log-prob fewer than
    tokens."""
    canary.check()
    names, tensors = [], []
    for name, tensor in named_weights:
        names.append(name)
        tensors.append(torch.empty(tensor.shape, dtype=dtype_of(dtype)).copy_(tensor.detach()))

    def check() -> str:
        for name, tensor in zip(names, tensors, strict=True):
            if tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
                raise WeightSyncError(
                    f"version {version} is not pushed: {name} holds numbers that are not finite in {dtype}; lower "
                    "learner.optimizer.lr and resume from the checkpoint before"
                )
        return checksum(tensors)

    return WeightSnapshot(version, tuple(names), tuple(tensors), await in_thread(check, f"checksum-{version}"), canary)


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """The checksum of tensors in host memory, in this order: 16 hex digits."""
    total = xxhash.xxh3_64()
    for tensor in tensors:
        total.update(as_bytes(tensor).numpy().data)
    return total.hexdigest()


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
    for bucket in cut((t.nbytes for t in tensors), limit):
        data = torch.zeros(bucket.nbytes, dtype=torch.uint8)
        for tensor, at in zip(tensors[bucket.first :], bucket.offsets, strict=False):
            data[at : at + tensor.nbytes] = as_bytes(tensor)
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


def nbytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return dtype.itemsize * math.prod(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[nbytes] view (or copy, where it is not contiguous) of a tensor."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # its strides may be such that torch refuses to view it
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
