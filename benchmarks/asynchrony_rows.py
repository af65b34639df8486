"""The rows that `slipstream bench async` prints: measured over synchronous, predicted over measured, and what others published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

import msgspec

from ..planner.figures import RunFigures
from ..planner.plan import SimulationPlan
from ..planner.run import simulate
from .asynchrony_law import HandOvers
from .result import Result, Row

SEEDS, SIMULATED_STEPS = 3, 30  # simulations of a prediction, and the steps of each that count
UNIT = "trained tokens/s"

PUBLISHED = (
    Row("verl, fully asynchronous, 7B on 128 GPUs, run-ahead 0", 3600 / 231, 3600 / 356.3, "steps/h"),
    Row("the same, 0.1 of a batch", 3600 / 171.3, 3600 / 356.3, "steps/h"),
    Row("the same, 0.3 of a batch", 3600 / 146.1, 3600 / 356.3, "steps/h"),
    Row("the same, 0.5 of a batch", 3600 / 150.6, 3600 / 356.3, "steps/h", "2.35 to 2.66 over all of their sizes"),
    Row("AReaL (arXiv:2505.24298), at most", 2.77, 1.0, "x"),
    Row("ROLL Flash (arXiv:2510.11345), reasoning, at most", 2.24, 1.0, "x"),
    Row("ROLL Flash, agents, at most", 2.72, 1.0, "x"),
)
"""Over synchronous training in which learner and servers take turns on all devices: compare with `over colocated`."""


class MeasuredArm(msgspec.Struct, frozen=True):
    """A run. `cpu` is the share of all cores that its processes used during the steps that count, `pressure` the share of the whole
    run's time in which some process of this machine waited for a core."""

    figures: RunFigures
    cpu: float
    pressure: float
    hand_overs: HandOvers | None = None  # None where a push includes waits for the ends of episodes
    predicted: RunFigures | None = None

    @property
    def rate(self) -> float:
        return self.figures.trained_tokens_per_s


def predict(plan: SimulationPlan) -> RunFigures:
    """Means over several seeds, of the figures that rows have."""
    found = [simulate(plan, plan.settling + SIMULATED_STEPS, seed).figures for seed in range(SEEDS)]
    return msgspec.structs.replace(
        found[0],
        trained_tokens_per_s=mean(one.trained_tokens_per_s for one in found),
        learner_wait=mean(one.learner_wait for one in found),
        rollout_idle=mean(one.rollout_idle for one in found),
        staleness=mean(one.staleness for one in found),
        withheld=mean(one.withheld for one in found),
    )


def compare(over: Mapping[str, Sequence[str]], measured: Mapping[str, MeasuredArm]) -> tuple[Result, Result]:
    """`over`: of each run those that it is compared with; the row's ratio is to the first, the note has the others."""
    ratios, errors = list[Row](), list[Row]()
    for name, (base, *others) in over.items():
        one, sync = measured[name], measured[base]
        assert one.predicted is not None
        assert sync.predicted is not None
        predicted = one.predicted.trained_tokens_per_s
        notes = [f"simulated {predicted / sync.predicted.trained_tokens_per_s:.2f}"]
        notes += [f"{one.rate / measured[other].rate:.2f} over {other}" for other in others]
        notes.append(f"CPU {one.cpu:.0%}, waited for {one.pressure:.0%} of the time")
        ratios.append(Row(name, one.rate, sync.rate, UNIT, "; ".join(notes)))
        errors.append(Row(name, predicted, one.rate, UNIT, _compared(one.predicted, one)))
    missed = max(abs(row.ratio - 1) for row in errors)
    title = f"the simulator over the measurement, {missed:.1%} off at most"
    return (
        Result("trained tokens per second over those of max_staleness 0", "measured", "synchronous", tuple(ratios)),
        Result(title, "predicted", "measured", tuple(errors)),
    )


def _compared(predicted: RunFigures, arm: MeasuredArm) -> str:
    """The error of the rate, and other figures as predicted/measured."""
    measured = arm.figures
    pairs = {
        "learner waits": (predicted.learner_wait, measured.learner_wait),
        "slots idle": (predicted.rollout_idle, measured.rollout_idle),
        "staleness": (predicted.staleness, measured.staleness),
        "withheld": (predicted.withheld, measured.withheld),
    }
    error = predicted.trained_tokens_per_s / arm.rate - 1
    return ", ".join([f"{error:+.1%}", *(f"{name} {one:.2f}/{other:.2f}" for name, (one, other) in pairs.items())])
