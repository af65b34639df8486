"""The learner's batch as flat columns: all sequences side by side on one token axis.

    groups ──flatten──> TrainBatch ──aux models, estimators──> ──trainable──> sequences that carry loss ──> `packing.py`

Invariants:
- `offsets` cut the token axis into sequences. A sequence is one branch of one episode.
- `loss_mask` is false at the first token of a sequence, which no logit predicts.
- Everything is deterministic. Each rank computes the same columns from the headers of the batch before it takes its part.
- `token_ids` and `behavior_logprobs` are 0 in sequences whose rows this rank has not read (`with_rows`).
- A member's reward counts once, however many branches it has. Its turns are those of its branches, one branch after the other.
- A failed episode is here only where the worker was configured to train on it. Its reward is the penalty that its environment
  declared, given after its last turn.
- Shaping (`estimators.overlong`) adds to the reward that an estimator sees, after the last turn, but not to that of statistics, of
  the buffer's dynamic sampling and filter, or of failures.
- A sampled token carries loss exactly when its staleness is within the bound and its episode is not masked; others are context.
- An expert trace is a member of its group whose tokens no version sampled. They are columns like sampled ones, with log-prob 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..buffer.ledger import Withheld
from ..buffer.trajectory import BatchRow, Trajectory, TrajectoryHeader
from ..common.images import PlacedImage
from ..errors import LearnerError

Group = tuple[TrajectoryHeader, ...]  # all branches of all members of one task group

Shaping = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Lengths of episodes in tokens of their longest branch, int64[E], to what is added to their rewards, float64[E]."""

ALL_TRAINED: Mapping[str, Withheld] = {}
NO_VERSION = -1  # of the policy: it sampled the tokens of an expert trace (`traces.py`)


class TrainBatch(msgspec.Struct, frozen=True):
    """S sequences of N tokens in all, which have K turns and belong to E episodes."""

    token_ids: NDArray[np.int32]  # int32[N]
    loss_mask: NDArray[np.bool_]  # bool[N], tokens that carry loss
    sampled: NDArray[np.bool_]  # bool[N], tokens that the policy sampled
    behavior_logprobs: NDArray[np.float32]  # float32[N], of the policy that sampled them, 0 elsewhere
    # int32[N], learner version minus the version that sampled the token, -1 elsewhere, and at tokens of expert traces
    staleness: NDArray[np.int32]
    mixed: NDArray[np.bool_]  # bool[N], tokens sampled from a mixed policy (`VersionSpan.mixed`)
    advantages: NDArray[np.float64]  # float64[N]; rounded to float32 when they are packed
    turn: NDArray[np.int32]  # int32[N], the turn that the token belongs to, -1 outside of all turns
    offsets: NDArray[np.int64]  # int64[S + 1], where sequences begin and end on the token axis
    positive: NDArray[np.bool_]  # bool[S], whether the reward of the sequence's episode is above 0
    episode: NDArray[np.int64]  # int64[S], the sequence's episode
    ids: tuple[str, ...]  # S trajectory ids
    episode_ids: tuple[str, ...]  # E names, for messages
    groups: NDArray[np.int64]  # int64[E], the task group, counted from 0 without gaps
    rewards: NDArray[np.float64]  # float64[E], the return; of a failure that is trained on, its penalty
    lengths: NDArray[np.int64]  # int64[E], sampled tokens of all branches
    turns: NDArray[np.int64]  # int64[E], completions; their sum is K
    steps: NDArray[np.int64]  # int64[E], environment steps that have a reward; their sum is R
    step_rewards: NDArray[np.float64]  # float64[R], the reward after each step, episode by episode
    greedy: NDArray[np.bool_]  # bool[E], baselines that were played at temperature 0
    masked: NDArray[np.bool_]  # bool[E], episodes that carry no loss and are compared with
    # int64[S], hashes of tokens before the first sampled one, and of their experts
    prompts: NDArray[np.int64] | None = None
    teacher: NDArray[np.int64] | None = (
        None  # int64[S], the reference policy that scores the sequence; None where there is one
    )
    reference_logprobs: NDArray[np.float32] | None = None  # float32[N], of the reference policy
    # int32[N, k] and float32[N, k]: the tokens that a teacher finds likeliest in the place of each, and their log-probs
    teacher_ids: NDArray[np.int32] | None = None
    teacher_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None  # float32[N], a critic's, or a reward model's log(policy / reference)
    penalties: NDArray[np.float32] | None = None  # float32[N], taken off the rewards; None for no penalty
    returns: NDArray[np.float32] | None = None  # float32[N], the critic's targets; None where there is no critic
    # [N, layers, top_k], which experts the engine's routers chose, zeros where there is no record; None where there is none at all
    experts: NDArray[Any] | None = None
    images: tuple[tuple[PlacedImage, ...], ...] | None = (
        None  # S tuples, by positions in the sequence; None where none has any
    )
    image_files: Mapping[str, bytes] = {}  # by digest, of the sequences whose rows this rank has read
    envs: tuple[str, ...] = ()  # E names of environments
    metrics: tuple[Mapping[str, float], ...] = ()  # E mappings: what the environment reported of each episode
    carried: dict[str, float] = {}  # numbers that the algorithm carries from step to step, by name (`CheckpointState`)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[TrainBatch]:
        """Each sequence as a batch of its own."""
        return (self.select([i]) for i in range(len(self)))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """int64[S]: tokens of each sequence."""
        return np.diff(self.offsets)

    @property
    def traced(self) -> NDArray[np.bool_]:
        """bool[N]: tokens with loss of expert traces, which no version of the policy sampled."""
        return self.loss_mask & (self.staleness < 0)

    @property
    def trained_samples(self) -> NDArray[np.bool_]:
        """bool[N]: tokens with loss that some version of the policy sampled."""
        return self.loss_mask & (self.staleness >= 0)

    @property
    def episode_of_token(self) -> NDArray[np.int64]:
        """int64[N]."""
        return np.repeat(self.episode, self.sizes)

    def select(self, indices: Sequence[int], sizes: NDArray[np.int64] | None = None) -> TrainBatch:
        """The sequences `indices`, each cut after its first `sizes` tokens if given. Columns by episode stay whole."""
        chosen = np.asarray(indices, dtype=np.int64)
        sizes = self.sizes[chosen] if sizes is None else sizes
        starts = self.offsets[chosen]
        offsets = _offsets(sizes)
        tokens = np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
        columns = {name: column for name in TOKEN_COLUMNS if (column := getattr(self, name)) is not None}
        return msgspec.structs.replace(
            self,
            offsets=offsets,
            positive=self.positive[chosen],
            episode=self.episode[chosen],
            ids=tuple(self.ids[i] for i in chosen),
            images=None if self.images is None else _cut(self.images, chosen, sizes),
            prompts=None if self.prompts is None else self.prompts[chosen],
            teacher=None if self.teacher is None else self.teacher[chosen],
            **{name: column[tokens] for name, column in columns.items()},
        )


