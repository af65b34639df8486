"""Spans, which say what happened from when to when: the one record of times that all rooms hand to the process that they run in.

Invariants:
- To record never blocks and never raises.
- The times of a process are as far apart as they were by its monotonic clock: what happens within something is within it in the
  record, too.
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


SET_S = 0.1
"""Where the clock of the host was set by more than this, later times follow it."""

_ahead_s = time.time() - time.perf_counter()


def time_of_day() -> float:
    """Seconds since the epoch, by the monotonic clock of this process: the clock of a host is set by milliseconds now and then."""
    global _ahead_s
    since, shown = time.perf_counter(), time.time()
    if abs(shown - since - _ahead_s) > SET_S:
        _ahead_s = shown - since
    return since + _ahead_s


@contextlib.contextmanager
def timed(record: RecordSpan, what: str, **ids: Id) -> Iterator[None]:
    """Record this block, however it ends."""
    t0, started = time_of_day(), time.perf_counter()
    try:
        yield
    finally:
        record(Span(t0, t0 + time.perf_counter() - started, what, ids))
