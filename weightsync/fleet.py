"""The fleet: which replicas there are, where they listen, and which policy version each serves.

    engine starts ──> supervisor: starting ──> the learner pushes and verifies ──> supervisor: serving, version v
                                                                                        │
    buffer, workers, learner <── every change, over rpc.pubsub ─────────────────────────┘

Only the supervisor decides what the fleet is. `serving` means verified: the learner has seen the replica's canary at `version`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..common.bounded import Count, Name, Text, Version
from ..errors import WireError
from ..rpc.pubsub import StateSubscriber, following


class ReplicaInfo(msgspec.Struct, frozen=True):
    """One replica."""

    name: Name  # `engine-0`, ...; never used again for another
    url: Text  # `http://host:port`, or `https://`
    incarnation: Count = 0  # how often its process was restarted; what is known of an earlier one is void
    # Starting: no work yet. serving: takes requests. draining: takes none and will leave.
    state: Literal["starting", "serving", "draining"] = "starting"
    version: Version | None = None  # the policy version served, None while starting
    answers: bool = False  # its process has answered, so that weights can be pushed to it
    asleep: bool = False  # serving, and without memory while the learner steps: its requests wait
    certificate: str = ""  # SHA-256 of the TLS certificate of its process, in hex; empty without TLS


class ReplicasChanged(msgspec.Struct, frozen=True, array_like=True):
    """What all replicas in `ranges` have come to: [first, end) of places in `Fleet.replicas`. A push gives many the same."""

    state: Literal["starting", "serving", "draining"]
    version: Version | None
    answers: bool
    asleep: bool
    ranges: tuple[tuple[Count, Count], ...]


class Fleet(msgspec.Struct, frozen=True):
    """All replicas; `revision` rises with every change."""

    revision: Count = 0
    replicas: tuple[ReplicaInfo, ...] = ()

    @property
    def version(self) -> int | None:
        """The oldest version that a serving replica serves; None while none serves. A rolling push raises it with its last replica,
        so with `max_staleness = 0` nothing is admitted before that."""
        return min((r.version for r in self.replicas if r.state == "serving" and r.version is not None), default=None)

    def replica(self, name: str) -> ReplicaInfo | None:
        return next((r for r in self.replicas if r.name == name), None)

    def changes_since(self, whole: Fleet) -> bytes | None:
        """See `rpc.pubsub.Incremental`: None where a replica came, left, or is another process."""
        if len(self.replicas) != len(whole.replicas):
            return None
        found: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for place, (old, new) in enumerate(zip(whole.replicas, self.replicas, strict=True)):
            if old is new:
                continue
            if _process(old) != _process(new):
                return None
            ranges = found.setdefault((new.state, new.version, new.answers, new.asleep), [])
            if ranges and ranges[-1][1] == place:
                ranges[-1] = ranges[-1][0], place + 1
            else:
                ranges.append((place, place + 1))
        return msgspec.msgpack.encode([(*values, ranges) for values, ranges in found.items()])

    def with_changes(self, revision: int, changes: bytes) -> Fleet:
        """See `rpc.pubsub.Incremental`."""
        try:
            decoded = msgspec.msgpack.decode(changes, type=tuple[ReplicasChanged, ...])
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise WireError(f"these are no changes of a fleet: {error}") from None
        replicas = list(self.replicas)
        for one in decoded:
            fields = {"state": one.state, "version": one.version, "answers": one.answers, "asleep": one.asleep}
            for first, end in one.ranges:
                if end > len(replicas):
                    raise WireError(f"changes of {end} replicas, and there are {len(replicas)}")
                for place in range(first, end):
                    replicas[place] = msgspec.structs.replace(self.replicas[place], **fields)
        return Fleet(revision, tuple(replicas))

    def ended(self) -> Fleet:
        """The next revision, without replicas: the run has ended."""
        return Fleet(self.revision + 1)


def _process(replica: ReplicaInfo) -> tuple[str, str, int, str]:
    return replica.name, replica.url, replica.incarnation, replica.certificate


class ReplicaReport(msgspec.Struct, frozen=True):
    """What the learner knows of a replica's process `incarnation`; a later report about it replaces an earlier one."""

    name: Name
    incarnation: Count
    version: Version | None  # that it is verified to serve; None when a push did not reach it
    missed_pushes: Count = 0  # pushes in a row that did not reach it
    why: Text = ""  # why the last of these did not
    asleep: bool = False  # it has freed its memory until the next push


ReportReplica = Callable[[ReplicaReport, dict[str, ReplicaReport]], None]
"""Takes a report that is new, and all that are known with it, by name: the caller's own, which it goes on changing."""


class FalseReplies(msgspec.Struct, frozen=True):
    """What a router knows of the false replies of a replica's process `incarnation`; a later report replaces an earlier one."""

    name: Name
    incarnation: Count
    count: Count  # since the router first used it
    level: Annotated[float, Meta(ge=0.0, le=1e6)]  # of suspicion now, see `rollout.routing`
    why: Text  # what was wrong with the last one


def following_fleet(
    address: str, update: Callable[[Fleet], None]
) -> contextlib.AbstractAsyncContextManager[StateSubscriber[Fleet]]:
    """Passes the newest fleet published at `address` to `update` on every change; a failure of `update` ends the context."""
    return following(address, Fleet(), update, "fleet")
