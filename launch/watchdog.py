"""Which waits a person should hear of, and when: pure, owns no clock, socket or process.

Invariants:
- A wait is told once: when it is older than `OLD_S` and than half of its deadline. Its kind is told again only after none of that
  kind was old in between.
- A run that makes no step is told of once, until it makes one.
- Before the first two steps and after the last one none is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from ..waits import Wait

OLD_S = 60.0
"""No younger wait is worth a line."""

STALL_S = 60.0
"""No run stalls earlier."""

STALL_TIMES = 5.0
"""So many times as long as the slowest of the last `STEPS` steps, and the run has stalled."""

STEPS = 16

GROWTH = 2.0
"""A step counts for at most so many times the slowest before it, so that one that hung does not make the next hang look normal."""

CULPRITS = 3
"""Waits that are named when a run has stalled."""


class RoleWait(msgspec.Struct, frozen=True):
    """A wait of `role`; `heard_s` is how many seconds ago it said so. The age is that of now."""

    role: str
    wait: Wait
    heard_s: float

    def __str__(self) -> str:
        return f"{self.role}: {self.wait}"


class Watchdog:
    """Told of steps and waits, says what is remarkable. Times are of any one clock, in seconds."""

    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._last: float | None = None
        self._stalled = False

    def stepped(self, now: float) -> None:
        """The learner has made a step."""
        if self._last is not None:
            took = now - self._last
            self._steps.append(min(took, GROWTH * max(self._steps, default=took)))
        self._last, self._stalled = now, False

    def rest(self) -> None:
        """No step is due until there is one."""
        self._last = None

    def look(self, rows: Sequence[RoleWait], now: float) -> list[str]:
        """What is remarkable about the waits of all roles, a line each."""
        old = {(row.role, row.wait.kind): row for row in rows if _old(row.wait)}
        lines = [f"{row} already" for key, row in old.items() if key not in self._told]
        self._told = set(old)
        if self._last is None or not self._steps or self._stalled:
            return lines
        slowest = max(self._steps)
        if (age := now - self._last) > max(STALL_S, STALL_TIMES * slowest):
            self._stalled = True
            named = "; ".join(map(str, by_age(rows)[:CULPRITS])) or "nobody waits for anything that has a name"
            lines.append(f"no step for {age:.0f} s, the slowest before took {slowest:.0f} s; {named}")
        return lines


def by_age(rows: Sequence[RoleWait]) -> list[RoleWait]:
    """The oldest first."""
    return sorted(rows, key=lambda row: -row.wait.age_s)


def _old(wait: Wait) -> bool:
    return wait.deadline_s is not None and wait.age_s > max(OLD_S, wait.deadline_s / 2)