AUX_COLUMNS = ("reference_logprobs", "values", "penalties", "returns")
TOKEN_COLUMNS = (
    *("token_ids", "loss_mask", "sampled", "behavior_logprobs", "staleness", "mixed", "advantages", "turn"),
    *AUX_COLUMNS,
    *("teacher_ids", "teacher_logprobs", "experts"),
)
"""Columns of `TrainBatch` with one entry per token; those that aux models and engines give may be None."""


def make_batch(
    token_ids: NDArray[np.int32], loss_mask: NDArray[np.bool_], sizes: NDArray[np.int64], **columns: Any
) -> TrainBatch:
    """A batch of these tokens, cut by `sizes` int64[S]. Columns that are not given are those of a batch sampled just now by the
    policy itself, with advantage 1 wherever there is loss and no episodes."""
    none, zeros = np.zeros(0), np.zeros(len(token_ids), dtype=np.float32)
    defaults = {
        "sampled": loss_mask,
        "behavior_logprobs": zeros,
        "staleness": np.where(loss_mask, 0, -1).astype(np.int32),
        "mixed": np.zeros(len(token_ids), dtype=np.bool_),
        "advantages": loss_mask.astype(np.float64),
        "turn": np.full(len(token_ids), -1, dtype=np.int32),
        "positive": np.zeros(len(sizes), dtype=np.bool_),
        "episode": np.arange(len(sizes)),
        "ids": ("",) * len(sizes),
        "episode_ids": (),
        **{name: none.astype(np.int64) for name in ("groups", "lengths", "turns", "steps")},
        **{name: none for name in ("rewards", "step_rewards")},
        **{name: none.astype(np.bool_) for name in ("greedy", "masked")},
    }
    return TrainBatch(token_ids=token_ids, loss_mask=loss_mask, offsets=_offsets(sizes), **{**defaults, **columns})


def supervised(
    examples: Sequence[tuple[Sequence[int] | NDArray[np.int32], Sequence[bool] | NDArray[np.bool_]]],
) -> TrainBatch:
    """Sequences of (token ids, mask), whose masked tokens are to be made likely; the first token of each never is."""
    sizes = np.array([len(token_ids) for token_ids, _ in examples], dtype=np.int64)
    loss_mask = concatenate([mask for _, mask in examples], np.bool_)
    loss_mask[_offsets(sizes)[:-1]] = False
    return make_batch(concatenate([token_ids for token_ids, _ in examples], np.int32), loss_mask, sizes)


