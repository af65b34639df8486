"""Cutting tensors into buckets: the rule that both ends of a transfer share.

Invariants:
- Tensors stay in order. One joins the open bucket where it still fits at the next multiple of `ALIGNMENT`; else it opens a new one.
- A bucket is at most `limit` bytes, unless a single tensor is larger: that one has a bucket to itself.
- Packing then unpacking gives back the same bits; the unpacked tensors are views of their buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import msgspec
import torch

from ..errors import WeightSyncError
from .plan import TransferPlan

ALIGNMENT = 64
"""Bytes. A cache line; also what vector kernels want of a tensor that is used in place."""


class Bucket(msgspec.Struct, frozen=True):
    """Tensors `[first, first + len(offsets))` of a plan, each at its byte offset, `nbytes` in all."""

    first: int
    offsets: tuple[int, ...]
    nbytes: int


def cut(sizes: Iterable[int], limit: int) -> Iterator[Bucket]:
    """The buckets for tensors of these sizes in bytes."""
    first, offsets, end = 0, [], 0
    for index, size in enumerate(sizes):
        at = _aligned(end)
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
    """Bytes of a dense tensor."""
    return dtype.itemsize * prod(shape)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[nbytes] view (or copy, where it is not contiguous) of a tensor."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # its strides may be such that torch refuses to view it
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
