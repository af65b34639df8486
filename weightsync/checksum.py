"""The checksum that proves one version's bytes on both ends: xxh3, 64 bit, over all tensors in the plan's order.

Invariants:
- It depends on the tensors' bytes alone: not on how they travelled, nor on names, strides or buckets.
- Hashing big tensors leaves the interpreter free: xxhash drops the lock, so an engine's other threads go on.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

from .buckets import as_bytes


class Checksum:
    """Add tensors in order; `hexdigest` is the checksum of those so far."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()

    def add(self, tensor: torch.Tensor) -> None:
        """Hash a tensor in host memory."""
        self._hash.update(as_bytes(tensor).numpy().data)

    def hexdigest(self) -> str:
        """16 hex digits."""
        return self._hash.hexdigest()


def checksum(tensors: Iterable[torch.Tensor]) -> str:
    """The checksum of tensors in host memory, in this order."""
    total = Checksum()
    for tensor in tensors:
        total.add(tensor)
    return total.hexdigest()