def _cut(
    images: Sequence[tuple[PlacedImage, ...]], chosen: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[tuple[PlacedImage, ...], ...]:
    """Of the sequences `chosen`, of which `sizes` tokens are left."""
    left = zip(chosen.tolist(), sizes.tolist(), strict=True)
    return tuple(tuple(image for image in images[i] if image.end <= size) for i, size in left)


def concatenate(arrays: Sequence[Any], dtype: Any) -> NDArray[Any]:
    """One array of `dtype`, new and perhaps empty, of `arrays` side by side."""
    return np.concatenate([np.zeros(0, dtype=dtype), *(np.asarray(array, dtype=dtype) for array in arrays)])


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])


# --- from trajectories


def flatten(
    groups: Sequence[Group],
    version: int,
    *,
    withheld: Mapping[str, Withheld] = ALL_TRAINED,
    shape: Shaping | None = None,
) -> TrainBatch:
    """All branches of `groups`, episode by episode, without advantages; every sampled token that a logit predicts has loss.
    Episodes of `withheld` carry no loss; the others are compared with them. Raises LearnerError: a group is empty, a reward is not
    finite, a failed episode carries rewards from before it failed, or the branches of one disagree about its reward."""
    by_group = [_episodes(number, group) for number, group in enumerate(groups)]
    episodes = list(chain.from_iterable(by_group))
    branches = list(chain.from_iterable(episodes))
    firsts = [episode[0] for episode in episodes]
    ids = tuple(first.episode for first in firsts)
    turns = [sum(len(branch.turns) for branch in episode) for episode in episodes]
    contexts = np.array([max(map(len, episode)) for episode in episodes], dtype=np.int64)
    extra = (np.zeros(len(episodes)) if shape is None else shape(contexts)).tolist()
    steps = [_step_rewards(*one) for one in zip(firsts, turns, extra, strict=True)]
    return msgspec.structs.replace(
        by_token(branches, version),
        episode=np.repeat(np.arange(len(episodes)), [len(episode) for episode in episodes]),
        episode_ids=ids,
        groups=np.repeat(np.arange(len(by_group)), [len(group) for group in by_group]),
        rewards=np.array([t.reward + more * t.outcome.trainable for t, more in zip(firsts, extra, strict=True)]),
        lengths=np.array([sum(branch.sampled for branch in episode) for episode in episodes], dtype=np.int64),
        turns=np.array(turns, dtype=np.int64),
        steps=np.array([len(rewards) for rewards in steps], dtype=np.int64),
        step_rewards=concatenate(steps, np.float64),
        greedy=np.array([withheld.get(name) == "baseline" for name in ids], dtype=np.bool_),
        masked=np.array([name in withheld for name in ids], dtype=np.bool_),
        envs=tuple(first.env for first in firsts),
        metrics=tuple(first.metrics for first in firsts),
    )


def _episodes(number: int, group: Group) -> list[list[TrajectoryHeader]]:
    """The members of a group, each as its branches in the order in which they were opened."""
    if not group:
        raise LearnerError(f"group number {number} of the batch is empty: there is nothing to compare and to train on")
    members: dict[int, list[TrajectoryHeader]] = {}
    for trajectory in group:
        if not all(map(math.isfinite, (trajectory.reward, *trajectory.turn_rewards))):
            raise LearnerError(
                f"trajectory {trajectory.id!r}: its reward {trajectory.reward}, or one of its turns', is not finite"
            )
        if not trajectory.outcome.trainable and trajectory.turn_rewards:
            raise LearnerError(
                f"trajectory {trajectory.id!r} failed and carries rewards; a failure is trained with its penalty or not at all"
            )
        member = members.setdefault(trajectory.member, [])
        if member and member[0].reward != trajectory.reward:
            raise LearnerError(
                f"trajectory {trajectory.id!r}: its reward differs from that of the episode's other branches"
            )
        member.append(trajectory)
    return [sorted(member, key=lambda t: t.branch) for member in members.values()]


def _step_rewards(first: TrajectoryHeader, turns: int, extra: float) -> NDArray[np.float64]:
    """The reward after each step of an episode, by its first branch; of a failure its penalty after the last of its `turns`."""
    failed = not first.outcome.trainable
    rewards = np.zeros(turns) if failed else np.array(first.turn_rewards, dtype=np.float64)
    rewards[len(rewards) - 1 :] += first.reward if failed else extra
    return rewards


