"""The state of a search of `slipstream tune`: simulated points, probed points, and what follows for the others. Pure.

    simulated figures ──x residual of the probes──> expected ratings ──> which to probe next
    probes            ──────────────────────────> measured ratings ──> which go on, and the one to take

Invariants:
- A point that was probed is judged by its own probes alone, a point that was not by its simulation and all probes.
- Only a point that was probed is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ...monitor.alerts import SETTLING
from ..figures import RunFigures
from ..plan import SimulationPlan
from ..profile import RunProfile, settings_of
from .choice import FRESH, EssCurve, PointRating, best_of, choose, merged_ess, on_frontier, promising
from .halving import LEAST, ExpectedProbe
from .residual import STEP, ProbedRate, Residual
from .space import BOUND, Point, labels_of, simulated

CLOSE = 0.2  # share of the fastest point's rate, within which simulations do not decide: they may miss a cycle by 15 %
SURE = 2.0  # standard errors


def error_of(steps: int) -> float:
    """Relative difference of two probes of so many steps that is more than their errors."""
    return SURE * math.sqrt(2 / steps) * STEP


class ProbeResult(msgspec.Struct, frozen=True):
    """A real run of a few steps."""

    name: str  # of its folder
    figures: RunFigures  # of the steps that count
    ess: dict[int, float]  # effective sample size by staleness
    seconds: float  # from its start to its end
    start_s: float  # of these, in no step: processes begin and end


class TunedPoint(msgspec.Struct, frozen=True):
    """`expected` is what simulation and all probes say, `measured` what its own probes say, if there are any."""

    changes: Point
    devices: int  # of replicas and learner: GPUs, or cores where no GPU is used
    simulated: RunFigures
    expected: PointRating
    measured: PointRating | None = None
    probes: tuple[ProbeResult, ...] = ()
    frontier: bool = False  # of the points that were probed, or of all where it was not
    chosen: bool = False

    @property
    def steps(self) -> int:
        """Steps that count, of all its probes together."""
        return sum(probe.figures.steps for probe in self.probes)

    @property
    def withheld(self) -> float:
        """Share of the tokens: of its probes, each as much as it has steps, or as simulated where there is none."""
        if not self.steps:
            return self.simulated.withheld
        return sum(probe.figures.steps * probe.figures.withheld for probe in self.probes) / self.steps

    @property
    def labels(self) -> list[str]:
        return labels_of(self.changes)

    @property
    def rating(self) -> PointRating:
        return self.measured or self.expected


class TuneSearch:
    """`profile` is that of the config's own settings, which the first point `{}` has."""

    def __init__(self, profile: RunProfile) -> None:
        self._profile = profile
        self._own = settings_of(profile.config())
        self._points: list[Point] = []
        self._figures: list[RunFigures] = []
        self._devices: list[int] = []
        self._probes: list[list[ProbeResult]] = []
        self._failed: set[int] = set()

    def add(self, point: Point, figures: RunFigures) -> None:
        """A simulated point. One whose figures another has already is not kept: its keys make no difference."""
        if not figures.trained_tokens_per_s or figures in self._figures:
            return
        self._points.append(point)
        self._figures.append(figures)
        self._devices.append(SimulationPlan.of(self._profile, simulated(point)).gpus)
        self._probes.append([])

    def probed(self, point: Point, result: ProbeResult) -> None:
        self._probes[self._points.index(point)].append(result)

    def failed(self, point: Point) -> None:
        """It is left out from here on."""
        self._failed.add(self._points.index(point))

    @property
    def known(self) -> bool:
        """Whether a point was probed."""
        return any(self._probes)

    def simulated_rate(self, point: Point) -> float:
        """Trained tokens per second by its simulation alone."""
        return self._figures[self._points.index(point)].trained_tokens_per_s

    # --- what to do next ------------------------------------------------------------------------------------------

    def promising(self, most: int) -> list[Point]:
        """Points to probe that were not probed, the most promising first: those that may be the fastest fresh one as far as
        simulations can be trusted; at least `LEAST`, where there are so many."""
        ratings = self._expected()
        order = [i for i in promising(ratings) if not self._probes[i] and i not in self._failed]
        fastest = max((one.tokens_per_s for one in ratings if one.ess >= FRESH), default=0.0)
        close = [i for i in order if ratings[i].tokens_per_s >= (1 - CLOSE) * fastest]
        found = [*close, *(i for i in order if i not in close)][: max(LEAST, len(close))]
        return [self._points[i] for i in found[:most]]

    def survivors(self, points: Sequence[Point], number: int) -> list[Point]:
        """The best of `points` that were probed, without those that are slower by more than probes of their steps are wrong, and
        without those that are not fresh where others are."""
        ids = [i for i in map(self._points.index, points) if self._probes[i] and i not in self._failed]
        ratings = [self._measured(i) for i in ids]
        best = best_of(ratings, number)
        kept = [i for i in best if ratings[i].ess >= FRESH] or best
        fastest = max((ratings[i].tokens_per_s for i in kept), default=0.0)
        steps = min((max(p.figures.steps for p in self._probes[ids[i]]) for i in kept), default=1)
        return [self._points[ids[i]] for i in kept if ratings[i].tokens_per_s >= (1 - error_of(steps)) * fastest]

    def undecided(self, points: Sequence[Point]) -> bool:
        """Whether more than one of `points` may be the best, by their probes."""
        return len(self.survivors(points, len(points))) > 1

    def expected_probe(self, point: Point, start_s: float) -> ExpectedProbe:
        index = self._points.index(point)
        figures, factor = self._figures[index], self.residual().factor(point)
        bound = int(point.get(BOUND, self._own[BOUND]))
        return ExpectedProbe(start_s, bound + SETTLING, figures.cycle_s / factor)

    def residual(self) -> Residual:
        return Residual(
            self._own,
            [
                ProbedRate(point, p.figures.trained_tokens_per_s, figures.trained_tokens_per_s, p.figures.steps)
                for point, figures, probes in zip(self._points, self._figures, self._probes, strict=True)
                for p in probes
                if p.figures.trained_tokens_per_s
            ],
        )

    # --- what is known --------------------------------------------------------------------------------------------

    def results(self, among: Sequence[Point] = ()) -> list[TunedPoint]:
        """All points: those that were probed first, by rate. The choice is of `among`, or of all that were probed."""
        expected = self._expected()
        probed = [i for i in range(len(self._points)) if self._probes[i]]
        measured = {i: self._measured(i) for i in probed}
        front = dict(zip(probed, on_frontier([_pair(measured[i]) for i in probed]), strict=True))
        others = [measured.get(i, one) for i, one in enumerate(expected)]
        overall = on_frontier([_pair(one) for one in others])
        candidates = [i for i in probed if self._points[i] in among] or probed
        chosen = candidates[choose([measured[i] for i in candidates])] if candidates else -1
        found = [
            TunedPoint(
                changes=point,
                devices=self._devices[i],
                simulated=self._figures[i],
                expected=expected[i],
                measured=measured.get(i),
                probes=tuple(self._probes[i]),
                frontier=front.get(i, overall[i]),
                chosen=i == chosen,
            )
            for i, point in enumerate(self._points)
        ]
        return sorted(found, key=lambda one: (one.measured is None, -one.rating.tokens_per_s))

    def _expected(self) -> list[PointRating]:
        residual, ess = self.residual(), self._ess()
        return [
            ess.rating(figures, figures.trained_tokens_per_s * residual.factor(point), devices, len(point))
            for point, figures, devices in zip(self._points, self._figures, self._devices, strict=True)
        ]

    def _ess(self) -> EssCurve:
        return merged_ess([(probe.figures, probe.ess) for probes in self._probes for probe in probes])

    def _measured(self, index: int) -> PointRating:
        """By all of its probes, each as much as it has steps."""
        probes = self._probes[index]
        ess = merged_ess([(probe.figures, probe.ess) for probe in probes])
        each = [
            ess.rating(p.figures, p.figures.trained_tokens_per_s, self._devices[index], len(self._points[index]))
            for p in probes
        ]
        total = sum(probe.figures.steps for probe in probes)
        weights = [probe.figures.steps / total for probe in probes]
        return msgspec.structs.replace(
            each[0],
            tokens_per_s=sum(w * one.tokens_per_s for w, one in zip(weights, each, strict=True)),
            ess_tokens_per_s=sum(w * one.ess_tokens_per_s for w, one in zip(weights, each, strict=True)),
            staleness=sum(w * one.staleness for w, one in zip(weights, each, strict=True)),
            ess=min(one.ess for one in each),
        )


def _pair(rating: PointRating) -> tuple[float, float]:
    return rating.tokens_per_s, rating.staleness
