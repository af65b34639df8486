"""REINFORCE++: no baseline by task; advantages are normalised over the whole batch.

Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization", arXiv:2501.03262.
With the rewards r of all episodes of the batch,

    A_i = (r_i - mean(r)) / std(r)

The standard deviation is the population's. The paper also subtracts, at each token, a penalty for leaving a reference model. That
needs the model and is omitted: this is the paper's form with a coefficient of 0. An episode counts once in mean and deviation,
however long; implementations that take them over tokens weigh long episodes more. Answers to hard and to easy tasks are compared:
where tasks differ much, `reinforce_pp_baseline` has less variance.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...configs.algorithm import ReinforcePP
from .episodes import Advantage, Episodes, whitened


def advantage(_: ReinforcePP) -> Advantage:
    """The estimator; it has no options."""

    def estimate(episodes: Episodes) -> NDArray[np.float64]:
        return episodes.at_turns(whitened(episodes.rewards))

    return estimate
