"""Soft overlong punishment (DAPO, Yu et al. 2025, arXiv:2503.14476, equation 13): what it costs to come close to the limit.

    0                                 where   tokens <= longest - zone
    (longest - zone - tokens) / zone  where   longest - zone < tokens <= longest
    -1                                beyond

An answer that is cut off is wrong whatever it was about to say; this tells the policy before it gets there.

The paper counts and limits the tokens of an answer. What is limited here, by `agent.max_tokens`, is a context: the prompt, all
answers and what tools said. So an episode is as long as the context of its longest branch; the prompt is the same for all members.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Shaping = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Lengths of episodes in tokens, int64[E], to what is added to their rewards, float64[E]: -1 to 0."""


def shaping(zone: int, longest: int) -> Shaping:
    """The punishment of the last `zone` tokens before `longest`; with 0 there is none."""

    def punishment(tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        if zone == 0:
            return np.zeros(len(tokens))
        return np.clip((longest - zone - tokens) / zone, -1.0, 0.0)

    return punishment
