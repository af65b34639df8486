"""From task groups to the rows that a rank trains on.

    groups ──advantage per token──> sequences ──minibatches──> ──split over ranks──> ──packed──> rows

Invariants:
- What a failed episode is penalised with counts in advantages like any reward, and in no statistic of rewards.
- A sampled token is trained exactly when its policy version is at least `oldest_version` and its episode is not withheld; others
  stay as context without loss.
- What was played greedily is a baseline, and no sample of the policy: it is in no statistic of episodes.
- Everything is deterministic, and each rank computes the same whole before it takes its part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ..buffer.ledger import Withheld
from ..buffer.trajectory import Trajectory
from ..errors import LearnerError
from . import packing, prefixes
from .algorithms.episodes import Advantage, TokenAdvantage
from .algorithms.overlong import Shaping
from .backend import PackedRow
from .credit import UNSHAPED, Group, credit
from .scores import NO_SCORES, Scores

NOBODY: Mapping[str, Withheld] = {}
"""All episodes are trained on."""


class TrainSequence(msgspec.Struct, frozen=True):
    """One branch, cut after its last trained token; T tokens, at least one of them trained.

    Attributes:
        token_ids: int32[T].
        trained: bool[T].
        behavior_logprobs: float32[T], 0 where not trained.
        lags: int32[T], learner version minus the token's, -1 where not trained.
        mixed: bool[T], trained tokens of a mixed policy (`VersionSpan.mixed`).
        advantages: float32[T], 0 where not trained.
        earned: whether its episode's reward is above 0.
        reference_logprobs: float32[T], of the reference policy, 0 where not trained; None where there is none.
        returns: float32[T], what the critic should say, 0 where not trained; None where there is none.
    """

    token_ids: NDArray[np.int32]
    trained: NDArray[np.bool_]
    behavior_logprobs: NDArray[np.float32]
    lags: NDArray[np.int32]
    mixed: NDArray[np.bool_]
    advantages: NDArray[np.float32]
    earned: bool = False
    reference_logprobs: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None


class BatchSummary(msgspec.Struct, frozen=True):
    """What `StepMetrics` says about a batch; names and units are its own."""

    reward_mean: float
    reward_std: float
    staleness_mean: float
    staleness_max: int
    staleness_tokens: dict[str, int]
    tokens_trained: int
    tokens_withheld: int
    mixed_tokens: int
    episodes: int
    episode_tokens_mean: float
    turns_mean: float
    environment: dict[str, float]


def to_sequences(
    groups: Sequence[Group],
    advantage: Advantage | TokenAdvantage,
    version: int,
    oldest_version: int,
    withheld: Mapping[str, Withheld] = NOBODY,
    *,
    scores: Scores = NO_SCORES,
    shape: Shaping = UNSHAPED,
) -> list[TrainSequence]:
    """The branches that have a trained token, in the order of `groups`.

    Args:
        version: the learner's policy version now.
        oldest_version: the oldest policy version whose tokens may be trained on.
        withheld: ids of episodes that the others are compared with and that carry no loss themselves, and why.
        scores: what other models say of the batch's tokens.
        shape: see `credit`.

    Raises:
        LearnerError: there are no advantages (see `credit`), or a sampled token lies outside its trajectory's turns.
    """
    earned = credit(groups, advantage, scores, shape, baselines={e for e, why in withheld.items() if why == "baseline"})
    wanted = [trajectory for group in groups for trajectory in group if trajectory.episode not in withheld]
    cut = [
        _cut(
            t,
            earned.advantages[t.id],
            version,
            oldest_version,
            reference=None if scores.reference is None else scores.reference[t.id],
            returns=None if earned.returns is None else earned.returns[t.id],
        )
        for t in wanted
    ]
    return [sequence for sequence in cut if sequence is not None]


def summarize(
    groups: Sequence[Group], sequences: Sequence[TrainSequence], withheld: Mapping[str, Withheld] = NOBODY
) -> BatchSummary:
    """Statistics of a batch: `groups` and the `sequences` that `to_sequences` made of them."""
    everything = sum(trajectory.sampled for group in groups for trajectory in group)
    groups = [tuple(t for t in group if withheld.get(t.episode) != "baseline") for group in groups]
    branches = [trajectory for group in groups for trajectory in group]
    members = {trajectory.episode: trajectory for trajectory in branches}
    rewards = np.array([t.reward for t in members.values() if t.outcome.trainable], dtype=np.float64)
    lags = Counter[int]()
    for sequence in sequences:
        values, counts = np.unique(sequence.lags[sequence.trained], return_counts=True)
        lags.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    trained, episodes = lags.total(), max(1, len(members))
    sampled = sum(branch.sampled for branch in branches)
    turns = sum(bool(branch.loss_mask[turn.start : turn.end].any()) for branch in branches for turn in branch.turns)
    return BatchSummary(
        reward_mean=float(rewards.mean()) if len(rewards) else 0.0,
        reward_std=float(rewards.std()) if len(rewards) else 0.0,
        staleness_mean=sum(lag * count for lag, count in lags.items()) / max(1, trained),
        staleness_max=max(lags, default=0),
        staleness_tokens={str(lag): lags[lag] for lag in sorted(lags)},
        tokens_trained=trained,
        tokens_withheld=everything - trained,
        mixed_tokens=sum(int(sequence.mixed.sum()) for sequence in sequences),
        episodes=len(members),
        episode_tokens_mean=sampled / episodes,
        turns_mean=turns / episodes,
        environment=_environment(groups),
    )


def minibatches(sequences: Sequence[TrainSequence], count: int) -> list[list[TrainSequence]]:
    """At most `count` parts of nearly equal work, none empty: one optimizer step each."""
    parts = packing.split([packing.cost(len(s.token_ids)) for s in sequences], count)
    return [[sequences[i] for i in sorted(part)] for part in parts if part]


def rank_rows(
    sequences: Sequence[TrainSequence], rank: int, world_size: int, budget: int, *, shares_prefixes: bool = False
) -> list[PackedRow]:
    """The rows of `rank`, each of at most `budget` tokens or a single longer sequence; may be empty.

    Args:
        shares_prefixes: `Backend.shares_prefixes`; what is shared then counts once.
    """
    heads = [_head(i, s) for i, s in enumerate(sequences)] if shares_prefixes else None
    rows = packing.share([len(s.token_ids) for s in sequences], world_size, budget, heads)[rank]
    return [to_row([sequences[i] for i in row]) for row in rows]


def _head(index: int, sequence: TrainSequence) -> packing.Head:
    """What comes before its first trained token, where that is worth sharing; else nothing that any other has."""
    size = int(sequence.trained.argmax())
    shared = prefixes.pays(size, len(sequence.token_ids))
    return (sequence.token_ids[:size].tobytes(), size) if shared else (index, 0)


def to_row(sequences: Sequence[TrainSequence]) -> PackedRow:
    """Sequences side by side. Proximal log-probs are NaN at trained tokens until `with_proximal`, which may come as late as in the
    step's own forward pass; what is computed from them before is NaN, too."""
    lengths = [len(s.token_ids) for s in sequences]
    trained = np.concatenate([s.trained for s in sequences])
    return PackedRow(
        token_ids=torch.from_numpy(np.concatenate([s.token_ids for s in sequences]).astype(np.int64)),
        position_ids=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])),
        cu_seqlens=(0, *np.cumsum(lengths).tolist()),
        trained=torch.from_numpy(trained),
        behavior_logprobs=torch.from_numpy(np.concatenate([s.behavior_logprobs for s in sequences])),
        proximal_logprobs=torch.from_numpy(np.where(trained, np.float32("nan"), np.float32(0))),
        advantages=torch.from_numpy(np.concatenate([s.advantages for s in sequences])),
        lags=torch.from_numpy(np.concatenate([s.lags for s in sequences])),
        mixed=torch.from_numpy(np.concatenate([s.mixed for s in sequences])),
        earned=torch.from_numpy(np.concatenate([s.trained & s.earned for s in sequences])),
        reference_logprobs=_tensor(joined([s.reference_logprobs for s in sequences])),
        returns=_tensor(joined([s.returns for s in sequences])),
    )


