"""The simulation kernel: discrete events on a virtual clock, and processors that share their speed among jobs. Pure.

Invariants:
- Events happen in the order of their times, those of one time in the order in which they were scheduled: a simulation is a function
  of its plan and its seed.
- All jobs of a processor progress at one speed, which depends on their number alone. So one number, the units that a job would have
  got since the beginning, is the state of all of them, and an event costs the logarithm of the jobs, not their number.
- A processor has at most one event that counts. A later end of the next job needs no other event: the one that comes too early
  schedules the next. An earlier end supersedes it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

J = TypeVar("J")

# `unit_s` of a processor that jobs share in equal parts: a unit is a second of work of a job that is alone.
ONE_AT_A_TIME = range(1 << 31)
ROUNDING = 1e-6  # units that floating point may lack at the end of a job


class VirtualClock:
    """Runs what was scheduled.

    Attributes:
        now: seconds since the beginning.
        events: how many have happened.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = itertools.count()

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` in `seconds`."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._number), action, arguments))

    def run(self, until: Callable[[], bool]) -> bool:
        """Run events until `until()`; False where none is left before."""
        heap = self._heap
        while not until():
            if not heap:
                return False
            self.now, _, action, arguments = heapq.heappop(heap)
            self.events += 1
            action(*arguments)
        return True


class SharedProcessor(Generic[J]):
    """Jobs that progress side by side. With n of them a unit of each takes `unit_s[n]` seconds; `finish` gets each that has ended.

    Attributes:
        progress: units that a job would have got that began with the clock.
        jobs: job -> the progress at which it ends.
    """

    def __init__(self, clock: VirtualClock, unit_s: Sequence[float], finish: Callable[[J], None]) -> None:
        self.progress = 0.0
        self.jobs: dict[J, float] = {}
        self._clock = clock
        self._unit_s = unit_s
        self._slowness = 1.0
        self._finish = finish
        self._ends: list[tuple[float, int, J]] = []
        self._number = itertools.count()
        self._settled_at = clock.now
        self._stalled_s = 0.0
        self.paused = False
        self._event_at = math.inf
        self._event = 0  # number of the event that counts

    def add(self, job: J, units: float) -> None:
        """A job of `units` begins now."""
        self.settle()
        end = self.progress + units
        self.jobs[job] = end
        heapq.heappush(self._ends, (end, next(self._number), job))
        self._schedule()

    def remove(self, job: J) -> None:
        """A job ends before it is done."""
        self.settle()
        del self.jobs[job]
        self._schedule()

    def stall(self, seconds: float) -> None:
        """No job progresses for `seconds` more."""
        self.settle()
        self._stalled_s += seconds
        self._schedule()

    def slow(self, slowness: float) -> None:
        """From now on a unit takes `slowness` times the seconds that it was made with."""
        if slowness == self._slowness:
            return
        self.settle()
        self._slowness = slowness
        self._schedule()

    def pause(self) -> None:
        self.settle()
        self.paused = True

    def resume(self) -> None:
        self.settle()
        self.paused = False
        self._schedule()

    def settle(self) -> None:
        """Bring `progress` up to now."""
        now = self._clock.now
        seconds, self._settled_at = now - self._settled_at, now
        if seconds > 0 and not self.paused:
            stalled = min(self._stalled_s, seconds)
            self._stalled_s -= stalled
            if self.jobs:
                self.progress += (seconds - stalled) / (self._slowness * self._unit_s[len(self.jobs)])

    def _schedule(self) -> None:
        """Have an event no later than the next end."""
        if self.paused:
            return
        ends, jobs = self._ends, self.jobs
        while ends and jobs.get(ends[0][2]) != ends[0][0]:
            heapq.heappop(ends)  # removed before its end
        if not ends:
            return
        wait = self._stalled_s + max(0.0, ends[0][0] - self.progress) * self._slowness * self._unit_s[len(jobs)]
        if self._clock.now + wait < self._event_at:
            self._event_at = self._clock.now + wait
            self._event += 1
            self._clock.after(wait, self._on_event, self._event)

    def _on_event(self, event: int) -> None:
        if event != self._event:
            return
        self._event_at = math.inf
        self.settle()
        ended: list[J] = []
        while self._ends and self._ends[0][0] <= self.progress + ROUNDING and not self.paused:
            end, _, job = heapq.heappop(self._ends)
            if self.jobs.get(job) == end:
                del self.jobs[job]
                ended.append(job)
        for job in ended:
            self._finish(job)
        self._schedule()
