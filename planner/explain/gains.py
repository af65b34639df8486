"""The gains of the changes that `slipstream explain` names: the run's profile, simulated with and without them over the same seeds.

    the run's own settings ──> does the simulation meet the run's cycle? ──no──> no gain is claimed
    each candidate         ──> relative to that, seed by seed: mean and 95 % interval (Student's t)

Invariants:
- The same profile gives the same gains: how many seeds there are follows from the number of events, not from a clock.
- A gain below `TOLD`, or whose interval reaches 0, is no gain.
- A change that a config refuses, or with which a simulated run stands still, is no change.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from ...errors import ConfigError, StateError
from ..figures import RunFigures
from ..plan import SimulationPlan
from ..profile import RunProfile
from ..run import simulate
from ..workload import Observed, Workload
from .findings import Candidate, Finding, Gain, Interval, Suspicion, is_live

TOLD = 0.03  # relative gain of trained tokens per second
PRICE = 0.05  # most of these that a lower bound may cost: half the staleness is worth that
MISSED = 0.15  # of the run's cycle: a simulation that is further off knows too little of the run
EVENTS = 300_000  # about how many all simulations of a run may have: some ten seconds
SEEDS = (3, 8)  # fewest and most
# 97.5 % quantiles of Student's t for so many values less one.
STUDENT = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
FRESH = 0.01  # share of the trained tokens that are of the newest version: enough of them to compare


class GainSimulator:
    """Simulations of `profile` for about `candidates` changes. Raises StateError where the run's own settings stand still."""

    def __init__(self, profile: RunProfile, candidates: int) -> None:
        self._profile = profile
        self.plan = SimulationPlan.of(profile)
        first = simulate(self.plan, self.plan.compared_steps)
        afford = EVENTS // max(1, first.events * (1 + candidates))
        self.seeds = min(SEEDS[1], max(SEEDS[0], afford))
        rest = (simulate(self.plan, self.plan.compared_steps, seed).figures for seed in range(1, self.seeds))
        self.base = [first.figures, *rest]
        if not all(one.trained_tokens_per_s for one in self.base):
            raise StateError("the simulated run trains on no token")

    @property
    def missed(self) -> float:
        """Relative error of the cycle of the run."""
        assert self._profile.measured is not None
        return statistics.fmean(one.cycle_s for one in self.base) / self._profile.measured.cycle_s - 1

    def figures(self, candidate: Candidate) -> list[RunFigures] | None:
        """Of each seed; None where the change is none."""
        replace, push, factor = msgspec.structs.replace, self._profile.push, candidate.push
        profile = replace(
            self._profile,
            environments=tuple(_scaled(one, candidate.environment) for one in self._profile.environments),
            push=replace(
                push,
                once_s=factor * push.once_s,
                cohort_s=factor * push.cohort_s,
                pause_s=factor * push.pause_s,
            ),
        )
        try:
            plan = SimulationPlan.of(profile, candidate.overrides)
            return [simulate(plan, plan.compared_steps, seed).figures for seed in range(self.seeds)]
        except (ConfigError, StateError):
            return None

    def gain(self, candidate: Candidate, figures: Sequence[RunFigures]) -> Gain:
        pairs = list(zip(figures, self.base, strict=True))
        tokens = [a.trained_tokens_per_s / (candidate.signal * b.trained_tokens_per_s) - 1 for a, b in pairs]
        return Gain(
            interval(tokens),
            interval([a.staleness - b.staleness for a, b in pairs]),
            self.seeds,
            candidate.assuming,
            candidate.signal != 1.0,
        )

    def judge(self, suspicion: Suspicion) -> Finding | None:
        """The candidate that is worth it, with its gain; None where none is, unless the suspicion is a warning."""
        tried: list[tuple[Candidate, Gain, Sequence[RunFigures]]] = []
        for candidate in suspicion.candidates:
            if suspicion.aim == "none" and not candidate.overrides:
                return finding_of(suspicion, candidate)
            if (figures := self.figures(candidate)) is not None:
                tried.append((candidate, self.gain(candidate, figures), figures))
                if suspicion.aim in ("none", "fresh", "staleness") and self._gains_enough(suspicion, *tried[-1][1:]):
                    return finding_of(suspicion, candidate, tried[-1][1])  # the preferred one is good enough
        if suspicion.aim == "tokens" and tried:
            best = max(gain.trained_tokens_per_s.mean for _, gain, _ in tried)
            for candidate, gain, _ in tried:
                tokens = gain.trained_tokens_per_s
                if tokens.mean >= max(TOLD, best - TOLD) and tokens.low > 0:
                    return finding_of(suspicion, candidate, gain)
        if not suspicion.warning:
            return None
        return finding_of(suspicion, None if suspicion.otherwise else suspicion.candidates[0])

    def _gains_enough(self, suspicion: Suspicion, gain: Gain, figures: Sequence[RunFigures]) -> bool:
        if suspicion.aim == "fresh":
            return statistics.fmean(one.tokens_by_staleness.get(0, 0.0) for one in figures) >= FRESH
        if suspicion.aim == "staleness":
            younger = -gain.staleness.mean >= TOLD * statistics.fmean(one.staleness for one in self.base)
            return younger and gain.staleness.high < 0 and gain.trained_tokens_per_s.mean >= -PRICE
        return True


def interval(values: Sequence[float]) -> Interval:
    """Of at least `SEEDS[0]` values, at most `SEEDS[1]`."""
    mean = statistics.fmean(values)
    half = STUDENT[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def finding_of(suspicion: Suspicion, candidate: Candidate | None = None, gain: Gain | None = None) -> Finding:
    change = suspicion.otherwise if candidate is None else candidate.change
    return Finding(
        rule=suspicion.rule,
        severity="warning" if suspicion.warning else "hint",
        text=suspicion.text,
        evidence=suspicion.evidence,
        change=change,
        live=is_live(change),
        cost=suspicion.cost,
        gain=gain,
    )


def _scaled(workload: Workload, factor: float) -> Workload:
    """With so many times the seconds in environments."""
    if factor == 1.0:
        return workload
    replace = msgspec.structs.replace
    if not isinstance(workload, Observed):
        return replace(workload, environment_s=factor * workload.environment_s)
    groups = tuple(
        tuple(
            replace(e, turns=tuple(replace(t, environment_s=factor * t.environment_s) for t in e.turns)) for e in group
        )
        for group in workload.groups
    )
    return replace(workload, groups=groups)
