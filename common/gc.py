"""Garbage-collector threshold and malloc settings of Slipstream's processes: objects that stay are not scanned again and again, and
the memory of one message is kept for the next."""

from __future__ import annotations

import ctypes
import gc
import sys

# Gen-0 GC threshold. Thousands of trajectories and requests live for a moment and are in no reference cycle; with
# Python's own threshold of 700 they are scanned again and again. So is what imports load: a tenth of the time that torch and
# transformers take.
YOUNG = 10_000
# glibc gives memory back to the kernel as soon as 128 KiB at the end of a heap are free, and takes blocks above 128 KiB from the
# kernel: each page of a message of 100 KB then costs a fault, several times on its way. These are the bounds that glibc itself
# arrives at in a process that has freed a block of 32 MiB: the number of a `mallopt` option, and bytes.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = (-1, 64 << 20), (-3, 32 << 20)


def raise_gc_threshold() -> None:
    """Raise the threshold of the garbage collector's youngest generation to `YOUNG`. Call it before heavy imports."""
    gc.set_threshold(YOUNG)


def freeze_startup_objects() -> None:
    """Call once, when everything that stays is loaded and before the first request.

    A full collection scans every object. torch and transformers have half a million: on a busy machine that stops an event loop for
    seconds.
    """
    gc.collect()
    gc.freeze()
    raise_gc_threshold()
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # musl has none
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(*option)
