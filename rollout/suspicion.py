"""How much the false replies of a replica weigh, and when it is drained. Pure.

A bucket that leaks: each false reply adds 1, each true one takes `LEAK` off. The level of a replica that lies now and then stays
near 0, however long it runs; that of one that goes on lying passes `LIMIT`.

Invariants:
- Each router has a level of its own for each incarnation of a replica, also where a push left it out meanwhile; the supervisor adds
  those of all routers that run. What a router saw that has ended stays counted, but could never leak, and proves nothing.
- A replica that has passed `LIMIT` in one router stays proven there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ..weightsync.fleet import FalseReplies

LIMIT = 5.0
"""The level at which a replica is drained. One false reply proves little: a bit flipped, or a proxy cut an answer. Five within
fifty replies are a server that computes wrongly; a restart costs less than what it wastes, and than what the checks may miss."""

LEAK = 0.02
"""What a true reply takes off: a replica of which less than one reply in fifty is false is kept. Its false ones are computed again
elsewhere, which costs less than to go without it."""


class ReplicaSuspicion:
    """Of one router about one incarnation of a replica. `count` are its false replies, `why` is what was wrong with the last."""

    def __init__(self) -> None:
        self.count = 0
        self.level = 0.0
        self.why = ""
        self.proven = False

    def add_false(self, why: str) -> None:
        """A false reply came; `why` is what was wrong with it."""
        self.count += 1
        self.level += 1.0
        self.why = why
        self.proven = self.proven or self.level >= LIMIT

    def add_true(self) -> bool:
        """A true reply came. Whether the level has fallen below a whole number or to 0, which the supervisor is to know."""
        if self.proven or not self.level:
            return False
        before, self.level = self.level, max(0.0, self.level - LEAK)
        return int(before) != int(self.level) or not self.level


class FleetSuspicion:
    """What all routers of a run know. `counts` are the false replies of each replica by name, since the run started."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._reports: dict[str, dict[tuple[str, int], FalseReplies]] = {}

    def take(self, router: str, reports: Iterable[FalseReplies]) -> None:
        """The newest that `router` reports, in place of what it reported before; it may be repeated."""
        before, now = self._reports.get(router, {}), {(one.name, one.incarnation): one for one in reports}
        self._reports[router] = now
        for key, one in now.items():
            known = before[key].count if key in before else 0
            new = one.count - known if one.count >= known else one.count  # the router is another process now
            if new:
                self.counts[one.name] = self.counts.get(one.name, 0) + new

    def keep(self, routers: Collection[str]) -> None:
        """Drop the levels of all other routers: they have ended."""
        self._reports = {router: reports for router, reports in self._reports.items() if router in routers}

    def proof(self, name: str, incarnation: int) -> str:
        """Why this process of a replica is drained; empty where it is not."""
        found = [of[name, incarnation] for of in self._reports.values() if (name, incarnation) in of]
        if sum(one.level for one in found) < LIMIT:
            return ""
        last = max(found, key=lambda one: one.level)
        return f"it goes on giving false replies, {sum(one.count for one in found)} so far; one of the last: {last.why}"
