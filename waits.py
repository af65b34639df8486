"""Every wait of this process while it lasts: who waits, for what, since when, at most how long.

Invariants:
- A wait is known from its beginning to its end, however it ends; it costs an entry of a dictionary, because a worker has
  thousands at once.
- Any thread may begin one, end one and look.
"""

from __future__ import annotations

import string
import time

import msgspec

TOLD = 8
"""Kinds of waits that are told of one process: its oldest."""

NO_DIGITS = str.maketrans("", "", string.digits)


class Wait(msgspec.Struct, frozen=True):
    """The oldest of the waits of one kind: they differ in their numbers alone.

    Attributes:
        who: the waiter.
        waits_for: what it waits for.
        age_s: seconds since it began.
        deadline_s: seconds after which it ends with an error; None for one that ends only with its caller.
        alike: waits of this kind, this one included.
    """

    who: str
    waits_for: str
    age_s: float
    deadline_s: float | None
    alike: int = 1

    @property
    def kind(self) -> str:
        return _kind(self.who, self.waits_for)

    def __str__(self) -> str:
        until = "" if self.deadline_s is None else f" of {self.deadline_s:.0f}"
        others = f" (and {self.alike - 1} like it)" if self.alike > 1 else ""
        return f"{self.who} has waited {self.age_s:.0f}{until} s for {self.waits_for}{others}"


class Waiting:
    """A context manager: as long as it lasts, `who` waits for `waits_for`, for at most `deadline_s` seconds. It only tells; who
    waits ends the wait, best by `errors.within`. Use one without a deadline only where the wait ends with its caller."""

    __slots__ = ("deadline_s", "since", "waits_for", "who")

    def __init__(self, who: str, waits_for: str, deadline_s: float | None = None) -> None:
        self.who = who
        self.waits_for = waits_for
        self.deadline_s = deadline_s
        self.since = 0.0

    def __enter__(self) -> Waiting:
        self.since = time.monotonic()
        _going_on[id(self)] = self
        return self

    def __exit__(self, *_: object) -> None:
        del _going_on[id(self)]


def _kind(who: str, waits_for: str) -> str:
    return f"{who} {waits_for}".translate(NO_DIGITS)


_going_on: dict[int, Waiting] = {}
"""By the id of the object, in the order of their beginning."""


def oldest(limit: int = TOLD) -> tuple[Wait, ...]:
    """What this process waits for now: the oldest wait of each kind, at most `limit` kinds, the oldest first."""
    now = time.monotonic()
    kinds: dict[str, tuple[Waiting, int]] = {}
    for wait in _going_on.copy().values():  # a copy is one step: the other threads go on
        kind = _kind(wait.who, wait.waits_for)
        first, alike = kinds.get(kind, (wait, 0))
        kinds[kind] = first, alike + 1
    found = list(kinds.values())[:limit]
    return tuple(Wait(w.who, w.waits_for, max(0.0, now - w.since), w.deadline_s, n) for w, n in found)
