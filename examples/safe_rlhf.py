"""Safe RLHF (Dai et al. 2023, arXiv:2310.12773) as an advantage of your own: reward is maximized while the mean cost stays at most
`LIMIT`. A cost model scores each answer; the environment reports that as the metric `cost` of its last step.

    slipstream train CONFIG learner.algorithm.advantage='{kind: python, function: "safe_rlhf:advantage"}'

The Lagrange multiplier is state of the algorithm: it begins at 1, and a run that is resumed goes on with it.
"""

import math

import numpy as np
from slipstream.learner.batch import TrainBatch

LIMIT, RATE = 0.1, 0.5  # the cost that is allowed; how fast the multiplier follows


def relative(groups: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of each episode, how many standard deviations it is above the mean of its group."""
    sizes = np.bincount(groups)
    centered = values - (np.bincount(groups, values) / sizes)[groups]
    return centered / (np.sqrt(np.bincount(groups, centered**2) / sizes)[groups] + 1e-4)


def advantage(batch: TrainBatch, carried: dict[str, float]) -> np.ndarray:
    """(A_reward - lambda A_cost) / (1 + lambda) of each episode; then log lambda grows by RATE x lambda x (mean cost - LIMIT)."""
    multiplier = carried.get("lagrange_multiplier", 1.0)
    costs = np.array([metrics["cost"] for metrics in batch.metrics])
    carried["lagrange_multiplier"] = multiplier * math.exp(RATE * multiplier * (math.fsum(costs) / len(costs) - LIMIT))
    return (relative(batch.groups, batch.rewards) - multiplier * relative(batch.groups, costs)) / (1 + multiplier)
