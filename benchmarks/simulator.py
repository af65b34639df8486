"""`slipstream bench simulator`: the simulator: events per second of CPU, and a plan of ten thousand GPUs."""

from __future__ import annotations

import resource
import time
from pathlib import Path

from ..planner.engine import DecodeCurve
from ..planner.kernel import VirtualClock
from ..planner.plan import SimulationPlan
from ..planner.profile import EngineProfile, LearnerProfile, PushProfile, RunProfile
from ..planner.run import SimulationResult
from ..planner.run import simulate as simulate_plan
from ..planner.workload import Lognormal
from .result import Result, Row

STEPS = 5  # of the cluster: more tell nothing new about speed


def laptop() -> RunProfile:
    """Two turns around a calculator, 64 episodes of a dozen tokens in a batch, as in the quickstart."""
    return RunProfile(
        settings={"buffer.max_staleness": 2, "buffer.groups_per_batch": 8, "buffer.group_size": 8},
        environments=(Lognormal(mean=16.0, sigma=0.3, most=128, prompt=30, turns=2, environment_s=0.002),),
        engine=EngineProfile(DecodeCurve(((0.0, 0.012), (64.0, 0.036)))),
        learner=LearnerProfile((1.3e-4,), take_s=0.01),
        push=PushProfile(0.2, 0.08),
    )


def cluster() -> RunProfile:
    """750 replicas of eight GPUs each, and a learner of 4,000: 2,048 groups of 16 long answers in a batch."""
    return RunProfile(
        settings={
            "buffer.max_staleness": 2,
            "buffer.groups_per_batch": 2048,
            "buffer.group_size": 16,
            "rollout.engine.replicas": 750,
            "rollout.engine.max_concurrent": 256,
            "learner.backend.ranks": 4000,
        },
        environments=(Lognormal(mean=6000.0, sigma=1.0, most=32768, prompt=512),),
        engine=EngineProfile(DecodeCurve(((0.0, 0.012), (256.0, 0.027))), ranks=8),
        learner=LearnerProfile((60.0 / (2048 * 16 * 6400),), ranks=4000),
        push=PushProfile(0.5, 0.3),
    )


async def simulator(_: Path) -> Result:
    """Events of simulated runs over those of an empty event loop, per second of CPU of this process."""
    rows: list[Row] = []
    for name, profile, steps in (
        ("a laptop, 60 steps", laptop(), 60),
        (f"750 replicas, {STEPS} steps", cluster(), STEPS),
    ):
        result = simulate_plan(SimulationPlan.of(profile), steps)
        rows.append(Row(name, result.events / result.cpu_s, _bare_rate(result.events), "events/CPU-s", _note(result)))
    return Result("the simulator over an empty event loop", "simulator", "empty loop", tuple(rows))


def _note(result: SimulationResult) -> str:
    mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = f"{result.simulated_s:,.0f} s simulated in {result.cpu_s:.1f} s"
    return f"{result.events:,} events, {times}; peak of the process {mib:,.0f} MiB"


def _bare_rate(events: int) -> float:
    """Events per second of CPU of a clock on which a thousand chains of events do nothing else."""
    clock = VirtualClock()

    def again(chain: int) -> None:
        clock.after(1.0 + chain / 1000, again, chain)

    for chain in range(1000):
        again(chain)
    began = time.process_time()
    clock.run(lambda: clock.events >= events)
    return events / (time.process_time() - began)
