"""A trajectory: the tokens of one episode, the policy versions that sampled them, and their reward.

Invariants, checked by `Trajectory.check` before anything is accepted into the buffer:
- All arrays have one length T; `loss_mask` is true exactly at the tokens that the policy sampled.
- `turns`, `segments` and `version_spans` are sorted, do not overlap and lie within T; the spans cover every sampled token and no
  other.
- `behavior_logprobs` is finite, at most 0 at sampled tokens, and 0 elsewhere.
- Turns and spans form no reference cycles, so the garbage collector does not track them (`gc=False`): there may be hundreds.
- Times are absolute: seconds since the epoch on the clock of the worker's host. They are records; nothing is decided by them. Those
  of turns are bounded by their type: decoding refuses others.
- `experts`, where there are any, has a row for each token (`common/routed_experts.py`); the header says how wide it is.
- A token is sampled in exactly one trajectory. An agent that rewrites its history opens a new *branch*: another trajectory
  of the same member, whose earlier turns are context (`loss_mask` false).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from ..common.bounded import Seconds
from ..common.images import PlacedImage, misplaced
from ..common.outcomes import FAILED
from ..common.routed_experts import ExpertLayout
from ..errors import WireError
from ..rpc.wire import FRAME_LIMIT

# Tokens in one trajectory. Beyond any context served today; keeps a forged header from allocating memory.
LENGTH_LIMIT = 1 << 22
# Bytes of arrays per token: an id (int32), a log-prob (float32), and whether it was sampled. Experts follow those of all tokens.
TOKEN_BYTES = 9
ARRAYS_LIMIT = FRAME_LIMIT  # bytes of one trajectory's arrays
NAME_LIMIT = 1000  # characters of a task's or environment's name
SEGMENTS_LIMIT = 4000  # messages that a branch names: 100 kB; a conversation may have any number
CALLS_LIMIT = 1000  # calls of environments and tools that a trajectory records: 40 kB; an agent may make any number
DETAIL_LIMIT = 4000  # characters of a failure's detail
LOGPROB_LIMIT = 1e-4  # nats: how far above 0 rounding may take the log-prob of a token that is certain
NOWHERE = -1  # position of arrays of which it is not known here
Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens `[start, end)` were sampled by the weights of policy version `version`, as the engine reported it.

    `kv_version` is the oldest version whose cached keys and values they attended to, where that is not `version`: the weights were
    swapped under a request that kept its KV cache, so the tokens come from a mixed policy. Staleness counts `version`.
    """

    start: int
    end: int
    version: int
    kv_version: int | None = None

    @property
    def mixed(self) -> bool:
        """Whether keys and values of another version were attended to."""
        return self.kv_version is not None and self.kv_version != self.version


def by_version(spans: Iterable[VersionSpan]) -> dict[int, int]:
    """Policy version -> tokens in `spans`."""
    counts: dict[int, int] = {}
    for span in spans:
        counts[span.version] = counts.get(span.version, 0) + span.end - span.start
    return counts


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One completion: the sampled tokens `[start, end)` and why they ended (`stop`, `length`, `abort`); then what its request took.
    It arrived at `asked + queued_s + first_s + decode_s`, and later by the pauses between its parts where it was interrupted."""

    start: int
    end: int
    finish_reason: str
    asked: Seconds = 0.0  # when the agent asked for it; 0 where that was not recorded
    queued_s: Seconds = 0.0  # in the router, until a replica had a free slot
    first_s: Seconds = 0.0  # at the replica until its first token, the server's own queue and the prefill included
    decode_s: Seconds = 0.0  # from its first token to its last, pauses of the replica included
    # Tokens of its prompt that the server had in its prefix cache; None where the server does not say.
    cached: int | None = None
    replica: Annotated[str, Meta(max_length=100)] = ""  # that answered last
    temperature: float = 1.0


class EnvCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One call of the environment, or of a tool inside one."""

    begin: float  # seconds since the epoch
    end: float
    what: Literal["task", "reset", "step", "tool"]
    tool: Annotated[str, Meta(max_length=NAME_LIMIT)] = ""  # its name, of `tool`
    # "" where it returned; `invalid`: the policy called the tool wrongly; else whose failure it was.
    error: Literal["", "invalid", "tool", "environment", "cancelled"] = ""


