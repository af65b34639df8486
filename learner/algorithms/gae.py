"""Generalized advantage estimation, Schulman et al. 2016, arXiv:1506.02438, equations 11 to 16, over the tokens of an episode.

With rewards r_t and values V_t of an episode's sampled tokens t = 1..L, and V_(L+1) = 0,

    delta_t = r_t + gamma V_(t+1) - V_t
    A_t     = sum over l >= 0 of (gamma lambda)^l delta_(t+l)        the policy's, with lambda
    R_t     = V_t + the same sum with lambda_critic                  what the critic learns

With `lam_by_length` lambda = 1 - 1 / (alpha L), alpha = 0.05 (VAPO, Yue et al. 2025, arXiv:2504.05118): the rewards that a token
sees grow with the episode. An episode that was cut off by a limit ends there: it has earned what it has earned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...configs.algorithm import Gae
from .episodes import Chain, Judged, TokenAdvantage, whitened

ALPHA = 0.05
"""VAPO's; an episode of fewer than 20 tokens has lambda 0."""


def advantage(config: Gae) -> TokenAdvantage:
    """The estimator that `config` asks for."""

    def estimate(chains: Sequence[Chain]) -> list[Judged]:
        found = [_decayed(chain, config.gamma, _lam(config, len(chain.rewards))) for chain in chains]
        returns = [chain.told + _decayed(chain, config.gamma, config.critic_lam) for chain in chains]
        if config.normalize and any(map(len, found)):
            ends = np.cumsum([len(part) for part in found])
            found = np.split(whitened(np.concatenate(found)), ends[:-1])
        return [Judged(part, goal) for part, goal in zip(found, returns, strict=True)]

    return TokenAdvantage(estimate)


def _lam(config: Gae, length: int) -> float:
    return max(0.0, 1.0 - 1.0 / (ALPHA * max(1, length))) if config.lam_by_length else config.lam


def _decayed(chain: Chain, gamma: float, lam: float) -> NDArray[np.float64]:
    """float64[L]: at each token the sum of this and all later temporal differences, each (gamma lam) less than the one before."""
    deltas = chain.rewards + gamma * np.append(chain.told[1:], 0.0) - chain.told
    total, sums = 0.0, np.empty_like(deltas)
    for t in range(len(deltas) - 1, -1, -1):
        total = deltas[t] + gamma * lam * total
        sums[t] = total
    return sums
