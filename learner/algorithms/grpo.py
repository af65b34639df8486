"""Group-relative advantages: the other answers to the same task are the baseline.

With rewards r_1..r_G of the G episodes of one group,

    A_i = (r_i - mean(r)) / (std(r) + eps)        GRPO, Shao et al. 2024, arXiv:2402.03300
    A_i =  r_i - mean(r)                          Dr. GRPO, Liu et al. 2025, arXiv:2503.20783

The standard deviation is the population's. Dividing by it weighs tasks that are nearly always or nearly never solved more.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...configs.algorithm import Grpo
from .episodes import Advantage, Episodes, relative_within


def advantage(config: Grpo) -> Advantage:
    """The estimator that `config` asks for."""

    def estimate(episodes: Episodes) -> NDArray[np.float64]:
        return episodes.at_turns(relative_within(episodes.groups, episodes.rewards, normalize=config.normalize))

    return estimate