def joined(arrays: Sequence[NDArray[np.float32] | None]) -> NDArray[np.float32] | None:
    """What all sequences of a batch have, or none of them has, one behind the other."""
    there = [array for array in arrays if array is not None]
    return np.concatenate(there) if there else None


def _tensor(array: NDArray[np.float32] | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array)


def with_proximal(row: PackedRow, logprobs: torch.Tensor) -> PackedRow:
    """`row` with the log-probs of the policy as it was before the batch's first step: as `Backend.logprobs` gave them, or
    as that step's own forward pass did (`step.py`)."""
    return msgspec.structs.replace(row, proximal_logprobs=torch.where(row.trained, logprobs, 0.0))


def supervised(
    token_ids: Sequence[int] | NDArray[np.int32], trained: Sequence[bool] | NDArray[np.bool_]
) -> TrainSequence:
    """A sequence whose marked tokens are to be made likely; its first token never is."""
    mask = np.array(trained, dtype=np.bool_)
    mask[0] = False
    return TrainSequence(
        token_ids=np.array(token_ids, dtype=np.int32),
        trained=mask,
        behavior_logprobs=np.zeros(len(mask), dtype=np.float32),
        lags=np.where(mask, 0, -1).astype(np.int32),
        mixed=np.zeros(len(mask), dtype=np.bool_),
        advantages=mask.astype(np.float32),
    )


