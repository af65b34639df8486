"""Who waits for leases, and what was answered. Pure.

Invariants:
- A wish has one answer, however often it is sent; also where its leases were lost since.
- A worker has one wish, the newest; what is remembered is bounded.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from .messages import Granted, Lease, Reply
from .peers import Peer
from .replay import Replay

K = TypeVar("K")
V = TypeVar("V")

WISHES = 1 << 14
"""Unanswered wishes for a lease, or for a batch, that are remembered. Who is forgotten asks again."""


class Wish(msgspec.Struct, frozen=True):
    """For `groups` groups: request `number` of the connection `identity`, whose numbers are not used twice."""

    identity: bytes
    number: int
    groups: int
    peer: Peer

    def name(self, group: int) -> str:
        """Of the wish for one of the groups."""
        return f"{self.identity.hex()}.{self.number}.{group}"


class Wishes:
    """Of the workers; groups come from `replay`."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay
        self._waiting: dict[str, Wish] = {}

    def forget(self, worker: str) -> None:
        """It is gone, or another process now."""
        self._waiting.pop(worker, None)

    def add(self, worker: str, wish: Wish) -> Granted | None:
        """The leases that answered this wish before; else it is remembered."""
        peer = wish.peer
        if peer.granted is not None and wish.number <= peer.wish:
            # Also leases that are lost since: others would be nobody's if the first answer is only late.
            return peer.granted if wish.number == peer.wish else None
        leases = [lease for i in range(wish.groups) if (lease := self._replay.granted(wish.name(i)))]
        if leases:  # before this buffer was started
            return Granted(leases[0], tuple(leases[1:]))
        queue(self._waiting, worker, wish)
        return None

    def grant(self, now: float) -> list[tuple[bytes, int, Reply]]:
        """A group to every worker that wants one, by turns, while admission allows; whom to answer which request how."""
        granted: dict[str, list[Lease]] = {}
        for turn in range(max((wish.groups for wish in self._waiting.values()), default=0)):
            before = sum(map(len, granted.values()))
            for worker, wish in self._waiting.items():
                if turn < wish.groups and (lease := self._replay.grant(worker, now, wish.name(turn))):
                    granted.setdefault(worker, []).append(lease)
            if sum(map(len, granted.values())) == before:
                break
        replies: list[tuple[bytes, int, Reply]] = []
        for worker, leases in granted.items():
            wish = self._waiting.pop(worker)
            wish.peer.wish, wish.peer.granted = wish.number, Granted(leases[0], tuple(leases[1:]))
            replies.append((wish.identity, wish.number, wish.peer.granted))
        return replies


def queue(waiting: dict[K, V], key: K, value: V) -> None:
    """Remember what `key` waits for; the longest waiting makes room."""
    waiting[key] = value
    if len(waiting) > WISHES:
        del waiting[next(iter(waiting))]
