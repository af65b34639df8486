"""The waits of this process while they last: who waits, for what, since when, for at most how long.

Invariants:
- A wait is listed from its beginning to its end, however it ends. It costs one dictionary entry: a worker has thousands at once.
- Any thread may begin, end and list waits.
"""

from __future__ import annotations

import asyncio
import string
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from .bounded import TEXT_LENGTH, Count, Seconds, Text

T = TypeVar("T")

TURNS = 8  # of the event loop's, at least, that a deadline of `within` takes

LISTED = 8  # kinds of waits that one process lists: the oldest
NO_DIGITS = str.maketrans("", "", string.digits)


class Wait(msgspec.Struct, frozen=True):
    """The oldest of the waits of one kind; waits of a kind differ only in digits."""

    who: Text  # the waiter
    waits_for: Text  # what it waits for
    age_s: Seconds  # since it began
    deadline_s: Seconds | None  # after which it fails; None if it ends only with its caller
    alike: Count = 1  # number of waits of this kind, this one included

    @property
    def kind(self) -> str:
        return _kind(self.who, self.waits_for)

    def __str__(self) -> str:
        until = "" if self.deadline_s is None else f" of {self.deadline_s:.0f}"
        others = f" (and {self.alike - 1} like it)" if self.alike > 1 else ""
        return f"{self.who} has waited {self.age_s:.0f}{until} s for {self.waits_for}{others}"


class TrackedWait:
    """Context manager that lists a wait while it lasts: `who` waits for `waits_for`, for at most `deadline_s` seconds. It enforces
    no deadline, see `errors.with_deadline` for that; without `deadline_s` the wait must end with its caller."""

    __slots__ = ("deadline_s", "since", "waits_for", "who")

    def __init__(self, who: str, waits_for: str, deadline_s: float | None = None) -> None:
        self.who = who
        self.waits_for = waits_for
        self.deadline_s = deadline_s
        self.since = 0.0

    def __enter__(self) -> TrackedWait:
        self.since = time.monotonic()
        _active[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _active[id(self)]


def _kind(who: str, waits_for: str) -> str:
    return f"{who} {waits_for}".translate(NO_DIGITS)


_active: dict[int, TrackedWait] = {}  # by `id()`, oldest first


def current_waits(limit: int = LISTED) -> tuple[Wait, ...]:
    """The oldest wait of each kind of this process, at most `limit` kinds, oldest first."""
    now = time.monotonic()
    kinds: dict[str, tuple[TrackedWait, int]] = {}
    for wait in _active.copy().values():  # copying is atomic
        kind = _kind(wait.who, wait.waits_for)
        first, alike = kinds.get(kind, (wait, 0))
        kinds[kind] = first, alike + 1
    found = list(kinds.values())[:limit]
    return tuple(
        Wait(w.who[:TEXT_LENGTH], w.waits_for[:TEXT_LENGTH], max(0.0, now - w.since), w.deadline_s, n) for w, n in found
    )


class Overdue(TimeoutError):
    """What `within` awaited took longer."""


async def within(seconds: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which may take `seconds` of a turning event loop. A process that was stopped, or whose loop another
    episode held, uses up a part of them: what arrived meanwhile is looked at first. Raises Overdue, once `work` is cancelled."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        for _ in range(TURNS):
            if (await asyncio.wait([task], timeout=seconds / TURNS))[0]:
                return task.result()
        raise Overdue
    finally:
        if task.cancel():
            await asyncio.wait([task])
