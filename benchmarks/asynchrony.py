"""`slipstream bench async`: trained tokens per second at several bounds of staleness, over the synchronous run; beside what the
simulator predicts, and what others published.

    a law (`asynchrony_law.py`) ──> servers and a learner that sleep      the rest is the system: `slipstream train`, one run after
                        └────────> the simulator, the same law            the other, with its buffer, workers, router, loop, pushes

or with `--config` the runs of a config, with its own engine and learner.

Invariants:
- The synchronous run is this system with a bound of 0: full batches, nothing left out. All runs of a law have the same servers, the
  same learner, the same tasks with the same lengths.
- No run is predicted from its own times. Of the system's own hand-overs, which are in no law, a prediction has the means of the
  other runs; a config's run is predicted from the profile of another one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

import msgspec

from ..errors import ConfigError
from ..monitor.metrics import METRICS, read_metrics
from ..monitor.timeline import read_series
from ..planner.fit import profile_of
from ..planner.plan import SETTLING, SimulationPlan
from ..planner.profile import RunProfile
from ..planner.workload import Observed
from .asynchrony_law import ANSWERS, COLOCATED, TOOLS, EmulatedLaw, HandOvers
from .asynchrony_rows import PUBLISHED, MeasuredArm, compare, predict
from .commands import Notify, slipstream
from .emulated_run import PRESET, environment_of, settings_of
from .models import make_policy
from .result import Result

BOUNDS = (0, 1, 2, 4, 8)
STEPS = 8  # that count, of each run
LEAST_STEPS = 5  # a profile needs them
TOOL_BOUNDS = 2  # the largest with tools
PRESSURE = Path("/proc/pressure/cpu")
PLAIN = (
    "learner.checkpoint_every=1000",
    "evaluation.tasks=0",
    "evaluation.every=0",
    "evaluation.suites={}",
    "run.trackers=[]",
)
"""Of every run: nothing but training."""

TURNS = "colocated"  # the run in which learner and servers take turns on all devices


class Arm(msgspec.Struct, frozen=True):
    """One run to be measured."""

    name: str
    law: EmulatedLaw
    bound: int
    over: tuple[str, ...]  # the names of the runs that it is compared with, the synchronous one first


def arms(bounds: Sequence[int]) -> list[Arm]:
    """What is measured: single answers with partial rollouts and without, the synchronous run on colocated devices, and tools."""
    sync, tools = name_of(0), name_of(0, "tools")
    both = sync, TURNS
    found = [Arm(name_of(bound), ANSWERS, bound, both) for bound in bounds]
    found += [Arm(name_of(bound, "partial rollouts off"), ANSWERS.draining(), bound, both) for bound in bounds if bound]
    found.append(Arm(TURNS, COLOCATED, 0, (sync,)))
    found += [Arm(name_of(bound, "tools"), TOOLS, bound, (tools,)) for bound in bounds if bound <= TOOL_BOUNDS]
    return found


def name_of(bound: int, what: str = "") -> str:
    return f"{f'{what}, ' if what else ''}max_staleness {bound}"


async def emulated(out: Path, every: Sequence[Arm], steps: int, notify: Notify) -> tuple[Result, ...]:
    """Run the arms in `out`, which is empty."""
    model = out / "model"
    make_policy(model, "1M")
    measured = dict[str, MeasuredArm]()
    for number, arm in enumerate(every):
        notify(f"{number + 1} of {len(every)}: {arm.name}")
        measured[arm.name] = await _run_emulated(arm, model, out / f"run-{number}", steps)
    for arm in every:
        others = [one.hand_overs for name, one in measured.items() if name != arm.name and one.hand_overs]
        own = measured[arm.name].hand_overs
        beside = HandOvers.mean(others or [own] if own else others)
        plan = SimulationPlan.of(arm.law.profile(arm.bound, beside))
        plan = msgspec.structs.replace(plan, drains=arm.law.engine.drains)
        measured[arm.name] = msgspec.structs.replace(measured[arm.name], predicted=predict(plan))
    rows = compare({arm.name: arm.over for arm in every}, measured)
    return (*rows, Result("published", "asynchronous", "synchronous", PUBLISHED))


async def _run_emulated(arm: Arm, model: Path, folder: Path, steps: int) -> MeasuredArm:
    law = arm.law
    settings, environment = settings_of(law, arm.bound, model), environment_of(law)
    profile, cpu, pressure = await _train(PRESET, arm.bound, steps, folder, settings, environment)
    assert profile.measured is not None
    hand_overs = None if law.engine.drains else _hand_overs(profile, folder, law)
    return MeasuredArm(profile.measured, cpu, pressure, hand_overs)


def _hand_overs(profile: RunProfile, folder: Path, law: EmulatedLaw) -> HandOvers:
    rows = read_metrics(folder / METRICS)[-profile.measured.steps :] if profile.measured else []
    beyond = [row["step_s"] * (1 - law.seconds_per_token * row["learner_tokens_per_s"]) for row in rows]
    (workload,) = profile.environments
    assert isinstance(workload, Observed)
    began = [episode.lease_s + episode.start_s for group in workload.groups for episode in group]
    return HandOvers(
        profile.push.once_s,
        profile.push.cohort_s,
        profile.push.pause_s,
        profile.push.canary_s,
        profile.push.steps,
        profile.engine.request_steps,
        profile.learner.take_s + mean(beyond),
        profile.deliver_s + mean(began),
    )


async def real(config: str, out: Path, bounds: Sequence[int], steps: int, notify: Notify) -> tuple[Result, ...]:
    """Runs of `config` in `out`, which is empty. Each is predicted from the profile of the first, the first from the second's."""
    profiles, measured = list[RunProfile](), dict[str, MeasuredArm]()
    for number, bound in enumerate(bounds):
        notify(f"{number + 1} of {len(bounds)}: {name_of(bound)}")
        settings = {"buffer.max_staleness": bound}
        profile, cpu, pressure = await _train(config, bound, steps, out / f"run-{number}", settings, {})
        assert profile.measured is not None
        profiles.append(profile)
        measured[name_of(bound)] = MeasuredArm(profile.measured, cpu, pressure)
    for number, bound in enumerate(bounds):
        other = profiles[0 if number else min(1, len(bounds) - 1)]
        plan = SimulationPlan.of(other, (f"buffer.max_staleness={bound}",))
        before = measured[name_of(bound)]
        measured[name_of(bound)] = msgspec.structs.replace(before, predicted=predict(plan))
    return compare(dict.fromkeys(measured, (name_of(0),)), measured)


