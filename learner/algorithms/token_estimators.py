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

    With `normalize` the A_t of a batch are whitened: mean 0 and population standard deviation 1 over its sampled tokens, as in the
    authors' code (recipe/prime of verl), which the paper does not mention. A group of one episode gets 0 and takes no part in that.
    f learns by cross-entropy on outcomes, `process_loss`: an episode is good where its reward is above 0.
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
    advantages, judged = np.concatenate(found), np.repeat(compared, batch.lengths)
    if config.normalize and judged.any():
        advantages[judged] = whitened(advantages[judged])
    return at_sampled(batch, advantages)


def process_loss(beta: float, scored: Sequence[torch.Tensor] | None = None) -> BatchLoss:
    """Cross-entropy of the outcome of each episode, given sigmoid(beta x its log-ratio), mean over the step's episodes (Cui et al.
    2025, arXiv:2502.01456, equation 5). The log-ratio is a sum over all trained tokens of all branches. `scored` are the log-probs
    of this rank's rows that the model gives before the step; without them every episode must have one branch. Reported sums:
    `cross_entropy` and `right`, 1 at each token of an episode whose outcome is more likely than not."""

    def loss(rows: Sequence[MicroBatch], gather: Gather) -> PolicyLoss:
        tokens = step_totals(rows, gather).tokens
        episodes = _episode_scores(rows, scored, beta, gather)
        scale = tokens / max(1, len(episodes))  # the backend divides by tokens

        def of_row(logprobs: torch.Tensor, _: torch.Tensor, row: MicroBatch) -> LossOutput:
            sequence, lengths = sequences_of(row)
            there = lengths > 0
            own = beta * _log_ratios(logprobs, row)
            branches, scores = torch.ones_like(own), own
            if scored is not None and len(sequence):
                known = [episodes.get(number, (1.0, 0.0)) for number in row.episodes]
                branches, whole = torch.tensor(known, device=own.device).T
                scores = own + (whole - own.detach())  # the gradient of a branch is that of its own tokens
            good = torch.zeros(len(lengths), device=own.device)
            good[sequence] = row.positive[row.loss_mask].float()
            entropy = functional.binary_cross_entropy_with_logits(scores, good, reduction="none") * scale
            reported = (entropy.detach() / branches)[there].sum()
            right = (((scores > 0) == (good > 0)) & there)[sequence].sum()
            return LossOutput(loss_sum=entropy[there].sum(), sums={"cross_entropy": reported, "right": right})

        return of_row

    return loss


def _episode_scores(
    rows: Sequence[MicroBatch], scored: Sequence[torch.Tensor] | None, beta: float, gather: Gather
) -> dict[int, tuple[float, float]]:
    """Collective. Of each episode of the step its branches and, where they are `scored`, beta x its log-ratio."""
    found = [torch.empty(0, 2, dtype=torch.float64)]
    for i, row in enumerate(rows):
        _, lengths = sequences_of(row)
        scores = torch.zeros(len(lengths)) if scored is None else beta * _log_ratios(scored[i], row)
        numbers = torch.tensor(row.episodes, dtype=torch.float64)
        found.append(torch.stack([numbers, scores.double()], 1)[lengths > 0])
    numbers, scores = gather(torch.cat(found)).numpy().T
    known, of, branches = np.unique(numbers, return_inverse=True, return_counts=True)
    totals = np.bincount(of, scores, minlength=len(known))
    return {int(n): (float(b), float(s)) for n, b, s in zip(known, branches, totals, strict=True)}


def _log_ratios(logprobs: torch.Tensor, row: MicroBatch) -> torch.Tensor:
    """float32[S]: log(model / reference) of each sequence of `row`, summed over its trained tokens."""
    sequence, lengths = sequences_of(row)
    if row.reference_logprobs is None and len(sequence):
        raise LearnerError("process rewards are relative to a reference policy, whose log-probs these rows lack")
    reference = torch.zeros_like(logprobs) if row.reference_logprobs is None else row.reference_logprobs
    ratios = (logprobs - reference)[row.loss_mask]
    return torch.zeros(len(lengths), device=ratios.device).index_add(0, sequence, ratios)


def _against_others(groups: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64[E]: each value less the mean of the others of its group; 0 in a group of one."""
    sizes, sums = np.bincount(groups)[groups], np.bincount(groups, values)[groups]
    others = np.divide(sums - values, sizes - 1, out=values.copy(), where=sizes > 1)
    return values - others
