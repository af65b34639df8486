"""Estimators that give every turn or every token of an episode its own advantage: turn-level credit, GAE and PRIME."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ...configs.algorithm import Gae, Prime, TurnLevel
from ...errors import LearnerError
from ..backend import BatchLoss, Gather, LossOutput, PolicyLoss
from ..batch import TrainBatch
from ..packing import MicroBatch
from .estimators import (
    at_sampled,
    at_turns,
    discounted_sums,
    relative_within,
    token_rewards,
    token_values,
    turn_rewards,
    whitened,
)
from .policy_loss import sequences_of, step_totals


def turn_level(config: TurnLevel, batch: TrainBatch) -> NDArray[np.float64]:
    """Turn-level credit: the advantage of a turn follows from the rewards after it, not from the return of the episode.

    Returns by turn, discounted, and normalized within the group, after Ding et al. 2025, "Empowering Multi-Turn Tool-Integrated
    Reasoning with Group Turn Policy Optimization", arXiv:2511.14846, without its shaping of rewards. With the reward r_ik after
    turn k of episode i,

        R_ik = sum over l >= k of gamma^(l - k) * r_il
        A_ik = (R_ik - mean(R_.k)) / (std(R_.k) + eps)

    where mean and population standard deviation are over those episodes of the group that reached turn k; without `normalize`
    nothing is divided. A turn that a single episode of the group reached gets 0.

    The k-th completion of an episode belongs to the k-th step of its environment, branch by branch in the order in which these were
    opened. LearnerError where an episode has not one reward for each turn. A failure that is trained on has its penalty after its
    last turn.
    """
    rewards = np.split(turn_rewards(batch), np.cumsum(batch.turns)[:-1])
    returns = np.concatenate([discounted_sums(each, config.gamma) for each in rewards])
    turn = np.concatenate([np.arange(turns) for turns in batch.turns.tolist()])
    same_turn = np.repeat(batch.groups, batch.turns) * int(batch.turns.max()) + turn
    return at_turns(batch, relative_within(same_turn, returns, normalize=config.normalize))


def gae(config: Gae, batch: TrainBatch) -> NDArray[np.float64]:
    """Generalized advantage estimation, Schulman et al. 2016, arXiv:1506.02438, equations 11 to 16, over the tokens of an episode.

    With rewards r_t and values V_t of an episode's sampled tokens t = 1..L, and V_(L+1) = 0,

        delta_t = r_t + gamma V_(t+1) - V_t
        A_t     = sum over l >= 0 of (gamma lambda)^l delta_(t+l)        the policy's, with lambda
        R_t     = V_t + the same sum with lambda_critic                  what the critic learns

    With `lam.by_length`, alpha, lambda = max(0, 1 - 1 / (alpha L)) (VAPO, Yue et al. 2025, arXiv:2504.05118): the rewards that a
    token sees grow with the episode. An episode that was cut off by a limit ends there, without a bootstrap value.
    """
    lams = [config.lam["policy"]] * len(batch.lengths)
    if alpha := config.lam.get("by_length"):
        lams = np.maximum(0.0, 1.0 - 1.0 / (alpha * np.maximum(batch.lengths, 1))).tolist()
    found = np.concatenate(
        [discounted_sums(d, config.gamma * lam) for d, lam in zip(_deltas(batch, config), lams, strict=True)]
    )
    return at_sampled(batch, whitened(found) if config.normalize and len(found) else found)


def critic_targets(config: Gae, batch: TrainBatch) -> NDArray[np.float64]:
    """R_t of `gae`, the critic's target at every token, float64[N]."""
    sums = [discounted_sums(deltas, config.gamma * config.lam["critic"]) for deltas in _deltas(batch, config)]
    return at_sampled(batch, np.concatenate(token_values(batch)) + np.concatenate(sums))


def _deltas(batch: TrainBatch, config: Gae) -> list[NDArray[np.float64]]:
    """Of each episode float64[L], the temporal differences at its sampled tokens."""
    pairs = zip(token_rewards(batch), token_values(batch), strict=True)
    return [rewards + config.gamma * np.append(values[1:], 0.0) - values for rewards, values in pairs]


def prime(config: Prime, batch: TrainBatch) -> NDArray[np.float64]:
    """PRIME: the outcome of an episode and implicit rewards of its tokens, both relative to the other episodes of the group.

    Cui et al. 2025, "Process Reinforcement through Implicit Rewards", arXiv:2502.01456, with RLOO as its estimator. A policy f
    that was trained to tell good episodes from bad by their whole log-ratio gives token t the reward u_t = beta log(f_t /
    reference_t). For episode i of K, with return r_i and the mean m_j of the u_t of episode j,

        A_t = sum over s >= t of gamma^(s - t) (u_s - mean over j != i of m_j)  +  r_i - mean over j != i of r_j

    A group of one episode gets 0. f learns by cross-entropy on outcomes, `process_loss`: an
    episode is good where its reward is above 0.
    """
    groups = batch.groups
    outcomes = _against_others(groups, np.array([rewards.sum() for rewards in token_rewards(batch)]))
    process = [config.beta * ratios for ratios in token_values(batch)]
    means = np.array([rewards.mean() if len(rewards) else 0.0 for rewards in process])
    baselines = means - _against_others(groups, means)
    compared = np.bincount(groups)[groups] > 1
    found = [
        compared[i] * (discounted_sums(u - baselines[i], config.gamma) + outcomes[i]) for i, u in enumerate(process)
    ]
    return at_sampled(batch, np.concatenate(found))


def process_loss(beta: float) -> BatchLoss:
    """Cross-entropy of the outcome of each sequence, given sigmoid(beta x its log-ratio), mean over the step's sequences. Reported
    sums: `cross_entropy` and `right`, 1 at each token of a sequence whose outcome is more likely than not."""

    def loss(rows: Sequence[MicroBatch], gather: Gather) -> PolicyLoss:
        totals = step_totals(rows, gather)
        scale = totals.tokens / max(1.0, totals.sequences)  # the backend divides by tokens

        def of_row(logprobs: torch.Tensor, _: torch.Tensor, row: MicroBatch) -> LossOutput:
            sequence, lengths = sequences_of(row)
            reference = torch.zeros_like(logprobs) if row.reference_logprobs is None else row.reference_logprobs
            if row.reference_logprobs is None and len(sequence):
                raise LearnerError(
                    "process rewards are relative to a reference policy, whose log-probs these rows lack"
                )
            ratios = (logprobs - reference)[row.loss_mask]
            scores = beta * torch.zeros(len(lengths), device=ratios.device).index_add(0, sequence, ratios)
            good = torch.zeros(len(lengths), device=ratios.device)
            good[sequence] = row.positive[row.loss_mask].float()
            there = lengths > 0
            entropy = functional.binary_cross_entropy_with_logits(scores, good, reduction="none")[there].sum() * scale
            right = (((scores > 0) == (good > 0)) & there)[sequence].sum()
            return LossOutput(loss_sum=entropy, sums={"cross_entropy": entropy.detach(), "right": right})

        return of_row

    return loss


def _against_others(groups: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[E]: each value less the mean of the others of its group; 0 in a group of one."""
    sizes, sums = np.bincount(groups)[groups], np.bincount(groups, values)[groups]
    others = np.divide(sums - values, sizes - 1, out=values.copy(), where=sizes > 1)
    return values - others