def scoring_row(sequences: Sequence[Sequence[int]]) -> PackedRow:
    """A row for `Backend.logprobs` over every token but the first of each sequence."""
    return to_row([supervised(ids, np.ones(len(ids), dtype=np.bool_)) for ids in sequences])


def fresh_rows(trajectories: Sequence[Trajectory], version: int, budget: int) -> list[PackedRow]:
    """Rows that score exactly the tokens that `version` sampled; none where there are no such tokens."""
    cut = [_cut(t, np.zeros(len(t)), version, oldest_version=version) for t in trajectories]
    sequences = [sequence for sequence in cut if sequence is not None]
    return rank_rows(sequences, rank=0, world_size=1, budget=budget)


def mismatch(rows: Sequence[PackedRow]) -> tuple[float, int]:
    """Largest |learner - engine| log-prob in nats over this rank's tokens of lag 0, 0 where there are none; their number.

    Tokens of a mixed policy are left out: the engine computed them from other keys and values, and rightly differs.
    """
    gaps = [(r.proximal_logprobs - r.behavior_logprobs)[r.trained & (r.lags == 0) & ~r.mixed].abs() for r in rows]
    return max((float(gap.max()) for gap in gaps if len(gap)), default=0.0), sum(len(gap) for gap in gaps)


def _environment(groups: Sequence[Group]) -> dict[str, float]:
    """What environments reported: mean by name over episodes, each counted by its first branch. Where the batch is of several
    environments, also by environment, their rewards included."""
    first = {trajectory.episode: trajectory for group in reversed(groups) for trajectory in reversed(group)}
    episodes = [trajectory for trajectory in first.values() if trajectory.outcome.trainable]
    several = len({trajectory.env for trajectory in episodes}) > 1
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            values.setdefault(name, []).append(value)
        if several:
            for name, value in {"reward": episode.reward, **episode.metrics}.items():
                values.setdefault(f"{episode.env}/{name}", []).append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


def _cut(
    trajectory: Trajectory,
    advantages: NDArray[np.float64],
    version: int,
    oldest_version: int,
    *,
    reference: NDArray[np.float32] | None = None,
    returns: NDArray[np.float64] | None = None,
) -> TrainSequence | None:
    """`trajectory` up to its last trained token, None where it has none; the arrays are those of its tokens."""
    versions = trajectory.versions()
    trained = trajectory.loss_mask & (versions >= oldest_version)
    trained[0] = False
    places = np.flatnonzero(trained)
    if not len(places):
        return None
    # What follows the last trained token has no influence on the loss and need not be computed.
    end = int(places[-1]) + 1
    trained = trained[:end]
    if np.isnan(advantages[:end][trained]).any():
        raise LearnerError(
            f"trajectory {trajectory.id!r}: tokens that were sampled in none of its turns have no advantage"
        )

    def where_trained(values: NDArray[np.floating]) -> NDArray[np.float32]:
        return np.where(trained, values[:end], 0).astype(np.float32)

    return TrainSequence(
        token_ids=trajectory.token_ids[:end],
        trained=trained,
        behavior_logprobs=where_trained(trajectory.behavior_logprobs),
        lags=np.where(trained, version - versions[:end], -1).astype(np.int32),
        mixed=trained & trajectory.mixed()[:end],
        advantages=where_trained(advantages),
        earned=trajectory.outcome.trainable and trajectory.reward > 0,
        reference_logprobs=None if reference is None else where_trained(reference),
        returns=None if returns is None else where_trained(returns),
    )
