"""The requests to the buffer and its replies.

Invariants:
- Every request may be repeated: a client that got no reply sends the same request again and nothing happens twice.
- A worker's reports are running totals, so a repeated or lost report changes nothing in the end.
- Every number and every id in a request is bounded: what is decoded fits into the store.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ..common.bounded import Seconds, Version
from ..common.images import NAME
from ..rpc.wire import RpcMessage, RpcRefusal
from .admission import LiveRules
from .encoded import EncodedRow, EncodedTrajectory
from .ledger import Ledger, Unstepped, Withheld
from .trajectory import BatchRow, Outcome, Trajectory

Name = Annotated[str, Meta(min_length=1, max_length=100)]  # of a worker, or of one of its processes
EpisodeId = Annotated[str, Meta(max_length=64)]  # `group.attempt.member`
# A count of one episode's tokens; the bound keeps a forged one from overflowing the store.
Tokens = Annotated[int, Meta(ge=0, le=1 << 40)]
Counts = dict[Version, Tokens]  # policy version -> sampled tokens
Row = TypeVar("Row", EncodedRow, BatchRow, Trajectory)
GroupId = Annotated[int, Meta(ge=0, lt=1 << 62)]
REASON_LIMIT = 1000  # characters
Reason = Annotated[str, Meta(max_length=REASON_LIMIT)]
GROUPS_AT_ONCE = 256  # leases in one reply
IMAGES_AT_ONCE = 64  # files in one reply


class BufferMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all requests and replies."""


class Lease(msgspec.Struct, frozen=True):
    """Permission to run some members of a task group."""

    group_id: int  # the group's number
    attempt: int  # how often the group was leased before; part of the episode ids
    members: tuple[int, ...]  # the episodes of the group to run
    version: int  # policy version the engines served when the lease was granted
    oldest_version: int  # replicas that serve an older version must not be used
    env: int = 0  # index of the run's environment
    task: int = 0  # index of the task there
    greedy: tuple[int, ...] = ()  # those of `members` that are sampled at temperature 0

    def episode(self, member: int) -> str:
        """The id of a member's episode under this lease."""
        return f"{self.group_id}.{self.attempt}.{member}"


class Register(BufferMessage, frozen=True):
    """A worker starts. Groups leased to an earlier process of its name can be leased again at once."""

    worker: Name
    incarnation: Name


class RequestLease(BufferMessage, frozen=True):
    """A worker has room for `groups` groups. Answered with a LeaseReply when admission allows one, with as many as it allows; after
    `wait_s` with none, so that the worker asks another shard."""

    worker: Name
    groups: Annotated[int, Meta(ge=1, le=GROUPS_AT_ONCE)] = 1
    wait_s: Seconds | None = None  # None: as long as it takes


class ReportProgress(BufferMessage, frozen=True):
    """A worker is alive. `generated` maps each running episode to its sampled tokens so far, by version."""

    worker: Name
    generated: dict[EpisodeId, Counts]
    slot_s: Seconds
    idle_slot_s: Seconds


class DeliverEpisode(BufferMessage, frozen=True):
    """An episode ended. `generated` are all tokens sampled for it, by version; `trajectories` its branches, none when it failed and
    is not trained on: then `failed_branches` are what it sampled, to be looked at only. `images` are the files of all images that
    they name, in any order."""

    worker: Name
    episode_id: EpisodeId
    generated: Counts
    outcome: Outcome
    trajectories: tuple[EncodedTrajectory, ...]
    failed_branches: tuple[EncodedTrajectory, ...] = ()
    images: tuple[NDArray[np.uint8], ...] = ()


class Deregister(BufferMessage, frozen=True):
    """A worker shuts down; its running episodes are discarded."""

    worker: Name


class TakeBatch(BufferMessage, frozen=True):
    """A learner rank requests the plan of the batch for `version`. Answered when it is complete; the same until it is committed."""

    version: Version


class FetchImages(BufferMessage, frozen=True):
    """A learner rank requests the files of images, by their names, of trajectories that it has read. It asks again for those
    that a reply leaves out."""

    names: Annotated[tuple[Annotated[str, Meta(pattern=NAME)], ...], Meta(max_length=IMAGES_AT_ONCE)]


class CommitBatch(BufferMessage, frozen=True):
    """The batch of `version` is in the weights, which are now `version + 1`. No token of a version before `oldest` carried loss:
    the strictest bound under which a shard has taken its part."""

    version: Version
    oldest: Version = 0


class DiscardBatch(BufferMessage, frozen=True):
    """The groups of the batch of `version` served their purpose without a step of the policy: they are discarded for `reason`, and
    the weights stay `version`. Repeating it changes nothing."""

    version: Version
    groups: tuple[GroupId, ...]
    reason: Unstepped


class SetAside(BufferMessage, frozen=True):
    """A learner rank has proven that `groups` of the batch of `version` cannot be trained on. Answered with GroupsSetAside."""

    version: Version
    groups: Annotated[tuple[GroupId, ...], Meta(min_length=1, max_length=1 << 16)]
    reason: Reason


