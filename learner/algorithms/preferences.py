"""Preferences between two episodes of one task: which of a step's episodes are a pair, and the losses of a pair.

    rows of a step ──sums of log-ratios, gathered──> pairs, their margins ──> loss of each sequence of a pair

With the log-ratio of episode y to the reference policy f, summed over the trained tokens of all its branches, the margin of a pair
in which w earned more than l is

    m(y) = sum_t log p_t / f_t          M = m(w) - m(l)

Invariants:
- A pair is the episode of a group that earned most and the one that earned least, of those with trained tokens in the step.
  Episodes between them have no loss; where the two earned the same, neither has.
- The sequences of a pair may be in different rows and on different ranks. A row knows the pair's margin before the step, and adds
  what its own sequence differs since then: in the first pass value and gradient are those of the whole pair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ...configs.algorithm import Dpo
from ...errors import LearnerError
from ..backend import Gather
from ..packing import MicroBatch
from .policy_loss import PairTokens, Surrogate, Tokens, sequences_of

PairsOfRow = Callable[[MicroBatch], PairTokens]


class Pair(msgspec.Struct, frozen=True):
    """One pair of a step: the numbers of its episodes, its margin before the step, and how many sequences they have."""

    better: int
    worse: int
    margin: float
    branches: int


def pairs_of_step(rows: Sequence[MicroBatch], gather: Gather) -> PairsOfRow:
    """Collective. What each token of a row knows of the pair that its sequence is in. Raises LearnerError where rows have no
    groups, or trained tokens no log-probs of a reference policy."""
    pairs, sequences = gather_pairs(rows, gather)
    of_episode = {e: (sign, pair) for pair in pairs for e, sign in ((pair.better, 1.0), (pair.worse, -1.0))}
    scale = sequences / max(1, len(pairs))  # `sequence_sum` divides by all sequences of the step

    def of_row(row: MicroBatch) -> PairTokens:
        sequence, _ = sequences_of(row)
        none = (0.0, Pair(-1, -1, 0.0, 1))
        known = [of_episode.get(episode, none) for episode in row.episodes]
        columns = [(sign, pair.margin, float(pair.branches)) for sign, pair in known]
        sign, margin, branches = torch.tensor(columns, dtype=torch.float64).reshape(-1, 3).T.to(sequence.device)
        return PairTokens(sign[sequence], margin[sequence], branches[sequence], scale)

    return of_row


def gather_pairs(rows: Sequence[MicroBatch], gather: Gather) -> tuple[list[Pair], int]:
    """Collective. The pairs of a step, and its number of sequences with trained tokens. Raises LearnerError as `pairs_of_step`."""
    found = [torch.empty(0, 4, dtype=torch.float64), *(_scores(row) for row in rows)]
    table = gather(torch.cat(found)).numpy()
    return find_pairs(*table.T), len(table)


def find_pairs(
    groups: NDArray[np.float64],
    episodes: NDArray[np.float64],
    rewards: NDArray[np.float64],
    ratios: NDArray[np.float64],
) -> list[Pair]:
    """The pairs of a step, by its sequences: float64[S] each, numbers of groups and episodes, rewards of episodes, and log-ratios
    of sequences. Of several that earned most, or least, the one with the lowest number is taken."""
    pairs: list[Pair] = []
    for group in np.unique(groups):
        members = np.unique(episodes[groups == group])
        earned = {member: rewards[episodes == member][0] for member in members}
        better = max(members, key=lambda one: (earned[one], -one))
        worse = min(members, key=lambda one: (earned[one], one))
        if earned[better] > earned[worse]:
            at_better, at_worse = episodes == better, episodes == worse
            margin = float(ratios[at_better].sum() - ratios[at_worse].sum())
            pairs.append(Pair(int(better), int(worse), margin, int(at_better.sum() + at_worse.sum())))
    return pairs


def _scores(row: MicroBatch) -> torch.Tensor:
    """float64[n, 4]: group, episode, reward and log-ratio of each sequence of `row` that has a trained token."""
    sequence, lengths = sequences_of(row)
    if not len(sequence):
        return torch.empty(0, 4, dtype=torch.float64)
    if row.reference_logprobs is None or len(row.groups) != len(lengths):
        raise LearnerError(
            "a pair of episodes needs their groups and a reference policy, and these rows lack one of them"
        )
    ratios = (row.proximal_logprobs - row.reference_logprobs)[row.loss_mask].double()
    sums = torch.zeros(len(lengths), dtype=torch.float64, device=ratios.device).index_add(0, sequence, ratios).cpu()
    known = torch.tensor([row.groups, row.episodes, row.rewards], dtype=torch.float64)
    return torch.cat([known, sums[None]]).T[(lengths > 0).cpu()]


def dpo(config: Dpo, tokens: Tokens) -> Surrogate:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7): - log sigmoid(beta M), mean over a step's pairs; beta = 1 / eta.

    Each sequence has the loss of its pair in equal parts, so that `aggregation: sequence_sum` gives the mean over pairs; its
    gradient is that of its own tokens. A pair needs no weight for tokens of older policies: it is a comparison, whichever policy
    made the two (Guo et al. 2024, arXiv:2402.04792, compare answers of the policy itself).
    """
    pairs = tokens.pairs
    if pairs is None:
        raise LearnerError("DPO compares the episodes of a step, and got tokens without them")
    moved = tokens.sequence_sum(tokens.current - tokens.proximal)
    loss = -functional.logsigmoid((pairs.margin.to(moved.dtype) + pairs.sign.to(moved.dtype) * moved) / config.eta)
    # The value of a pair is once in its sequences together; the gradient of each is that of its own tokens.
    whole = loss - loss.detach() * (1.0 - 1.0 / pairs.branches.to(loss.dtype))
    share = pairs.scale / tokens.lengths[tokens.sequence].to(loss.dtype)
    none = torch.zeros_like(loss).masked_fill(moved.isnan(), torch.nan)  # a NaN log-prob must not be dropped silently
    return Surrogate(torch.where(pairs.sign == 0, none, whole * share), torch.zeros_like(tokens.selected))
