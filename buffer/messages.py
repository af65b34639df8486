"""What is said to the buffer and what it answers.

Invariants:
- Every request may be repeated: a client that got no answer sends the same request again and nothing happens twice.
- A worker's reports are running totals, so a repeated or lost report changes nothing in the end.
- Every number and every id in a request is bounded: what is decoded fits into the store.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .ledger import Ledger, Withheld
from .trajectory import Outcome, Trajectory

Name = Annotated[str, Meta(min_length=1, max_length=100)]
"""Of a worker, or of one of its processes."""

EpisodeId = Annotated[str, Meta(max_length=64)]
"""`group.attempt.member`."""

Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]
"""A count of one episode's tokens; the bound keeps a forged one from overflowing the store."""

Version = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""A policy version: int32 in the learner's arrays."""

Counts = dict[Version, Tokens]
"""Policy version -> sampled tokens."""

Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]
"""A running total; the bound keeps sums finite."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


GROUPS_AT_ONCE = 256
"""Leases in one answer."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all requests and replies."""


class Lease(msgspec.Struct, frozen=True):
    """Leave to play some members of a task group.

    Attributes:
        group_id: the group's number.
        attempt: how often the group was leased before; part of the episode ids.
        members: which episodes of the group are still wanted.
        version: policy version the engines served when the lease was granted.
        oldest_version: replicas that serve less must not be used.
        env: which of the run's environments.
        task: index of the task there.
        greedy: those of `members` that are played at temperature 0.
    """

    group_id: int
    attempt: int
    members: tuple[int, ...]
    version: int
    oldest_version: int
    env: int = 0
    task: int = 0
    greedy: tuple[int, ...] = ()

    def episode(self, member: int) -> str:
        """The id of a member's episode under this lease."""
        return f"{self.group_id}.{self.attempt}.{member}"


class Hello(Message, frozen=True):
    """A worker introduces itself. Groups of an earlier process of the same name are granted again at once."""

    worker: Name
    incarnation: Name


class WantLease(Message, frozen=True):
    """A worker has room for so many groups. Answered when admission allows one, with as many as it allows."""

    worker: Name
    groups: Annotated[int, Meta(ge=1, le=GROUPS_AT_ONCE)] = 1


class Progress(Message, frozen=True):
    """A worker lives. `generated` maps each running episode to all the tokens it has sampled so far, by version."""

    worker: Name
    generated: dict[EpisodeId, Counts]
    slot_s: Seconds
    idle_slot_s: Seconds


class Deliver(Message, frozen=True):
    """An episode ended. `generated` is all that was sampled for it, by version; `trajectories` its branches, none when it
    failed and is not to be trained on."""

    worker: Name
    episode_id: EpisodeId
    generated: Counts
    outcome: Outcome
    trajectories: tuple[Trajectory, ...]


class Goodbye(Message, frozen=True):
    """A worker leaves in good order; its running episodes are given up."""

    worker: Name


class Take(Message, frozen=True):
    """The learner wants the batch for `version`. Answered when there is one; the same batch until it is committed."""

    version: Version


class Commit(Message, frozen=True):
    """The batch of `version` is in the weights, which are now `version + 1`."""

    version: Version


class Served(Message, frozen=True):
    """The engines serve `version`."""

    version: Version


class Checkpointed(Message, frozen=True):
    """A checkpoint holds all commits up to `version`; they will not be rolled back."""

    version: Version


class Recover(Message, frozen=True):
    """A learner starts from weights that contain the commits up to `version`; later ones are rolled back."""

    version: Version


class WantFresh(Message, frozen=True):
    """The learner, before it steps on from `version`, wants at most `limit` trajectories with tokens of that very version."""

    version: Version
    limit: Annotated[int, Meta(ge=0, le=1 << 16)]


class WantStats(Message, frozen=True):
    """Somebody looks."""


class Done(Message, frozen=True):
    """The request was carried out, or had been already."""


class Granted(Message, frozen=True):
    lease: Lease
    more: tuple[Lease, ...] = ()


class Unwanted(Message, frozen=True):
    """Of the episodes that were reported, those that nobody waits for any more: their leases are lost, or their groups are over."""

    episodes: tuple[str, ...]


class Recovered(Message, frozen=True):
    """The version to publish the recovered weights under: above every version ever used, unless nothing was rolled back."""

    version: int


class Stats(msgspec.Struct, frozen=True):
    """The buffer at one instant: `leased_groups` are being played, `ready_groups` are complete and not committed.

    Attributes:
        refilled_groups: discarded because all rewards were equal, since the run began; others took their places.
        slot_s, idle_slot_s: summed over workers since the service started.
        dropped: messages that were no request, since the service started.
        refused: attempts to connect without this run's keys, since the service started; a peer may try often.
    """

    version: int
    ledger: Ledger
    leased_groups: int
    ready_groups: int
    slot_s: float
    idle_slot_s: float
    refilled_groups: int = 0
    dropped: int = 0
    refused: int = 0


class StatsReply(Message, frozen=True):
    stats: Stats


class Batch(Message, frozen=True):
    """One learner step's data: groups, oldest first.

    Attributes:
        version: the version it was taken for.
        oldest_version: tokens sampled by an older version are context without loss.
        groups: all branches of all episodes that were kept, group by group.
        withheld: ids of episodes among them that carry no loss, and why; their rewards count among those of their groups.
        stats: the buffer when the batch was handed out.
    """

    version: int
    oldest_version: int
    groups: tuple[tuple[Trajectory, ...], ...]
    withheld: dict[str, Withheld]
    stats: Stats


class Fresh(Message, frozen=True):
    """Delivered and not in a batch yet; they stay where they are."""

    trajectories: tuple[Trajectory, ...]


class Refused(Message, frozen=True):
    """The request is not allowed; `error` says why."""

    error: str


Request = (
    Hello
    | WantLease
    | Progress
    | Deliver
    | Goodbye
    | Take
    | Commit
    | Served
    | Checkpointed
    | Recover
    | WantFresh
    | WantStats
)
Reply = Done | Granted | Unwanted | Recovered | StatsReply | Batch | Fresh | Refused


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A request and its number; the reply carries the same number."""

    number: Number
    message: Request


class ReplyEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """A reply to request `number`."""

    number: Number
    message: Reply
