"""The simulator's parts: the clock, shared processors, replicas, and what they decide about tokens and versions."""

from __future__ import annotations

import pytest
from slipstream.planner.engine import DecodeCurve, SimulatedReplica, SimulatedRequest
from slipstream.planner.kernel import SharedProcessor, VirtualClock


def finished(clock: VirtualClock, processor: SharedProcessor[str], ended: dict[str, float]) -> dict[str, float]:
    clock.run(lambda: not processor.jobs)
    return ended


def processor_of(clock: VirtualClock, unit_s: list[float]) -> tuple[SharedProcessor[str], dict[str, float]]:
    ended: dict[str, float] = {}
    return SharedProcessor(clock, unit_s, lambda job: ended.__setitem__(job, clock.now)), ended


def test_events_happen_in_the_order_of_time_and_then_of_scheduling() -> None:
    clock, seen = VirtualClock(), list[str]()
    for seconds, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.after(seconds, seen.append, name)
    assert not clock.run(lambda: False)
    assert (seen, clock.now, clock.events) == (["a", "b", "c"], 2.0, 3)


def test_jobs_share_their_speed() -> None:
    """Alone a unit takes 1 s, beside another one 3 s: 10 units of a, 5 of b that begins 4 s later."""
    clock = VirtualClock()
    processor, ended = processor_of(clock, [1.0, 1.0, 3.0])
    processor.add("a", 10)
    clock.after(4.0, processor.add, "b", 5)
    assert finished(clock, processor, ended) == pytest.approx({"b": 4 + 15, "a": 4 + 15 + 1})


def test_a_removed_job_makes_the_others_faster() -> None:
    clock = VirtualClock()
    processor, ended = processor_of(clock, [1.0, 1.0, 2.0])
    processor.add("a", 10)
    processor.add("b", 10)
    clock.after(4.0, processor.remove, "b")
    assert finished(clock, processor, ended) == pytest.approx({"a": 4 + 8})


def test_stalls_add_up_and_do_not_pass_in_a_pause() -> None:
    clock = VirtualClock()
    processor, ended = processor_of(clock, [1.0, 1.0])
    processor.add("a", 10)
    clock.after(1.0, processor.stall, 2.0)
    clock.after(2.0, processor.stall, 2.0)
    clock.after(2.5, processor.pause)
    clock.after(7.5, processor.resume)
    assert finished(clock, processor, ended) == pytest.approx({"a": 10 + 4 + 5})


def test_a_decode_curve_is_straight_between_its_points_and_beyond() -> None:
    curve = DecodeCurve(((1.0, 0.01), (3.0, 0.02), (5.0, 0.06)))
    assert [curve.step_s(n) for n in (1, 2, 4, 6)] == pytest.approx([0.01, 0.015, 0.04, 0.08])
    assert DecodeCurve(((8.0, 0.5),)).step_s(1) == 0.5
    assert curve.scaled(2.0).step_s(4) == pytest.approx(0.08)
    for points in ((), ((2.0, 0.1), (1.0, 0.1)), ((1.0, 0.0),)):
        with pytest.raises(ValueError, match="decode curve"):
            DecodeCurve(points)


def replica_of(
    clock: VirtualClock, *, prefill_s: float = 0.0, places: int = 2, recompute: bool = True
) -> tuple[SimulatedReplica, list[SimulatedRequest]]:
    replica = SimulatedReplica(clock, "engine-0", DecodeCurve(((1.0, 1.0),)), prefill_s, places, recompute=recompute)
    return replica, []


def test_tokens_have_the_version_that_was_served_and_pauses_make_none() -> None:
    clock = VirtualClock()
    replica, done = replica_of(clock)
    request = SimulatedRequest(None, 0, 10, done.append)
    replica.submit(request)
    clock.after(4.0, replica.pause)
    clock.after(6.0, replica.swap, 1)
    clock.after(9.0, replica.pause)
    clock.after(9.0, replica.swap, 2)
    clock.run(lambda: bool(done))
    assert (clock.now, request.counts) == (12.0, {0: 4, 1: 3, 2: 3})


def test_more_requests_than_places_wait_in_order_and_a_cancelled_one_leaves_its_tokens() -> None:
    clock = VirtualClock()
    replica, done = replica_of(clock)
    first, second, third, fourth = (SimulatedRequest(None, 0, length, done.append) for length in (8, 6, 5, 5))
    for request in (first, second, third, fourth):
        replica.submit(request)
    assert (replica.load().running, replica.load().waiting) == (2, 2)
    clock.after(2.0, replica.cancel, first)
    clock.after(3.0, replica.cancel, fourth)
    clock.run(lambda: len(done) == 2)
    assert done == [second, third]
    assert (first.counts, fourth.counts, clock.now) == ({0: 2}, {}, 7.0)


def test_prompts_of_a_group_are_prefilled_once_a_version_and_running_ones_again_at_a_swap() -> None:
    clock = VirtualClock()
    replica, done = replica_of(clock, prefill_s=0.1)
    replica.submit(SimulatedRequest(7, 20, 4, done.append))
    replica.submit(SimulatedRequest(7, 20, 4, done.append))  # 2 s of prefill, for both
    clock.run(lambda: len(done) == 2)
    assert clock.now == pytest.approx(2 + 4)
    replica.swap(1)
    replica.submit(SimulatedRequest(7, 20, 4, done.append))  # the cache was of version 0
    clock.after(4.0, replica.swap, 2)  # after 2 s of prefill and 2 tokens: 22 tokens are computed anew
    clock.run(lambda: len(done) == 3)
    assert clock.now == pytest.approx(6 + 2 + 4 + 2.2)
