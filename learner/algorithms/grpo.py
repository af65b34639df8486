"""Group-relative advantages: the other answers to the same task are the baseline.

With rewards r_1..r_G of the G episodes of one group,

    A_i = (r_i - mean(r)) / (std(r) + eps)        GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.2
    A_i =  r_i - mean(r)                          Dr. GRPO, Liu et al. 2025, arXiv:2503.20783, equation 3

The standard deviation is the population's. Dividing by it weighs tasks that are nearly always or nearly never solved more.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...configs.schema import Grpo

Advantage = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""Rewards of a group's episodes, float64[G], to their advantages, float64[G]."""

EPSILON = 1e-4
"""Added to the standard deviation, so that rewards equal but for noise give no advantage."""


def advantage(config: Grpo) -> Advantage:
    """The estimator that `config` asks for."""

    def estimate(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        centred = rewards - rewards.mean()
        return centred / (rewards.std() + EPSILON) if config.normalize else centred

    return estimate
