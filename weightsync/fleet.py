"""The fleet: which replicas there are, where they listen, and which policy version each serves.

    engine starts ──> supervisor: starting ──> the learner pushes and proves ──> supervisor: serving, version v
                                                                                     │
    workers and learner <──────────── every change, as a whole fleet ────────────────┘

Invariants:
- One process, the supervisor, decides what the fleet is; everybody else follows its feed and is never told a difference, always
  the whole.
- `serving` means proven: the learner has seen the replica's canary at `version` since its process started.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Seat(msgspec.Struct, frozen=True):
    """One replica.

    Attributes:
        name: `engine-0`, ...; never used again for another.
        url: `http://host:port`.
        incarnation: how often its process was started before; what was learnt of an earlier one is void.
        state: `starting`: no work yet. `serving`: takes requests. `draining`: takes none and will leave.
        version: the policy version served, None while starting.
    """

    name: str
    url: str
    incarnation: int = 0
    state: Literal["starting", "serving", "draining"] = "starting"
    version: int | None = None


class Fleet(msgspec.Struct, frozen=True):
    """All replicas; `revision` rises with every change."""

    revision: int
    seats: tuple[Seat, ...]

    def seat(self, name: str) -> Seat | None:
        """The replica called `name`."""
        return next((s for s in self.seats if s.name == name), None)
