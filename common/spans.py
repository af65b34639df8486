"""Spans, which say what happened from when to when: the one record of times that all rooms hand to the process that they run in.

Invariants:
- To record never blocks and never raises.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import msgspec

Id = str | int | float | None


class Span(msgspec.Struct, frozen=True):
    """`what` went on from `t0` to `t1`, seconds since the epoch; `ids` say of what. docs/recording.md lists them."""

    t0: float
    t1: float
    what: str
    ids: dict[str, Id]


RecordSpan = Callable[[Span], None]


def no_record(span: Span) -> None:
    """Where nothing is recorded."""


@contextlib.contextmanager
def timed(record: RecordSpan, what: str, **ids: Id) -> Iterator[None]:
    """Record this block, however it ends."""
    t0, started = time.time(), time.perf_counter()
    try:
        yield
    finally:
        record(Span(t0, t0 + time.perf_counter() - started, what, ids))
