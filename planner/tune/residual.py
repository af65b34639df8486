"""The residual of simulations, learned from the probes of `slipstream tune`: log(measured / simulated) as a sum over what a point
changes. Pure.

    log residual  =  common  +  sum over knobs of slope x log2((1 + value) / (1 + own value))

The common part is what the profile has wrong, or the machine has become; it is taken as it is. The slopes are shrunk towards 0 by
ridge regression, as if each were normal with deviation `SLOPE` and a probe of n steps had an error of deviation `STEP / sqrt(n)`:
of few probes nothing is believed that would change the order of points much.

Invariants:
- Without probes nothing is corrected. Where all probes miss by the same factor, every point is corrected by that factor.
- The order of the probes does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from .space import MINIBATCHES, Point

STEP = 0.1  # relative error of the rate of one step
SLOPE = 0.1  # log residual for a doubled value, one standard deviation


class ProbedRate(msgspec.Struct, frozen=True):
    """Trained tokens per second of one probe."""

    point: Point
    measured: float
    simulated: float
    steps: int  # that were counted


class Residual:
    """`own` are the values that a point leaves as they are."""

    def __init__(self, own: Mapping[str, bool | int | str], probes: Sequence[ProbedRate]) -> None:
        self._own = own
        self._common, self._slopes = 0.0, dict[str, float]()
        if not probes:
            return
        features = [self._features(probe.point) for probe in probes]
        self._slopes = dict.fromkeys(sorted({key for one in features for key in one}), 0.0)
        weights = np.array([float(probe.steps) for probe in probes])
        logs = np.array([math.log(probe.measured / probe.simulated) for probe in probes])
        x = np.array([[1.0, *(one.get(key, 0.0) for key in self._slopes)] for one in features])
        shrinking = np.diag([0.0, *((STEP / SLOPE) ** 2 for _ in self._slopes)])
        common, *slopes = np.linalg.solve(x.T @ (weights[:, None] * x) + shrinking, x.T @ (weights * logs))
        self._common = float(common)
        self._slopes = dict(zip(self._slopes, map(float, slopes), strict=True))

    def factor(self, point: Point) -> float:
        """By which the simulated rate of a point is multiplied."""
        features = self._features(point)
        return math.exp(self._common + sum(slope * features.get(key, 0.0) for key, slope in self._slopes.items()))

    def _features(self, point: Point) -> dict[str, float]:
        """How far each knob is from its own value: in doublings, or 1 where its values are no numbers."""
        found: dict[str, float] = {}
        for key, value in point.items():
            own = self._own.get(key)
            if key == MINIBATCHES:
                continue  # it goes with the groups of a batch
            if value.isdecimal() and isinstance(own, int) and not isinstance(own, bool):
                found[key] = math.log2((1 + int(value)) / (1 + own))
            else:
                found[key] = 1.0
        return found
