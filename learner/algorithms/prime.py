"""PRIME: what an episode earned, and implicit rewards for each token on the way, both against the others of the group.

Cui et al. 2025, "Process Reinforcement through Implicit Rewards", arXiv:2502.01456, with RLOO as its estimator. A policy f that was
trained to tell good episodes from bad by their whole log-ratio gives token t the reward u_t = beta log(f_t / reference_t). For
episode i of K, with what it earned, r_i, and the mean m_j of the u_t of episode j,

    A_t = sum over s >= t of gamma^(s - t) (u_s - mean over j != i of m_j)  +  r_i - mean over j != i of r_j

Who is alone in a group has nobody to be compared with and gets 0. f learns by cross-entropy on outcomes, `process_loss`: an
episode is good where its reward is above 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ...configs.algorithm import Prime
from ...errors import LearnerError
from ..backend import BatchLoss, Gather, LossOutput, PackedRow, PolicyLoss
from .episodes import Chain, Judged, TokenAdvantage
from .tokens import sequences_of


def advantage(config: Prime) -> TokenAdvantage:
    """The estimator that `config` asks for."""

    def estimate(chains: Sequence[Chain]) -> list[Judged]:
        groups = np.unique([chain.group for chain in chains], return_inverse=True)[1]
        earned = _against_others(groups, np.array([chain.rewards.sum() for chain in chains]))
        process = [config.beta * chain.told for chain in chains]
        means = np.array([rewards.mean() if len(rewards) else 0.0 for rewards in process])
        baselines = means - _against_others(groups, means)
        compared = np.bincount(groups)[groups] > 1
        return [
            Judged(compared[i] * (_returns(u - baselines[i], config.gamma) + earned[i])) for i, u in enumerate(process)
        ]

    return TokenAdvantage(estimate)


def process_loss(beta: float) -> BatchLoss:
    """Cross-entropy of the outcome of each sequence, given sigmoid(beta x its log-ratio), mean over the step's sequences.

    Reported sums: `cross_entropy` and `right`, 1 at each token of a sequence whose outcome is more likely than not.
    """

    def loss(rows: Sequence[PackedRow], gather: Gather) -> PolicyLoss:
        counts = [sequences_of(row)[1] for row in rows]
        mine = [[float(each.sum()), float((each > 0).sum())] for each in counts]
        tokens, sequences = gather(torch.tensor([[0.0, 0.0], *mine], dtype=torch.float64)).sum(0).tolist()
        scale = tokens / max(1.0, sequences)  # the backend divides by tokens

        def of_row(logprobs: torch.Tensor, _: torch.Tensor, row: PackedRow) -> LossOutput:
            sequence, lengths = sequences_of(row)
            reference = torch.zeros_like(logprobs) if row.reference_logprobs is None else row.reference_logprobs
            if row.reference_logprobs is None and len(sequence):
                raise LearnerError(
                    "process rewards are relative to a reference policy, whose log-probs these rows lack"
                )
            ratios = (logprobs - reference)[row.trained]
            scores = beta * torch.zeros(len(lengths), device=ratios.device).index_add(0, sequence, ratios)
            good = torch.zeros(len(lengths), device=ratios.device)
            good[sequence] = row.earned[row.trained].float()
            there = lengths > 0
            entropy = functional.binary_cross_entropy_with_logits(scores, good, reduction="none")[there].sum() * scale
            right = (((scores > 0) == (good > 0)) & there)[sequence].sum()
            return LossOutput(loss_sum=entropy, sums={"cross_entropy": entropy.detach(), "right": right})

        return of_row

    return loss


def _against_others(groups: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[E]: each value less the mean of the others of its group; 0 for who is alone."""
    sizes, sums = np.bincount(groups)[groups], np.bincount(groups, values)[groups]
    others = np.divide(sums - values, sizes - 1, out=values.copy(), where=sizes > 1)
    return values - others


def _returns(rewards: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """float64[L]: at each token the discounted sum of this and all later ones."""
    total, sums = 0.0, np.empty_like(rewards)
    for t in range(len(rewards) - 1, -1, -1):
        total = rewards[t] + gamma * total
        sums[t] = total
    return sums
