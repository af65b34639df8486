"""Garbage collection in processes that answer others: what is loaded once is not looked at again and again."""

from __future__ import annotations

import gc

YOUNG = 10_000
"""New objects after which those that live are looked at. Thousands, of trajectories and requests, live for a moment and refer to
nothing that refers back; after Python's own 700 they are looked at again and again."""


def freeze() -> None:
    """Call it once everything is there that stays, before anybody waits for answers.

    A full collection looks at every object. Of torch and transformers there are half a million: on a busy machine that stops an
    event loop for seconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG)
