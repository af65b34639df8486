"""RLOO: every episode is compared with the mean of the others, itself left out.

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
arXiv:2402.14740, after Kool et al. 2019. With rewards r_1..r_G of the G episodes of one group,

    A_i = r_i - 1 / (G - 1) * sum over j != i of r_j  =  G / (G - 1) * (r_i - mean(r))

The baseline does not depend on what it is subtracted from, so the gradient is unbiased.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...configs.algorithm import Rloo
from .episodes import Advantage, Episodes, mean_within


def advantage(_: Rloo) -> Advantage:
    """The estimator; it has no options."""

    def estimate(episodes: Episodes) -> NDArray[np.float64]:
        size = np.bincount(episodes.groups)[episodes.groups]
        centred = episodes.rewards - mean_within(episodes.groups, episodes.rewards)
        return episodes.at_turns(centred * size / np.maximum(size - 1, 1))

    return estimate
