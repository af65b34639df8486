"""REINFORCE++ with baseline: centred within the group, normalised over the whole batch.

Hu et al. 2025, "REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Advantage Normalization", arXiv:2501.03262.
With the reward r_gi of episode i of group g,

    c_gi = r_gi - mean over j of r_gj
    A_gi = (c_gi - mean(c)) / std(c),    mean and standard deviation over all episodes of the batch

Unlike GRPO's, the scale is the same for all tasks: a group in which answers hardly differ stays small. The paper's penalty for
leaving a reference model is part of its loss, not of this estimate. An episode counts once, however long.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...configs.algorithm import ReinforcePPBaseline
from .episodes import Advantage, Episodes, relative_within, whitened


def advantage(_: ReinforcePPBaseline) -> Advantage:
    """The estimator; it has no options."""

    def estimate(episodes: Episodes) -> NDArray[np.float64]:
        return episodes.at_turns(whitened(relative_within(episodes.groups, episodes.rewards, normalize=False)))

    return estimate