async def _train(
    config: str, bound: int, steps: int, folder: Path, settings: Mapping[str, object], environment: Mapping[str, str]
) -> tuple[RunProfile, float, float]:
    """Its profile, and the shares of `MeasuredArm`."""
    settled = bound + SETTLING
    common = {"run.dir": folder, "learner.steps": settled + steps}
    words = [*(f"{key}={value}" for key, value in {**settings, **common}.items()), *PLAIN]
    before = _stalled_s()
    began = os.times().elapsed
    await slipstream("train", config, *words, log=folder.with_suffix(".log"), environment=environment)
    pressure = (_stalled_s() - before) / (os.times().elapsed - began)
    return profile_of(folder), _cpu_share(folder, settled), pressure


def _stalled_s() -> float:
    """Seconds in which some process of this machine waited for a core; 0 where the kernel does not count them."""
    try:
        return int(PRESSURE.read_text().split("total=")[1].split()[0]) / 1e6
    except (OSError, IndexError):
        return 0.0


def _cpu_share(folder: Path, settled: int) -> float:
    """Of all cores, by all processes of a run after its first `settled` steps."""
    times = [row["time"] for row in read_metrics(folder / METRICS)][settled - 1 :]
    used = dict[str, list[float]]()
    for role, line in read_series(folder):
        if times[0] <= line["t"] <= times[-1]:
            used.setdefault(role, []).append(line["cpu_s"])
            for name, server in line.get("servers", {}).items():
                used.setdefault(name, []).append(server["cpu_s"])
    return sum(several[-1] - several[0] for several in used.values()) / (times[-1] - times[0]) / (os.cpu_count() or 1)


def checked_bounds(staleness: Sequence[int] | None) -> tuple[int, ...]:
    """Ascending, each once. Raises ConfigError without the synchronous one."""
    bounds = tuple(sorted(set(BOUNDS if staleness is None else staleness)))
    if bounds[0] != 0:
        raise ConfigError(
            f"--staleness: {bounds[0]} is the smallest; 0, which the others are compared with, must be among them"
        )
    return bounds
