"""One version of the policy on the learner's side: in host memory, in the dtype that travels, with its checksum.

Invariants:
- Every number in a snapshot is finite.
- A snapshot never changes, and outlives the push: whoever comes later gets the same bytes without the learner's ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import torch

from ..errors import WeightSyncError
from .buckets import dtype_of
from .checksum import checksum
from .plan import Source, TransferPlan
from .replica import in_thread


class Snapshot(msgspec.Struct, frozen=True):
    """One version's tensors, host memory, all of one dtype."""

    version: int
    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    checksum: str

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def plan(self, source: Source, *, bucket_bytes: int, keep: bool, receipts: str, receiver: str) -> TransferPlan:
        """What `receiver` is told about the way that this snapshot comes to it."""
        return TransferPlan(
            version=self.version,
            names=self.names,
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in self.tensors),
            shapes=tuple(tuple(t.shape) for t in self.tensors),
            bucket_bytes=bucket_bytes,
            source=source,
            checksum=self.checksum,
            keep=keep,
            receipts=receipts,
            replica=receiver,
        )


async def take(version: int, named_weights: Iterable[tuple[str, torch.Tensor]], dtype: str) -> Snapshot:
    """Copy the weights. Iterating `named_weights` may be a collective: it happens here, in the caller's thread, and at once. The
    checksum is computed in another thread, so that the loop goes on.

    Raises:
        WeightSyncError: a tensor holds a number that is not finite.
    """
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

    return Snapshot(version, tuple(names), tuple(tensors), await in_thread(check, f"checksum-{version}"))
