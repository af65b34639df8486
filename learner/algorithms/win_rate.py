"""Win rate: how often an episode is better than another answer to the same task.

Wu et al. 2024, "Self-Play Preference Optimization for Language Model Alignment", arXiv:2405.00675, with rewards in place of a
preference model. With rewards r_1..r_G of the G episodes of one group,

    A_i = 1 / (G - 1) * sum over j != i of ([r_i > r_j] + [r_i = r_j] / 2)  -  1 / 2

Only the order of rewards matters: A lies between -1/2 and 1/2 whatever their size.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...configs.algorithm import WinRate
from .episodes import Advantage, Episodes


def advantage(_: WinRate) -> Advantage:
    """The estimator; it has no options."""

    def estimate(episodes: Episodes) -> NDArray[np.float64]:
        rates = np.zeros(len(episodes.rewards))
        for group in range(int(episodes.groups.max()) + 1):
            mine = episodes.groups == group
            rewards = episodes.rewards[mine]
            if len(rewards) > 1:
                # Minus one where it loses, zero where it draws, itself included: twice the win rate less one.
                rates[mine] = np.sign(rewards[:, None] - rewards[None, :]).sum(1) / (2 * (len(rewards) - 1))
        return episodes.at_turns(rates)

    return estimate
