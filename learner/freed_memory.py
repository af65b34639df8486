"""Memory that a learner's rank freed goes back to the host while a model passes through it, tensor by tensor.

glibc keeps freed pieces of up to 32 MiB for the process. Of a model that is read or pushed they are of many sizes, and no later one
fits: what is kept adds up to a third of the model. Other C libraries keep less and have no such call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

EVERY = 4 << 20  # bytes of tensors between two calls, each of which takes less than a millisecond


class FreedMemory:
    """Counts the bytes of tensors that pass. Within a `with` block, whose end gives back the rest."""

    def __init__(self) -> None:
        self._passed = 0

    def __enter__(self) -> FreedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self._give_back()

    def passed(self, nbytes: int) -> None:
        """Another tensor of this size was used and is freed, or will be."""
        self._passed += nbytes
        if self._passed >= EVERY:
            self._give_back()

    def _give_back(self) -> None:
        self._passed = 0
        if (trim := _malloc_trim()) is not None:
            trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
