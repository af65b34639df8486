"""Turn-level credit: a turn is judged by what came after it, not by what the whole episode earned.

Returns by turn, discounted, and normalised within the group, after Ding et al. 2025, "Empowering Multi-Turn Tool-Integrated
Reasoning with Group Turn Policy Optimization", arXiv:2511.14846, without its shaping of rewards. With the reward r_ik after turn k
of episode i,

    R_ik = sum over l >= k of gamma^(l - k) * r_il
    A_ik = (R_ik - mean(R_.k)) / (std(R_.k) + eps)

where mean and population standard deviation are over those episodes of the group that reached turn k; without `normalize` nothing
is divided. It equals GRPO's where episodes have one turn, and where all have as many, only the last is rewarded and gamma is 1. A
turn that a single episode of the group reached has nothing to be compared with and gets 0.

The k-th completion of an episode belongs to the k-th step of its environment. Trajectories do not say in which order completions of
several branches came: they are taken branch by branch, as these were opened. That is wrong for an agent that goes back to an older
branch. A failure that is trained on has its penalty after its last turn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...configs.algorithm import TurnLevel
from ...errors import LearnerError
from .episodes import Advantage, Episodes, relative_within


def advantage(config: TurnLevel) -> Advantage:
    """The estimator that `config` asks for. It raises LearnerError where an episode has not one reward for each turn."""

    def estimate(episodes: Episodes) -> NDArray[np.float64]:
        for name, turns, rewards in zip(episodes.ids, episodes.turns.tolist(), episodes.turn_rewards, strict=True):
            if turns != len(rewards):
                raise LearnerError(
                    f"episode {name!r} has {turns} completions and {len(rewards)} rewards of its environment; "
                    "learner.algorithm.advantage.kind=turn_level needs an agent that steps its environment once for each completion"
                )
        returns = np.concatenate([_returns(rewards, config.gamma) for rewards in episodes.turn_rewards])
        turn = np.concatenate([np.arange(turns) for turns in episodes.turns.tolist()])
        same_turn = np.repeat(episodes.groups, episodes.turns) * int(episodes.turns.max()) + turn
        return relative_within(same_turn, returns, normalize=config.normalize)

    return estimate


def _returns(rewards: NDArray[np.float64], gamma: float) -> NDArray[np.float64]:
    """float64[K] rewards -> float64[K] discounted returns-to-go."""
    returns = rewards.copy()
    for k in range(len(rewards) - 2, -1, -1):
        returns[k] += gamma * returns[k + 1]
    return returns