class Segment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens `[start, end)` are what one message says, without what the chat format writes around it. `tools` is the role of the
    list of tools, which is no message."""

    start: int
    end: int
    role: Literal["system", "user", "assistant", "tool", "tools"]
    name: Annotated[str, Meta(max_length=NAME_LIMIT)] = ""  # of the tool that answered
    malformed: Annotated[str, Meta(max_length=DETAIL_LIMIT)] = ""  # why an assistant's message could not be read


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How the episode ended. A failure is never a reward: the reward of a failed episode is ignored. Where failures are trained on,
    it is the penalty that the environment declares.

    `finished`: the environment ended it. `truncated`: the token or turn limit came first; the reward so far counts.
    `failed`: `reason` names the cause (`tool`, `environment`, `engine`, `policy`, `timeout`).
    """

    kind: Literal["finished", "truncated", "failed"]
    reason: Annotated[str, Meta(max_length=40, pattern="^[a-z_]*$")] = ""
    detail: Annotated[str, Meta(max_length=DETAIL_LIMIT)] = ""

    @property
    def label(self) -> str:
        """What counts of episodes call it: `finished`, `truncated`, `failed_tool`."""
        return FAILED + self.reason if self.kind == "failed" else self.kind

    @property
    def trainable(self) -> bool:
        return self.kind != "failed"


UNWANTED = "unwanted"  # reason of an episode that the buffer had cancelled: no failure of the run
FINISHED = Outcome("finished")
TRUNCATED = Outcome("truncated")


class TrajectoryHeader(msgspec.Struct, frozen=True):
    """Everything about one branch of one episode but its arrays."""

    id: Annotated[str, Meta(max_length=84)]  # `group.attempt.member.branch`; unique over the life of a run
    group_id: Number  # the task group, numbered in the order of first leases
    member: Number  # which of the group's episodes
    branch: Number  # which branch of the episode, 0 for the first
    task_id: str  # the environment's name for the task
    env: str  # the environment's name
    version_spans: tuple[VersionSpan, ...]  # policy versions of the sampled tokens
    turns: tuple[Turn, ...]  # completions in order
    reward: float  # the episode's return (the same on all its branches)
    turn_rewards: tuple[float, ...]  # reward after each turn of the episode
    outcome: Outcome  # how it ended
    timings: dict[str, float] = {}  # seconds by name (`environment`, `total`)
    metrics: dict[str, float] = {}  # numbers that the environment reports
    started: float = 0.0  # when the episode began; it ended `timings["total"]` later
    env_calls: tuple[EnvCall, ...] = ()  # of the episode by their ends, on its first branch; at most `CALLS_LIMIT`
    # Messages in order, where the chat format says which tokens are of which; the first ones only.
    segments: tuple[Segment, ...] = ()
    images: tuple[PlacedImage, ...] = ()  # in its tokens, in order; their files are kept once each, by digest
    expert_layout: ExpertLayout | None = None  # of the experts behind its other arrays; None where there are none

    @property
    def episode(self) -> str:
        """The id of the episode that it is a branch of."""
        return self.id.rpartition(".")[0]

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(span.end - span.start for span in self.version_spans)

    def __len__(self) -> int:
        """T, its tokens."""
        raise NotImplementedError

    def versions(self) -> NDArray[np.int32]:
        """int32[T]: the policy version of each sampled token, -1 elsewhere."""
        out = np.full(len(self), -1, dtype=np.int32)
        for span in self.version_spans:
            out[span.start : span.end] = span.version
        return out


class BatchRow(TrajectoryHeader, frozen=True, kw_only=True):
    """A trajectory of a batch without its arrays, which `BufferClient.read_rows` reads at their position."""

    length: int = 0
    position: int = NOWHERE
    """Where its arrays begin among those of its shard, see `segments`."""
    checksum: int = 0
    """Of its arrays, see `encoded.checksum_of`."""
    prompt: int = 0
    """Hash of the tokens and images before the first sampled one."""

    def __len__(self) -> int:
        return self.length

    @property
    def nbytes(self) -> int:
        """Of its arrays."""
        return token_bytes(self.expert_layout) * self.length


