"""`slipstream bench prediction`: how far the profile of one run carries to runs with other settings.

    run with a bound of 2 ── probe ── run with a bound of 2 ── probe ── ...      one after the other, each of the same model
        profile of each   ──simulated under the setting of the probe──>  predicted cycle, beside the one that was measured

Invariants:
- A probe is predicted from the profiles of the runs before and after it, never from its own: the prediction is the mean of both. A
  machine that becomes slower is slower for the probe and for its neighbours.
- Runs are those of `slipstream train`; nothing is fitted to a probe.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import msgspec

from ..planner.figures import RunFigures
from ..planner.fit import profile_of
from ..planner.plan import SimulationPlan
from ..planner.profile import RunProfile
from ..planner.run import simulate
from .commands import Notify, make_empty, slipstream, warm_model
from .result import Result, Row

PRESET = "quickstart"
BASE = ("buffer.max_staleness=2", "evaluation.tasks=0", "learner.checkpoint_every=1000")
PROBES = {
    "max_staleness 0": "buffer.max_staleness=0",
    "max_staleness 1": "buffer.max_staleness=1",
    "8 sequences at once": "rollout.engine.max_concurrent=8",
}
STEPS = 30
LEAST_STEPS = 12  # a profile needs 10 at a bound of 2
SEEDS = 3  # simulations of each profile, whose mean is the prediction: a single one has the noise of a run


class Measured(msgspec.Struct, frozen=True):
    """One run."""

    profile: RunProfile
    figures: RunFigures  # its own
    load: float  # processes that ran when it began, as a mean over the minute before


async def prediction(out: Path, steps: int, notify: Notify) -> Result:
    """Run in `out`, which must be empty or new. Raises ConfigError."""
    make_empty(out)
    model = await warm_model(out, PRESET, (), (), notify)

    async def run(name: str, *overrides: str) -> Measured:
        load, folder = os.getloadavg()[0], out / name
        words = (*BASE, *overrides, f"model.path={model}", f"run.dir={folder}", f"learner.steps={steps}")
        notify(f"{name}: {' '.join(overrides) or BASE[0]}")
        await slipstream("train", PRESET, *words, log=out / f"{name}.log")
        profile = profile_of(folder)
        assert profile.measured is not None
        return Measured(profile, profile.measured, load)

    bases, probes = [await run("base-0")], list[Measured]()
    for number, override in enumerate(PROBES.values()):
        probes.append(await run(f"probe-{number}", override))
        bases.append(await run(f"base-{number + 1}"))
    return Result(
        f"seconds from step to step of the {PRESET} on other settings, from a profile at {BASE[0]}: predicted over measured",
        "predicted",
        "measured",
        rows(bases, probes),
    )


def rows(bases: Sequence[Measured], probes: Sequence[Measured]) -> tuple[Row, ...]:
    """The runs themselves from their own profiles, then each probe from those beside it."""
    own = [_simulated(base, ()) for base in bases]
    found = [
        _row(f"itself, run {n + 1}", predicted, base)
        for n, (predicted, base) in enumerate(zip(own, bases, strict=True))
    ]
    for number, (name, probe) in enumerate(zip(PROBES, probes, strict=True)):
        change = (PROBES[name],)
        beside = [figures for base in bases[number : number + 2] for figures in _simulated(base, change)]
        found.append(_row(name, beside, probe))
    return tuple(found)


def _simulated(base: Measured, change: tuple[str, ...]) -> list[RunFigures]:
    """As many steps as the run had: the number of episodes that run at once grows for the first half minute."""
    plan = SimulationPlan.of(base.profile, change)
    return [simulate(plan, plan.settling + base.figures.steps, seed).figures for seed in range(SEEDS)]


def _row(name: str, predicted: Sequence[RunFigures], run: Measured) -> Row:
    """The note has the other figures, as predicted/measured."""
    is_ = run.figures

    def pair(key: str) -> str:
        return f"{mean(getattr(one, key) for one in predicted):.2f}/{getattr(is_, key):.2f}"

    note = (
        f"learner waits {pair('learner_wait')}, slots idle {pair('rollout_idle')}, staleness {pair('staleness')}; "
        f"load {run.load:.1f}"
    )
    return Row(name, mean(one.cycle_s for one in predicted), is_.cycle_s, "s", note)