def by_token(branches: Sequence[TrajectoryHeader], version: int) -> TrainBatch:
    """The columns of `branches` by token and by sequence; advantages are 0."""
    sizes = np.array([len(branch) for branch in branches], dtype=np.int64)
    starts, total = np.cumsum(sizes) - sizes, int(sizes.sum())
    sampled, mixed = np.zeros(total, dtype=np.bool_), np.zeros(total, dtype=np.bool_)
    staleness, turn, turns = np.full(total, -1, dtype=np.int32), np.full(total, -1, dtype=np.int32), 0
    for start, branch in zip(starts.tolist(), branches, strict=True):
        for span in branch.version_spans:
            tokens = slice(start + span.start, start + span.end)
            sampled[tokens], mixed[tokens] = True, span.mixed
            staleness[tokens] = -1 if span.version == NO_VERSION else version - span.version
        for number, one in enumerate(branch.turns, start=turns):
            turn[start + one.start : start + one.end] = number
        turns += len(branch.turns)
    loss_mask = sampled.copy()
    loss_mask[starts] = False
    prompts = [branch.prompt for branch in branches if isinstance(branch, BatchRow)]
    batch = make_batch(
        np.zeros(total, dtype=np.int32),
        loss_mask,
        sizes,
        sampled=sampled,
        staleness=staleness,
        mixed=mixed,
        advantages=np.zeros(total),
        turn=turn,
        positive=np.array([b.outcome.trainable and b.reward > 0 for b in branches], dtype=np.bool_),
        ids=tuple(branch.id for branch in branches),
        images=tuple(branch.images for branch in branches) if any(branch.images for branch in branches) else None,
        prompts=np.array(prompts, dtype=np.int64) if prompts else None,
    )
    return with_rows(batch, [branch for branch in branches if isinstance(branch, Trajectory)])


def with_rows(batch: TrainBatch, rows: Iterable[Trajectory]) -> TrainBatch:
    """`batch` with the token ids, log-probs and experts of those of its sequences that are among `rows`."""
    number = {name: i for i, name in enumerate(batch.ids)}
    token_ids, logprobs = batch.token_ids.copy(), batch.behavior_logprobs.copy()
    experts = batch.experts if batch.experts is None else batch.experts.copy()
    for row in rows:
        if (i := number.get(row.id)) is not None:
            start, end = batch.offsets[i : i + 2].tolist()
            if row.experts is not None:
                if experts is None:
                    experts = np.zeros((len(token_ids), *row.experts.shape[1:]), dtype=row.experts.dtype)
                experts[start:end] = row.experts[: end - start]
            token_ids[start:end] = row.token_ids[: end - start]
            logprobs[start:end] = row.behavior_logprobs[: end - start]
    logprobs[batch.staleness < 0] = 0.0  # not sampled, or not trained
    return msgspec.structs.replace(batch, token_ids=token_ids, behavior_logprobs=logprobs, experts=experts)


def trainable(batch: TrainBatch, max_staleness: int) -> TrainBatch:
    """The sequences that have a token to train, in their order, each cut after its last one. Columns by token are 0 elsewhere.
    Raises LearnerError: a sampled token lies outside its trajectory's turns, and no estimator judged it."""
    masked = batch.masked[batch.episode_of_token] if len(batch.masked) else False
    mask = batch.loss_mask & (batch.staleness <= max_staleness) & ~np.asarray(masked)
    at = np.flatnonzero(mask)
    sequence = np.repeat(np.arange(len(batch)), batch.sizes)
    unjudged = at[np.isnan(batch.advantages[at])]
    if len(unjudged):
        name = batch.ids[sequence[unjudged[0]]]
        raise LearnerError(f"trajectory {name!r}: tokens that were sampled in none of its turns have no advantage")
    # Tokens after the last trained one have no influence on the loss and need not be computed.
    ends = np.zeros(len(batch), dtype=np.int64)
    np.maximum.at(ends, sequence[at], at + 1 - batch.offsets[sequence[at]])
    kept = np.flatnonzero(ends)

    columns = {
        name: np.where(mask, column, column.dtype.type(0))
        for name in ("behavior_logprobs", "advantages", *AUX_COLUMNS)
        if (column := getattr(batch, name)) is not None
    }
    narrowed = msgspec.structs.replace(
        batch,
        loss_mask=mask,
        staleness=np.where(mask, batch.staleness, np.int32(-1)),
        mixed=batch.mixed & mask,
        **columns,
    )
    return narrowed.select(kept.tolist(), ends[kept])
