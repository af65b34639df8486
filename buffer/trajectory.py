"""What one episode left behind: the tokens, who sampled them, and what they earned.

Invariants, checked by `Trajectory.check` before anything is accepted into the buffer:
- All arrays have one length T; `loss_mask` is true exactly at the tokens that the policy sampled.
- `turns` and `version_spans` are sorted, do not overlap and lie within T; the spans cover every sampled token and no other.
- `behavior_logprobs` is finite, at most 0 at sampled tokens, and 0 elsewhere.
- What a trajectory is made of refers to nothing that could refer back, so the collector of cycles need not look at it (`gc=False`):
  a long one has hundreds of turns and spans.
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

from ..errors import WireError

LENGTH_LIMIT = 1 << 22
"""Tokens in one trajectory. Four million is beyond any context served today and keeps a forged header from allocating memory."""

NAME_LIMIT = 1000
"""Characters of a name that the environment gives."""

DETAIL_LIMIT = 4000
"""Characters of what is told of a failure: the end of a traceback is beyond use."""

Number = Annotated[int, Meta(ge=0, lt=1 << 62)]


class VersionSpan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens `[start, end)` were sampled by the weights of policy version `version`, as the engine reported it.

    `kv_version` is the oldest version whose cached keys and values they attended to, where that is not `version`: the weights
    were swapped under a request that kept its cache, and the tokens come from a mixed policy. Staleness counts `version`.
    """

    start: int
    end: int
    version: int
    kv_version: int | None = None

    @property
    def mixed(self) -> bool:
        """Whether keys and values of other weights took part."""
        return self.kv_version is not None and self.kv_version != self.version


def by_version(spans: Iterable[VersionSpan]) -> dict[int, int]:
    """Policy version -> tokens in `spans`."""
    counts: dict[int, int] = {}
    for span in spans:
        counts[span.version] = counts.get(span.version, 0) + span.end - span.start
    return counts


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One completion: the sampled tokens `[start, end)` and why they ended (`stop`, `length`, `abort`)."""

    start: int
    end: int
    finish_reason: str


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How the episode ended. A failure is never a reward: what a failed episode earned counts for nothing. Where failures are
    trained on, its reward is the penalty that the environment declared.

    `finished`: the environment said so. `truncated`: the token or turn limit came first; the reward so far counts.
    `failed`: `reason` names whose fault it was (`tool`, `environment`, `engine`, `policy`, `timeout`).
    """

    kind: Literal["finished", "truncated", "failed"]
    reason: Annotated[str, Meta(max_length=40, pattern="^[a-z_]*$")] = ""
    detail: Annotated[str, Meta(max_length=DETAIL_LIMIT)] = ""

    @property
    def trainable(self) -> bool:
        return self.kind != "failed"


FINISHED = Outcome("finished")
TRUNCATED = Outcome("truncated")


class Trajectory(msgspec.Struct, frozen=True):
    """One branch of one episode, T tokens long.

    Attributes:
        id: `group.attempt.member.branch`; unique over the life of a run.
        group_id: the task group, in the order in which groups were granted.
        member: which of the group's episodes.
        branch: which branch of the episode, 0 for the first.
        task_id: the environment's own name for the task.
        env: the environment's name.
        token_ids: int32[T].
        loss_mask: bool[T], true where the policy sampled the token.
        behavior_logprobs: float32[T], nats, 0 where masked.
        version_spans: policy versions of the sampled tokens.
        turns: completions in order.
        reward: the episode's return (the same on all its branches).
        turn_rewards: reward after each turn of the episode.
        outcome: how it ended.
        timings: seconds by name (`environment`, `total`).
        metrics: numbers that the environment reported.
    """

    id: Annotated[str, Meta(max_length=84)]
    group_id: Number
    member: Number
    branch: Number
    task_id: str
    env: str
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    version_spans: tuple[VersionSpan, ...]
    turns: tuple[Turn, ...]
    reward: float
    turn_rewards: tuple[float, ...]
    outcome: Outcome
    timings: dict[str, float] = {}
    metrics: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def episode(self) -> str:
        """The id of the episode that it is a branch of."""
        return self.id.rpartition(".")[0]

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask.sum())

    def versions(self) -> NDArray[np.int32]:
        """int32[T]: the policy version of each sampled token, -1 elsewhere."""
        out = np.full(len(self), -1, dtype=np.int32)
        for span in self.version_spans:
            out[span.start : span.end] = span.version
        return out

    def mixed(self) -> NDArray[np.bool_]:
        """bool[T]: sampled tokens for which keys and values of another version took part (`VersionSpan.mixed`)."""
        out = np.zeros(len(self), dtype=np.bool_)
        for span in self.version_spans:
            out[span.start : span.end] = span.mixed
        return out

    def check(self) -> None:
        """Raises WireError where an invariant of this module does not hold."""

        def require(ok: Any, what: str) -> None:
            if not ok:
                raise WireError(f"trajectory {self.id!r}: {what}")

        n = len(self.token_ids)
        require(
            max(len(self.task_id), len(self.env)) <= NAME_LIMIT, f"task_id and env may have {NAME_LIMIT} characters"
        )
        require(0 < n <= LENGTH_LIMIT, f"{n} tokens; allowed are 1 to {LENGTH_LIMIT}")
        require(self.token_ids.dtype == np.int32 and self.token_ids.ndim == 1, "token_ids must be int32[T]")
        require(self.loss_mask.dtype == np.bool_ and self.loss_mask.shape == (n,), "loss_mask must be bool[T]")
        logprobs = self.behavior_logprobs
        require(logprobs.dtype == np.float32 and logprobs.shape == (n,), "behavior_logprobs must be float32[T]")
        require(self.token_ids.min() >= 0, "token ids must not be negative")
        require(logprobs.min() > -np.inf, "behavior_logprobs must be finite")  # the least of numbers with NaN is NaN
        require(logprobs.max() <= 1e-4, "behavior_logprobs must not be positive")
        require(not ((logprobs != 0) > self.loss_mask).any(), "behavior_logprobs must be 0 where nothing was sampled")
        require(all(map(math.isfinite, (self.reward, *self.turn_rewards))), "rewards must be finite")
        at = 0
        for turn in self.turns:
            if not at <= turn.start <= turn.end <= n:  # no `require`: its message would be made for every turn
                raise WireError(f"trajectory {self.id!r}: bad turn {turn}")
            at = turn.end
        at = 0
        covered = np.zeros(n, dtype=np.bool_)
        for span in self.version_spans:
            oldest = span.version if span.kv_version is None else span.kv_version
            if not (at <= span.start < span.end <= n and 0 <= oldest <= span.version):
                raise WireError(f"trajectory {self.id!r}: bad version span {span}")
            covered[span.start : span.end] = True
            at = span.end
        require(np.array_equal(covered, self.loss_mask), "version spans must cover exactly the sampled tokens")


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
