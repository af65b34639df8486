"""OPO: the baseline with the least variance, where a long answer counts more.

Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585. With rewards r and lengths l, in sampled tokens, of
the episodes of one group,

    A_i = r_i - sum(l * r) / sum(l)

The baseline of least variance weighs a reward by the squared norm of its answer's gradient; under the paper's assumption that
gradients of tokens are alike and orthogonal, that is the length. The paper trains strictly on-policy, which here is
`buffer.max_staleness=0` with one minibatch; with older tokens the baseline is still valid, and no longer optimal. Lengths are those
of whole episodes, tokens that are withheld from the loss included.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...configs.algorithm import Opo
from .episodes import Advantage, Episodes, mean_within


def advantage(_: Opo) -> Advantage:
    """The estimator; it has no options."""

    def estimate(episodes: Episodes) -> NDArray[np.float64]:
        baseline = mean_within(episodes.groups, episodes.rewards, episodes.lengths.astype(np.float64))
        return episodes.at_turns(episodes.rewards - baseline)

    return estimate
