"""The fleet: which replicas there are, where they listen, and which policy version each serves.

    engine starts ──> supervisor: starting ──> the learner pushes and verifies ──> supervisor: serving, version v
                                                                                        │
    buffer, workers, learner <── every change, as a whole fleet, over rpc.pubsub ───────┘

Only the supervisor decides what the fleet is. `serving` means verified: the learner has seen the replica's canary at `version`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..common.bounded import Count, Name, Text, Version
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

    def ended(self) -> Fleet:
        """The next revision, without replicas: the run has ended."""
        return Fleet(self.revision + 1)


class ReplicaReport(msgspec.Struct, frozen=True):
    """What the learner knows of a replica's process `incarnation`; a later report about it replaces an earlier one."""

    name: Name
    incarnation: Count
    version: Version | None  # that it is verified to serve; None when a push did not reach it
    missed_pushes: Count = 0  # pushes in a row that did not reach it
    why: Text = ""  # why the last of these did not
    asleep: bool = False  # it has freed its memory until the next push


ReportReplica = Callable[[ReplicaReport, tuple[ReplicaReport, ...]], None]
"""Takes a report that is new, and all that are known with it."""


class FalseReplies(msgspec.Struct, frozen=True):
    """What a router knows of the false replies of a replica's process `incarnation`; a later report replaces an earlier one."""

    name: Name
    incarnation: Count
    count: Count  # since the router first used it
    level: Annotated[float, Meta(ge=0.0, le=1e6)]  # of suspicion now, see `rollout.suspicion`
    why: Text  # what was wrong with the last one


def following_fleet(
    address: str, update: Callable[[Fleet], None]
) -> contextlib.AbstractAsyncContextManager[StateSubscriber[Fleet]]:
    """Passes the newest fleet published at `address` to `update` on every change; a failure of `update` ends the context."""
    return following(address, Fleet(), update, "fleet")
