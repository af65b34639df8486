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
    return sum(_clock())


def _clock() -> tuple[float, float]:
    """The monotonic clock, and by how much the time of day is ahead of it."""
    global _ahead_s
    now, shown = time.perf_counter(), time.time()
    if abs(shown - now - _ahead_s) > SET_S:
        _ahead_s = shown - now
    return now, _ahead_s


class Stopwatch:
    """Starts when it is made. Of two of them, one of which lives within the other, the times lie within each other, too: the clock
    is read once at either end.

    Attributes:
        began: time of day.
    """

    def __init__(self) -> None:
        self._started, self._ahead = _clock()
        self.began = self._started + self._ahead

    def now(self) -> float:
        """The time of day."""
        return time.perf_counter() + self._ahead

    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self._started


@contextlib.contextmanager
def timed(record: RecordSpan, what: str, **ids: Id) -> Iterator[None]:
    """Record this block, however it ends."""
    watch = Stopwatch()
    try:
        yield
    finally:
        record(Span(watch.began, watch.now(), what, ids))
