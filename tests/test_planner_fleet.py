"""Pushes to simulated replicas: when they serve a new version, and what requests add to a push."""

from __future__ import annotations

import msgspec
import pytest
from slipstream.planner.engine import DecodeCurve, SimulatedReplica
from slipstream.planner.fleet import SimulatedFleet
from slipstream.planner.kernel import VirtualClock
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.profile import PushProfile
from slipstream.tests.test_planner_profile import TRUTH


@pytest.mark.parametrize("drains", [False, True])
def test_a_replica_serves_a_version_before_its_canary_ends(drains: bool) -> None:
    """A second before the first cohort, ten for each of both, of which a replica pauses three and is checked for the last two."""
    clock = VirtualClock()
    replicas = [
        SimulatedReplica(clock, f"engine-{number}", DecodeCurve(((1.0, 1.0),)), 0.0, 1, recompute=True)
        for number in range(2)
    ]
    fleet = SimulatedFleet(clock, replicas, 1, 1.0, 10.0, 3.0, 2.0, drains=drains)
    done, seen = list[float](), list[tuple[float, list[int]]]()
    fleet.push(1, lambda: done.append(clock.now), slowness=2.0)
    for second in (17.9, 18.1, 37.9, 38.1):
        clock.after(second, lambda: seen.append((clock.now, [replica.version for replica in replicas])))
    assert clock.run(lambda: bool(done))
    assert seen == [(17.9, [0, 0]), (18.1, [1, 0]), (37.9, [1, 0]), (38.1, [1, 1])]
    assert done == [pytest.approx(42.0)]


def test_a_push_takes_longer_by_the_decode_steps_that_it_waits_for() -> None:
    push = PushProfile(0.15, 0.05, once_s=0.05, steps=6.0)
    plan = SimulationPlan.of(msgspec.structs.replace(TRUTH, push=push))
    step_s = TRUTH.engine.decode.under_way_s(8.0)
    assert plan.push_slowness(0.0) == 1.0
    assert plan.push_s * plan.push_slowness(8.0) == pytest.approx(0.05 + plan.cohorts * (0.15 + 6 * step_s))
    queued = msgspec.structs.replace(plan, max_concurrent=8)
    assert queued.push_slowness(12.0) == queued.push_slowness(8.0) < plan.push_slowness(12.0)
