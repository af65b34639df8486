"""What the fleet is: a pure state machine that owns no process, socket or clock.

         join                    answers                   served                         drain                gone
    (new name) ──> starting ─────────────> starting, answers ─────> serving, version v ─────────> draining ──────> (left)
                      ^                                              │  lost: v is None again            ^
                      └──────────── died: incarnation + 1 ───────────┘                drain, from anywhere ┘

Invariants:
- Every change makes a new snapshot with a higher revision; what changes nothing makes none.
- A name is given once. What is said of an earlier incarnation, or of a replica that has left, changes nothing.
- A replica leaves on request only while another one takes its place: serving if it served, else at least starting.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import ConfigError
from ..weightsync.fleet import Fleet, Seat


class Listed(msgspec.Struct, frozen=True):
    """One replica as `slipstream replicas RUN list` shows it."""

    name: str
    state: str
    version: int | None
    url: str
    pid: int | None
    incarnation: int


class Roster:
    """The fleet as the supervisor decides it; `fleet` is the snapshot of now."""

    def __init__(self) -> None:
        self.fleet = Fleet(0, ())
        self._next = 0

    def names(self, count: int) -> list[str]:
        """Names for `count` new replicas."""
        first, self._next = self._next, self._next + count
        return [f"engine-{i}" for i in range(first, self._next)]

    def join(self, name: str, url: str) -> None:
        """A new replica, whose process is about to start."""
        self._replace([*self.fleet.seats, Seat(name, url)])

    def answers(self, name: str, incarnation: int) -> None:
        """Its process has answered for the first time."""
        self._change(name, incarnation, answers=True)

    def served(self, name: str, version: int, incarnation: int) -> None:
        """It has proven that it serves `version`."""
        self._change(name, incarnation, state="serving", version=version, answers=True)

    def lost(self, name: str, incarnation: int) -> None:
        """A push left it out: nobody knows what it serves."""
        self._change(name, incarnation, state="starting", version=None)

    def died(self, name: str) -> None:
        """Its process has ended; another may follow."""
        seat = self.fleet.seat(name)
        if seat is not None:
            self._change(
                name, seat.incarnation, state="starting", version=None, answers=False, incarnation=seat.incarnation + 1
            )

    def drain(self, name: str) -> None:
        """It takes no more requests and will leave.

        Raises:
            ConfigError: there is no such replica, it leaves already, or nobody could take its place.
        """
        seat = self.fleet.seat(name)
        if seat is None:
            there = ", ".join(s.name for s in self.fleet.seats) or "none"
            raise ConfigError(f"{name} is no replica of this run; there are {there}")
        if seat.state == "draining":
            raise ConfigError(f"{name} is leaving already")
        if seat.state == "serving" and not any(s.state == "serving" for s in self.fleet.seats if s.name != name):
            raise ConfigError(
                f"{name} is the last serving replica; add another, and remove this one when that one serves"
            )
        if not self.others(name):
            raise ConfigError(f"{name} is the last replica; add another before it is removed")
        self._change(name, seat.incarnation, state="draining")

    def gone(self, name: str) -> None:
        """It has left."""
        if self.fleet.seat(name) is not None:
            self._replace([s for s in self.fleet.seats if s.name != name])

    def others(self, name: str) -> list[str]:
        """Replicas besides `name` that serve or may come to."""
        return [s.name for s in self.fleet.seats if s.name != name and s.state != "draining"]

    def _change(self, name: str, of: int, /, **fields: Any) -> None:
        """Change a replica, if this is its present incarnation; one that drains stays so."""
        seat = self.fleet.seat(name)
        if seat is None or seat.incarnation != of:
            return
        if seat.state == "draining":
            fields.pop("state", None)
        changed = msgspec.structs.replace(seat, **fields)
        if changed != seat:
            self._replace([changed if s.name == name else s for s in self.fleet.seats])

    def _replace(self, seats: list[Seat]) -> None:
        self.fleet = Fleet(self.fleet.revision + 1, tuple(seats))
