"""ReMax: every episode is compared with what the policy earns when it is greedy.

Li et al. 2023, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
arXiv:2310.10505. With the reward r_g of the episode of a group that was played at temperature 0, and r_i of the sampled ones,

    A_i = r_i - r_g

The baseline depends on the task and not on what was sampled, so the gradient is unbiased, and nothing is divided. The paper has one
sampled episode for each greedy one, here `buffer.group_size=2`; in larger groups all share the baseline. The greedy episode carries
no loss: it is no sample of the policy. A penalty for leaving a reference policy comes off what was sampled alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...configs.algorithm import Remax
from .episodes import Advantage, Episodes, mean_within


def advantage(_: Remax) -> Advantage:
    """The estimator; it has no options. A group without a greedy episode teaches nothing; the buffer hands out none."""

    def estimate(episodes: Episodes) -> NDArray[np.float64]:
        greedy = episodes.greedy.astype(np.float64)
        compared = np.bincount(episodes.groups, greedy)[episodes.groups] > 0
        baseline = mean_within(episodes.groups, episodes.rewards, greedy)
        return episodes.at_turns(np.where(compared, episodes.rewards - baseline, 0.0))

    return estimate
