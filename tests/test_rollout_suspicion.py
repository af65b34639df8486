"""When false replies prove that a replica lies."""

from __future__ import annotations

import pytest
from slipstream.rollout.suspicion import LEAK, LIMIT, FleetSuspicion, ReplicaSuspicion
from slipstream.weightsync.fleet import FalseReplies


def report(name: str, count: int, level: float, incarnation: int = 0) -> FalseReplies:
    return FalseReplies(name, incarnation, count, level, f"lie {count} of {name}")


@pytest.mark.parametrize(("every", "ends"), [(1, True), (10, True), (40, True), (100, False), (1000, False)])
def test_a_share_of_lies_is_proof_however_long_it_takes(every: int, ends: bool) -> None:
    """One lie among `every` replies, for 20,000 replies."""
    seen = ReplicaSuspicion()
    for number in range(20_000):
        if number % every == 0:
            seen.add_false("a lie")
        else:
            seen.add_true()
    assert seen.proven is ends
    assert (seen.level < 2.0) is not ends


def test_a_proof_is_not_taken_back() -> None:
    seen = ReplicaSuspicion()
    for _ in range(int(LIMIT)):
        seen.add_false("a lie")
    assert not any(seen.add_true() for _ in range(1000))
    assert (seen.proven, seen.level) == (True, LIMIT)


def test_a_level_is_reported_where_it_has_fallen_by_one_and_to_nothing() -> None:
    seen = ReplicaSuspicion()
    seen.add_false("a lie")
    seen.add_false("a lie")
    reported = [number for number in range(1, 200) if seen.add_true()]
    assert len(reported) == 3
    assert reported[-1] == pytest.approx(2 / LEAK, abs=1)


def test_what_several_routers_see_adds_up() -> None:
    shared = FleetSuspicion()
    for router in range(4):
        shared.take(f"worker-{router}", [report("engine-0", 3, 1.0), report("engine-1", 1, 0.5)])
    assert shared.proof("engine-0", 0) == ""
    shared.take("evaluator", [report("engine-0", 9, 1.25)])
    assert shared.proof("engine-0", 0).startswith("it goes on giving false replies, 21 so far; one of the last: lie 9")
    assert shared.proof("engine-0", 1) == shared.proof("engine-1", 0) == shared.proof("engine-2", 0) == ""
    assert shared.counts == {"engine-0": 21, "engine-1": 4}


def test_a_report_replaces_the_one_before_and_a_router_that_starts_again_adds_to_the_count() -> None:
    shared = FleetSuspicion()
    for _ in range(3):  # heartbeats repeat it
        shared.take("worker-0", [report("engine-0", 4, 4.0)])
    assert shared.counts == {"engine-0": 4}
    assert shared.proof("engine-0", 0) == ""
    shared.take("worker-0", [report("engine-0", 4, 0.0)])
    shared.take("worker-1", [report("engine-0", 4, 4.0)])
    assert shared.proof("engine-0", 0) == ""
    shared.take("worker-0", [])
    shared.take("worker-0", [report("engine-0", 1, 1.0)])
    assert shared.counts == {"engine-0": 9}
    assert shared.proof("engine-0", 0)


def test_what_a_router_saw_that_has_ended_is_no_proof_any_more_and_stays_counted() -> None:
    """It would never say that the level has fallen."""
    shared = FleetSuspicion()
    shared.take("worker-0", [report("engine-0", 4, 4.0)])
    shared.take("worker-1", [report("engine-0", 2, 2.0)])
    assert shared.proof("engine-0", 0)
    shared.keep({"worker-1", "worker-2"})
    assert shared.proof("engine-0", 0) == ""
    assert shared.counts == {"engine-0": 6}
    shared.take("worker-0", [report("engine-0", 5, 5.0)])  # another process of it
    assert shared.proof("engine-0", 0)
    assert shared.counts == {"engine-0": 11}
