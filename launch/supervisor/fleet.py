"""The supervisor's fleet of replicas: a pure state machine that owns no process, socket or clock. All other processes subscribe to
its snapshots.

         join                    answers                   served                         drain                gone
    (new name) ──> starting ─────────────> starting, answers ─────> serving, version v ─────────> draining ──────> (left)
                      ^                                              │  lost: v is None again            ^
                      └──────────── died: incarnation + 1 ───────────┘                drain, from anywhere ┘

Invariants:
- Every change makes and publishes a new snapshot with a higher revision, those within `batched` one; a call that changes nothing
  makes none.
- A name is used once. A report about an earlier incarnation, or about a replica that has left, changes nothing.
- A replica leaves on request only while another can take its requests: serving if it served, else at least starting.
- A process of a replica is drained where the levels of suspicion (`rollout.routing`) of all routers that run add up to the limit.
  False replies that a router saw which has ended stay in the count; its level is dropped, because it would never fall again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import msgspec

from ...errors import ConfigError
from ...rollout.routing import SUSPICION_LIMIT
from ...weightsync.fleet import FalseReplies, Fleet, ReplicaInfo


class ReplicaListing(msgspec.Struct, frozen=True):
    """One replica as `slipstream replicas RUN list` shows it."""

    name: str
    state: str  # `ReplicaInfo.state`, or `asleep` for one that serves and sleeps
    version: int | None
    url: str
    pid: int | None
    incarnation: int
    false_replies: int = 0  # since the run started, see `rollout.engines.http_engine`
    distrusted: str = ""  # why a process of it was ended for lying, where one was
    external: bool = False  # others started it, and its process has no number here


class FleetState:
    """The fleet as the supervisor decides it. `fleet` is the present snapshot; `publish` gets each new one."""

    def __init__(self, publish: Callable[[Fleet], None] = lambda _: None) -> None:
        self.fleet = Fleet()
        self._infos: dict[str, ReplicaInfo] = {}  # those of `fleet`, by name
        self._publish = publish
        self._next = 0
        self._held: bool | None = None  # within `batched`: whether there was a change

    def names(self, count: int) -> list[str]:
        first, self._next = self._next, self._next + count
        return [f"engine-{i}" for i in range(first, self._next)]

    def replica(self, name: str) -> ReplicaInfo | None:
        return self._infos.get(name)

    @contextlib.contextmanager
    def batched(self) -> Iterator[None]:
        """The changes in this block are one snapshot, made at its end: `fleet` is as before until then."""
        self._held = False
        try:
            yield
        finally:
            changed, self._held = self._held, None
            if changed:
                self._changed()

    def join(self, name: str, url: str) -> None:
        self._infos[name] = ReplicaInfo(name, url)
        self._changed()

    def certified(self, name: str, certificate: str) -> None:
        """Its process has this certificate."""
        if (info := self._infos.get(name)) is not None:
            self._change(name, info.incarnation, certificate=certificate)

    def answers(self, name: str, incarnation: int) -> None:
        self._change(name, incarnation, answers=True)

    def served(self, name: str, version: int, incarnation: int, *, asleep: bool = False) -> None:
        self._change(name, incarnation, state="serving", version=version, answers=True, asleep=asleep)

    def lost(self, name: str, incarnation: int) -> None:
        """A push did not reach it: what it serves is unknown."""
        self._change(name, incarnation, state="starting", version=None, asleep=False)

    def died(self, name: str) -> None:
        info = self._infos.get(name)
        if info is not None:
            later = info.incarnation + 1
            nothing = {"state": "starting", "version": None, "answers": False, "asleep": False, "certificate": ""}
            self._change(name, info.incarnation, **nothing, incarnation=later)

    def moved(self, name: str, url: str) -> None:
        """Its next process listens elsewhere."""
        if (info := self._infos.get(name)) is not None:
            self._change(name, info.incarnation, url=url)

    def drain(self, name: str) -> None:
        """It takes no more requests and will leave. Raises ConfigError where there is no such replica, it is leaving already, or
        no other could take its requests."""
        info = self._infos.get(name)
        if info is None:
            known = ", ".join(r.name for r in self.fleet.replicas) or "none"
            raise ConfigError(f"{name} is no replica of this run; there are {known}")
        if info.state == "draining":
            raise ConfigError(f"{name} is leaving already")
        if info.state == "serving" and not any(r.state == "serving" for r in self.fleet.replicas if r.name != name):
            wanted = "add another, and remove this one when that one serves"
            raise ConfigError(f"{name} is the last serving replica; {wanted}")
        if not self.others(name):
            raise ConfigError(f"{name} is the last replica; add another before it is removed")
        self._change(name, info.incarnation, state="draining")

    def gone(self, name: str) -> None:
        if self._infos.pop(name, None) is not None:
            self._changed()

    def others(self, name: str) -> list[str]:
        """Replicas besides `name` that serve or may come to."""
        return [r.name for r in self.fleet.replicas if r.name != name and r.state != "draining"]

    def _change(self, name: str, of: int, /, **fields: Any) -> None:
        """Change a replica if incarnation `of` is its present one; a draining replica keeps its state."""
        info = self._infos.get(name)
        if info is None or info.incarnation != of:
            return
        if info.state == "draining":
            fields.pop("state", None)
        if any(getattr(info, field) != value for field, value in fields.items()):
            self._infos[name] = msgspec.structs.replace(info, **fields)
            self._changed()

    def _changed(self) -> None:
        if self._held is not None:
            self._held = True
            return
        self.fleet = Fleet(self.fleet.revision + 1, tuple(self._infos.values()))
        self._publish(self.fleet)


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
        if sum(one.level for one in found) < SUSPICION_LIMIT:
            return ""
        last = max(found, key=lambda one: one.level)
        return f"it goes on giving false replies, {sum(one.count for one in found)} so far; one of the last: {last.why}"