class StepFailed(BufferMessage, frozen=True):
    """A learner rank failed to step on the batch of `version`, by what may be its data. Answered with GroupsSetAside."""

    version: Version
    reason: Reason


class MarkCheckpointed(BufferMessage, frozen=True):
    """A checkpoint holds all commits up to `version`; they will not be rolled back."""

    version: Version


class Recover(BufferMessage, frozen=True):
    """A learner starts from weights that contain the commits up to `version`; later ones are rolled back. To a shard: `publish_as`
    is what the clock has answered."""

    version: Version
    publish_as: Version | None = None


class RequestFresh(BufferMessage, frozen=True):
    """A learner rank, before it steps on from `version`, requests at most `limit` trajectories with tokens of that version."""

    version: Version
    limit: Annotated[int, Meta(ge=0, le=1 << 16)]


class Configure(BufferMessage, frozen=True):
    """The supervisor changes the rules. Revisions rise with every change: rules older than the newest change nothing."""

    revision: Annotated[int, Meta(ge=0, lt=1 << 62)]
    rules: LiveRules


class RequestStats(BufferMessage, frozen=True):
    """Read-only request for `Stats`."""


class Ack(BufferMessage, frozen=True):
    """The request is carried out, now or earlier."""


class LeaseReply(BufferMessage, frozen=True):
    leases: tuple[Lease, ...]  # none only where the request said how long it waits


class CancelledEpisodes(BufferMessage, frozen=True):
    """Of the reported episodes, those to cancel: their leases are lost, or their groups are settled."""

    episodes: tuple[str, ...]


class GroupsSetAside(BufferMessage, frozen=True):
    """The groups that are discarded now because they cannot be trained on; none where the step is to be tried once more."""

    groups: tuple[int, ...]


class RecoverReply(BufferMessage, frozen=True):
    """The version to publish the recovered weights under: above every version ever used, unless nothing was rolled back."""

    version: int


class Configured(BufferMessage, frozen=True):
    """The rules are in force."""

    version: int  # at which the first batch under them is taken


class Stats(BufferMessage, frozen=True):
    """The buffer at one instant: `leased_groups` are running, `ready_groups` are complete and not committed."""

    version: int
    ledger: Ledger
    leased_groups: int
    ready_groups: int
    # Summed over workers since the service started.
    slot_s: float
    idle_slot_s: float
    refilled_groups: int = 0  # discarded because all rewards were equal, since the run began; others replaced them
    outcomes: dict[str, int] = {}  # episodes that ended, by `Outcome.label`, since the run began
    dropped: int = 0  # messages that were no request, since the service started
    # Of which groups were set aside because they cannot be trained on, since the run began; once for each shard that had some.
    unusable_batches: int = 0
    refused: int = 0  # attempts to connect by peers that are no role of the run, since the service started


class BatchPlan(BufferMessage, Generic[Row], frozen=True):
    """One learner step's data: groups, oldest first. Rows are encoded on the wire, without arrays as a rank takes the plan, and
    trajectories in a batch that is read whole."""

    version: int  # the version it was taken for
    oldest_version: int  # tokens sampled by an older version are context without loss
    groups: tuple[tuple[Row, ...], ...]  # all branches of all episodes that were kept, group by group
    # Ids of episodes among them that carry no loss, and why; their rewards count in their groups.
    withheld: dict[str, Withheld]
    stats: Stats  # the buffer when the batch was handed out
    # The folder of its rows' arrays, on every host of the run. Of one process of the buffer: each has its own.
    arrays: str = ""


class ImagesReply(BufferMessage, frozen=True):
    """To FetchImages, in its order: the bytes of each of the first files, see `ImageFiles.first`."""

    files: tuple[NDArray[np.uint8], ...]


class TrajectoriesReply(BufferMessage, frozen=True):
    """Delivered trajectories that are in no batch yet and stay in the buffer."""

    trajectories: tuple[EncodedTrajectory, ...]


Request = (
    Register
    | RequestLease
    | ReportProgress
    | DeliverEpisode
    | Deregister
    | TakeBatch
    | FetchImages
    | CommitBatch
    | DiscardBatch
    | SetAside
    | StepFailed
    | MarkCheckpointed
    | Recover
    | RequestFresh
    | RequestStats
    | Configure
)
Reply = (
    Ack
    | LeaseReply
    | CancelledEpisodes
    | GroupsSetAside
    | RecoverReply
    | Stats
    | BatchPlan[EncodedRow]
    | ImagesReply
    | TrajectoriesReply
    | Configured
)

RIGHTS: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((Register, RequestLease, ReportProgress, DeliverEpisode, Deregister), ("worker",)),
    **dict.fromkeys((TakeBatch, CommitBatch, DiscardBatch, SetAside, StepFailed), ("learner",)),
    **dict.fromkeys((MarkCheckpointed, Recover, RequestFresh, FetchImages), ("learner",)),
    Configure: ("supervisor",),
    RequestStats: ("worker", "evaluator", "learner", "supervisor"),
}
"""The kinds of roles that may send each request."""

Envelope = RpcMessage[Request]
ReplyEnvelope = RpcMessage[Reply | RpcRefusal]
