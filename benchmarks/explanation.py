"""`slipstream bench explain`: the first finding of `slipstream explain` about runs in which one thing is wrong, and what its change
gains.

    a law with a fault in it ── slipstream train ──> explain ──first finding──> its change ── slipstream train ──> measured gain
                                                        └────────── promised gain ──────────────────────────────────────┘

Invariants:
- Runs are real but for engine and learner, which sleep by a law (`asynchrony_law.py`): the fault of each is known.
- The hardware is said to be two cores, or as many as the planted run needs, wherever it runs: no change needs more.
- A change outside of the config (a faster tool) is made in the law.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ..monitor.metrics import Row as StepRow
from ..monitor.series import alike_share
from ..planner.explain.evidence import Hardware
from ..planner.explain.explain import explain
from ..planner.explain.findings import Explanation, Finding, overrides_in
from ..planner.figures import RunFigures
from ..planner.fit import figures_of_rows
from ..planner.plan import SETTLING
from ..planner.records import RunRecords
from ..planner.workload import Lognormal
from ..rollout.engines.fake.faults import VARIABLE as FAULTS
from ..rollout.engines.fake.faults import Fault
from ..rollout.engines.fake.law import EngineLaw
from .asynchrony import PLAIN
from .asynchrony_law import EmulatedLaw
from .commands import Notify, slipstream
from .emulated_run import PRESET, environment_of, settings_of
from .models import make_policy
from .result import Result, Row

STEPS = 16  # that count, of each run
LEAST_STEPS = 10  # rows that alerts and rules look at
BLIND_STEPS = 24  # a run must have compared nothing for 20
STAGE_S = 0.4  # seconds by which a slow server receives weights late

LAW = EmulatedLaw(
    Lognormal(mean=20.0, sigma=0.3, most=60, prompt=8),
    EngineLaw(step_s=0.012, sequence_s=1e-4),
    step_s=0.5,
    replicas=1,
    groups=2,
    members=4,
    places=32,
)
"""Playing a batch takes less time than a step and its push, so that a bound of 1 is right."""

Promise = Literal["tokens", "staleness", "fresh"]
"""What the change is for: trained tokens per second, fewer versions of staleness, or tokens that can be compared."""


class PlantedRun(msgspec.Struct, frozen=True):
    """A run in which `rule` must speak first; none where it is empty."""

    name: str
    rule: str
    law: EmulatedLaw = LAW
    bound: int = 1
    mended: EmulatedLaw | None = None  # the law after a change that is outside of the config
    faults: tuple[Fault, ...] = ()
    promise: Promise = "tokens"
    steps: int = 0  # that count; 0: as many as of the others
    cores: int = 2  # of the hardware that advice may count on

    @property
    def hardware(self) -> Hardware:
        return Hardware("cores", self.cores, 0, self.cores)


class TrainedRun(msgspec.Struct, frozen=True):
    """A run's folder, and the steps that count in it."""

    folder: Path
    rows: Sequence[StepRow]

    @property
    def figures(self) -> RunFigures:
        return figures_of_rows(self.rows)

    @property
    def signal_rate(self) -> float:
        """Trained tokens per second of groups whose episodes differ in their rewards."""
        return self.figures.trained_tokens_per_s * (1 - alike_share(self.rows))

    @property
    def compared(self) -> float:
        """Share of the steps in which a token of engines and learner was compared."""
        return sum(row["mismatch_tokens"] > 0 for row in self.rows) / len(self.rows)


replace = msgspec.structs.replace
SLOW_TOOL, QUICK_TOOL = (replace(LAW, episodes=replace(LAW.episodes, environment_s=s)) for s in (1.5, 0.75))
PLANTED = (
    PlantedRun("nothing", ""),
    PlantedRun("a bound that is too high", "lower_bound", bound=5, promise="staleness"),
    PlantedRun("a bound that is too low", "higher_bound", bound=0),
    PlantedRun("servers that decode two sequences", "more_sequences", replace(LAW, places=2), bound=2),
    PlantedRun("a tool that sleeps", "slow_environment", SLOW_TOOL, mended=QUICK_TOOL),
    PlantedRun("groups of equal rewards", "alike", replace(LAW, alike=0.75), bound=2),
    PlantedRun(
        "pushes that are slow, one server after the other",
        "slow_push",
        replace(LAW, replicas=2),
        faults=(Fault(at="receive", do="delay", seconds=STAGE_S, times=1000),),
        cores=4,  # one is free: with none, a server less and a rank more would shorten pushes, too
    ),
    PlantedRun(
        "a learner that compares nothing",
        "blind",
        replace(LAW, step_s=0.8),
        bound=2,
        promise="fresh",
        steps=BLIND_STEPS,
    ),
)


