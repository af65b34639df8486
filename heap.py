"""Garbage collection in processes that answer others: what is loaded once is not looked at again and again."""

from __future__ import annotations

import gc


def freeze() -> None:
    """Call it once everything is there that stays, before anybody waits for answers.

    A full collection looks at every object. Of torch and transformers there are half a million: on a busy machine that stops an
    event loop for seconds.
    """
    gc.collect()
    gc.freeze()
