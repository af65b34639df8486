"""Garbage collection in processes that answer requests: what is loaded at the start is not scanned again."""

from __future__ import annotations

import gc

# Gen-0 GC threshold. Thousands of trajectories and requests live for a moment and are in no reference cycle; with
# Python's own threshold of 700 they are scanned again and again.
YOUNG = 10_000


def freeze_startup_objects() -> None:
    """Call once, when everything that stays is loaded and before the first request.

    A full collection scans every object. torch and transformers have half a million: on a busy machine that stops an event loop for
    seconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)