async def explained(out: Path, every: Sequence[PlantedRun], steps: int, notify: Notify) -> tuple[Result, ...]:
    """Run each in `out`, which is empty, and each whose first finding is the right one again with its change."""
    model = out / "model"
    make_policy(model, "1M")
    rules, gains = list[Row](), list[Row]()
    for number, one in enumerate(every):
        notify(f"{number + 1} of {len(every)}: {one.name}")
        one = replace(one, steps=one.steps or steps)
        before = await _run(one, one.law, model, out / f"run-{number}")
        said = explain(before.folder, one.hardware, active=False)
        rules.append(rule_row(one, said))
        if one.rule and rules[-1].ratio == 1.0 and said.findings[0].gain is not None:
            change = said.findings[0].change
            notify(f"{number + 1} of {len(every)}: {change}")
            after = await _run(one, one.mended or one.law, model, out / f"run-{number}-changed", *overrides_in(change))
            gains.append(gain_row(one, said.findings[0], before, after))
    return (
        Result("the rule that comes first, over the one that must", "right", "planted", tuple(rules)),
        Result("what the change gave, over what was promised", "measured", "promised", tuple(gains)),
    )


def rule_row(planted: PlantedRun, said: Explanation) -> Row:
    """1 where the right rule comes first, or nothing is said of a run in which nothing is wrong."""
    first = said.findings[0] if said.findings else None
    right = (first.rule if first else "") == planted.rule and not said.note
    missed = "" if said.missed is None else f"; the simulation misses the run's cycle by {said.missed:+.0%}"
    text = f"{first.rule}: {first.change}" if first else "nothing to change"
    alerts = [alert.text for alert in said.alerts if alert.severity == "critical"]
    return Row(planted.name, float(right), 1.0, "runs", "; ".join(filter(None, [text + missed, said.note, *alerts])))


def gain_row(planted: PlantedRun, finding: Finding, before: TrainedRun, after: TrainedRun) -> Row:
    """Measured over promised."""
    gain = finding.gain
    assert gain is not None
    rate = after.figures.trained_tokens_per_s / before.figures.trained_tokens_per_s - 1
    of_tokens = f"trained tok/s {rate:+.0%}, promised {gain.trained_tokens_per_s.mean:+.0%}"
    if planted.promise == "fresh":
        note = f"{of_tokens}; {before.compared:.0%} of the steps before the change"
        return Row(planted.name, after.compared, 1.0, "steps with a comparison", note)
    if planted.promise == "staleness":
        younger = after.figures.staleness - before.figures.staleness
        return Row(planted.name, younger, gain.staleness.mean, "versions", of_tokens)
    if gain.of_signal:
        rate = after.signal_rate / before.signal_rate - 1
    return Row(planted.name, 100 * rate, 100 * gain.trained_tokens_per_s.mean, "% more trained tok/s", finding.change)


async def _run(planted: PlantedRun, law: EmulatedLaw, model: Path, folder: Path, *overrides: str) -> TrainedRun:
    settings = settings_of(law, planted.bound, model)
    settings |= {"run.dir": folder, "learner.steps": planted.bound + SETTLING + planted.steps}
    words = [*(f"{key}={value}" for key, value in settings.items()), *PLAIN, *overrides]
    faults = {FAULTS: msgspec.json.encode(planted.faults).decode()}
    log, environment = folder.with_suffix(".log"), {**environment_of(law), **faults}
    await slipstream("train", PRESET, *words, log=log, environment=environment)
    return TrainedRun(folder, RunRecords(folder).steady)
