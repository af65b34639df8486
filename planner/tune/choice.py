"""The choice of `slipstream tune`: points as a user compares them, the frontier, and the point to take. Pure.

Invariants:
- The choice trains the most tokens per second of all whose effective sample size (ess) stays above `FRESH` at every staleness;
  among those that are as fast but for `ALIKE`, the one whose tokens are youngest, then with the fewest devices, then changes.
- Where the ess of all is lower, the choice is the knee of the frontier of ess-weighted tokens per second against staleness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from ..figures import RunFigures

FRESH = 0.9  # effective sample size of the importance weights
ALIKE = 0.03  # relative difference of rates below which others decide
LEAST_SHARE = 0.01  # of the trained tokens: a staleness with fewer has no effective sample size to speak of
YOUNGER = 1  # digits of a mean staleness that make a difference


class PointRating(msgspec.Struct, frozen=True):
    """A point, by what was measured of it or is expected."""

    tokens_per_s: float  # trained
    ess_tokens_per_s: float  # these, weighted with the effective sample size at their staleness
    staleness: float  # mean over trained tokens, versions
    ess: float  # the lowest at any staleness
    devices: int
    changes: int = 0  # keys with another value than in the config

    @property
    def device_hours(self) -> float:
        """Of a million trained tokens."""
        return self.devices * 1e6 / self.tokens_per_s / 3600


class EssCurve:
    """Effective sample size by staleness, 0 to 1, as probes measured it: of the staleness in between and beyond, exp(-rate x
    staleness) with the rate that fits them best."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        self._measured = dict(measured)
        pairs = [(lag, -math.log(max(ess, 1e-6))) for lag, ess in measured.items() if lag]
        squares = sum(lag * lag for lag, _ in pairs)
        self._rate = max(0.0, sum(lag * lost for lag, lost in pairs) / squares) if squares else 0.0

    def at(self, staleness: int) -> float:
        return min(1.0, self._measured.get(staleness, math.exp(-self._rate * staleness)))

    def rating(self, figures: RunFigures, tokens_per_s: float, devices: int, changes: int) -> PointRating:
        """Of a point whose tokens are as old as `figures` say."""
        shares = {lag: share for lag, share in figures.tokens_by_staleness.items() if share > 0}
        mean = sum(share * self.at(lag) for lag, share in shares.items()) / max(sum(shares.values()), 1e-9)
        lowest = min((self.at(lag) for lag, share in shares.items() if share >= LEAST_SHARE), default=1.0)
        return PointRating(tokens_per_s, tokens_per_s * mean, figures.staleness, lowest, devices, changes)


def merged_ess(probes: Sequence[tuple[RunFigures, Mapping[int, float]]]) -> EssCurve:
    """Of several probes, each with its ess by staleness: means over their trained tokens."""
    sums, weights = dict[int, float](), dict[int, float]()
    for figures, ess in probes:
        for lag, value in ess.items():
            weight = figures.tokens_by_staleness.get(lag, 0.0) * figures.steps
            sums[lag], weights[lag] = sums.get(lag, 0.0) + weight * value, weights.get(lag, 0.0) + weight
    return EssCurve({lag: sums[lag] / weight for lag, weight in weights.items() if weight})


def on_frontier(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of each (tokens per second, staleness) whether no other has more tokens with no more staleness, or as many with less."""

    def beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
        return one[0] >= other[0] and one[1] <= other[1] and one != other

    return [not any(beats(other, point) for other in points) for point in points]


def promising(ratings: Sequence[PointRating]) -> list[int]:
    """Positions, the most promising first: the frontier, then the frontier of the rest, and so on; in each the fresh ones first, by
    rate. Rates are compared in steps of `ALIKE` from the fastest, and of points that are equal the one with the fewest devices
    and changes is on the frontier alone."""
    fastest = max((one.tokens_per_s for one in ratings), default=0.0)
    coarse = [
        (
            -int(math.log(fastest / one.tokens_per_s) / math.log1p(ALIKE)),
            round(one.staleness, YOUNGER),
            one.devices,
            one.changes,
        )
        for one in ratings
    ]

    def beats(one: tuple[int, float, int, int], other: tuple[int, float, int, int]) -> bool:
        if one[:2] == other[:2]:
            return one[2:] < other[2:]
        return one[0] >= other[0] and one[1] <= other[1]

    left, found = list(range(len(ratings))), list[int]()
    while left:
        layer = [i for i in left if not any(beats(coarse[other], coarse[i]) for other in left)]
        found += sorted(layer, key=lambda i: (ratings[i].ess < FRESH, -ratings[i].tokens_per_s, i))
        left = [i for i in left if i not in layer]
    return found


def best_of(ratings: Sequence[PointRating], number: int) -> list[int]:
    """Positions of so many, the one to take first, then the one to take of the rest."""
    left, found = list(range(len(ratings))), list[int]()
    while left and len(found) < number:
        found.append(left.pop(choose([ratings[i] for i in left])))
    return found


def choose(ratings: Sequence[PointRating]) -> int:
    """The position of the one to take, of at least one."""
    fresh = [i for i, one in enumerate(ratings) if one.ess >= FRESH]
    if not fresh:
        return _knee(ratings)
    fastest = max(ratings[i].tokens_per_s for i in fresh)
    alike = [i for i in fresh if ratings[i].tokens_per_s >= (1 - ALIKE) * fastest]
    return min(
        alike,
        key=lambda i: (round(ratings[i].staleness, YOUNGER), ratings[i].devices, ratings[i].changes, i),
    )


def _knee(ratings: Sequence[PointRating]) -> int:
    """The point of the frontier that is furthest above the line from its youngest to its fastest point, both axes scaled to 0
    and 1; without one above it the fastest."""
    pairs = [(one.ess_tokens_per_s, one.staleness) for one in ratings]
    front = sorted((i for i, on in enumerate(on_frontier(pairs)) if on), key=lambda i: pairs[i][1])
    rates, ages = (np.array([pairs[i][axis] for i in front]) for axis in (0, 1))
    if np.ptp(rates) == 0 or np.ptp(ages) == 0:
        return front[-1]
    above = (rates - rates[0]) / np.ptp(rates) - (ages - ages[0]) / np.ptp(ages)
    best = int(np.argmax(above))
    return front[best] if above[best] > 0 else front[-1]