class Trajectory(TrajectoryHeader, frozen=True, kw_only=True):
    """One branch of one episode, T tokens long."""

    token_ids: NDArray[np.int32]  # int32[T]
    loss_mask: NDArray[np.bool_]  # bool[T], true where the policy sampled the token
    behavior_logprobs: NDArray[np.float32]  # float32[T], nats, 0 where masked
    # uint8 or uint16[T, layers, top_k], see `common/routed_experts.py`; None: no record
    experts: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def check(self) -> None:
        """Raises WireError where an invariant of this module does not hold."""

        def require(ok: Any, what: str) -> None:
            if not ok:
                raise WireError(f"trajectory {self.id!r}: {what}")

        n = len(self.token_ids)
        names = max(len(self.task_id), len(self.env))
        require(names <= NAME_LIMIT, f"task_id and env may have {NAME_LIMIT} characters")
        require(0 < n <= LENGTH_LIMIT, f"{n} tokens; allowed are 1 to {LENGTH_LIMIT}")
        require(self.token_ids.dtype == np.int32 and self.token_ids.ndim == 1, "token_ids must be int32[T]")
        require(self.loss_mask.dtype == np.bool_ and self.loss_mask.shape == (n,), "loss_mask must be bool[T]")
        logprobs = self.behavior_logprobs
        require(logprobs.dtype == np.float32 and logprobs.shape == (n,), "behavior_logprobs must be float32[T]")
        require(self.token_ids.min() >= 0, "token ids must not be negative")
        require(logprobs.min() > -np.inf, "behavior_logprobs must be finite")  # the minimum with a NaN is NaN
        require(logprobs.max() <= LOGPROB_LIMIT, "behavior_logprobs must not be positive")
        require(not ((logprobs != 0) > self.loss_mask).any(), "behavior_logprobs must be 0 where nothing was sampled")
        if self.experts is not None:
            require(len(self.experts) == n, f"experts of {len(self.experts)} tokens came for {n}")
        require(all(map(math.isfinite, (self.reward, *self.turn_rewards))), "rewards must be finite")
        require(len(self.env_calls) <= CALLS_LIMIT, f"env_calls may have {CALLS_LIMIT} entries")
        require(len(self.segments) <= SEGMENTS_LIMIT, f"segments may have {SEGMENTS_LIMIT} entries")
        times = (self.started, *(time for call in self.env_calls for time in (call.begin, call.end)))
        require(all(map(math.isfinite, times)), "times must be finite")
        at = 0
        for turn in self.turns:
            if not at <= turn.start <= turn.end <= n:  # no `require`: it would format its message for every turn
                raise WireError(f"trajectory {self.id!r}: bad turn {turn}")
            at = turn.end
        at = 0
        for segment in self.segments:
            if not at <= segment.start < segment.end <= n:
                raise WireError(f"trajectory {self.id!r}: bad segment {segment}")
            at = segment.end
        image = misplaced(self.images, self.loss_mask)
        require(image is None, f"bad image {image}")
        at = 0
        covered = bytearray(n)
        for span in self.version_spans:
            oldest = span.version if span.kv_version is None else span.kv_version
            if not (at <= span.start < span.end <= n and 0 <= oldest <= span.version):
                raise WireError(f"trajectory {self.id!r}: bad version span {span}")
            covered[span.start : span.end] = b"\x01" * (span.end - span.start)
            at = span.end
        require(covered == self.loss_mask.tobytes(), "version spans must cover exactly the sampled tokens")


def token_bytes(layout: ExpertLayout | None) -> int:
    """Bytes of all arrays per token."""
    return TOKEN_BYTES + (0 if layout is None else layout.token_bytes)


def sampled_of(episode_id: str, branches: Sequence[Trajectory]) -> dict[int, int]:
    """Policy version -> tokens that it sampled, over the branches of one episode.

    Raises:
        WireError: they are not that episode's, or an invariant of this module does not hold.
    """
    if len({branch.id for branch in branches}) < len(branches):
        raise WireError(f"episode {episode_id!r} came with the same branch twice")
    if len({branch.reward for branch in branches}) > 1:
        raise WireError(f"episode {episode_id!r} came with branches that disagree about its reward")
    for t in branches:
        t.check()
        belongs = episode_id.startswith(f"{t.group_id}.") and episode_id.endswith(f".{t.member}")
        if not belongs or t.id != f"{episode_id}.{t.branch}":
            raise WireError(
                f"trajectory {t.id!r} of group {t.group_id}, member {t.member}, branch {t.branch} came with episode {episode_id!r}"
            )
    return by_version(span for t in branches for span in t.version_spans)
