"""The simulator's parts: the clock, shared processors, replicas, and what they decide about tokens and versions."""

from __future__ import annotations

import pytest
from slipstream.planner.engine import DecodeCurve, SimulatedReplica, SimulatedRequest
from slipstream.planner.kernel import SharedProcessor, VirtualClock
from slipstream.rollout.concurrency import EngineLoad


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


def test_a_slowed_processor_takes_longer_and_keeps_its_progress() -> None:
    clock = VirtualClock()
    processor, ended = processor_of(clock, [1.0, 1.0])
    processor.add("a", 10)
    clock.after(2.0, processor.slow, 3.0)
    clock.after(8.0, processor.slow, 1.0)
    assert finished(clock, processor, ended) == pytest.approx({"a": 2 + 6 + 6})


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
    replica = SimulatedReplica(
        clock, "engine-0", DecodeCurve(((1.0, 1.0),)), prefill_s, places, recompute=recompute, block=8
    )
    return replica, []


def test_tokens_have_the_version_that_was_served_and_pauses_make_none() -> None:
    clock = VirtualClock()
    replica, done = replica_of(clock)
    request = SimulatedRequest(0, 0, 10, done.append)
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
    first, second, third, fourth = (SimulatedRequest(0, 0, length, done.append) for length in (8, 6, 5, 5))
    for request in (first, second, third, fourth):
        replica.submit(request)
    assert (replica.load().running, replica.load().waiting) == (2, 2)
    clock.after(2.0, replica.cancel, first)
    clock.after(3.0, replica.cancel, fourth)
    clock.run(lambda: len(done) == 2)
    assert done == [second, third]
    assert (first.counts, fourth.counts, clock.now) == ({0: 2}, {}, 7.0)


def test_a_request_waits_for_steps_of_all_requests_and_one_that_is_cancelled_on_its_way_never_arrives() -> None:
    clock, done = VirtualClock(), list[SimulatedRequest]()
    curve = DecodeCurve(((1.0, 1.0), (3.0, 2.0)))
    replica = SimulatedReplica(clock, "engine-0", curve, 0.0, 8, recompute=True, request_steps=4.0)
    first, second, third = (SimulatedRequest(0, 0, tokens, done.append) for tokens in (6, 4, 4))
    for request in (first, second, third):
        replica.submit(request)
    assert (replica.in_flight, replica.load().running) == (3, 0)
    clock.after(1.0, replica.cancel, second)
    clock.run(lambda: len(done) == 2)
    assert done == [first, third]
    assert (second.counts, clock.now) == ({}, 4 * 2.0 + 2 * 1.5 + 2 * 1.0)  # the first begins at 4, the third at 8


def test_the_load_of_a_replica_that_is_paused_is_no_congestion() -> None:
    clock, done = VirtualClock(), list[SimulatedRequest]()
    replica = SimulatedReplica(clock, "engine-0", DecodeCurve(((1.0, 1.0),)), 0.0, 8, recompute=True)
    replica.submit(SimulatedRequest(0, 0, 4, done.append))
    replica.pause()
    replica.submit(SimulatedRequest(0, 0, 4, done.append))
    assert replica.load() == EngineLoad(0, 2, 0.0)  # what a worker takes for a pause, see `Concurrency.observe`
    replica.swap(1)
    assert replica.load() == EngineLoad(2, 0, 0.0)
    replica.drain(lambda: None)
    replica.submit(SimulatedRequest(0, 0, 4, done.append))
    assert replica.load() == EngineLoad(2, 1, 0.0)  # what runs is decoded to its end


def test_what_is_not_cached_in_whole_blocks_is_prefilled_and_what_runs_at_a_swap_again() -> None:
    clock = VirtualClock()
    replica, done = replica_of(clock, prefill_s=0.1)
    replica.submit(SimulatedRequest(20, 0, 4, done.append))
    replica.submit(
        SimulatedRequest(20, 20, 4, done.append)
    )  # 2 s of prefill, and 0.4 s: two blocks of eight are cached
    clock.run(lambda: len(done) == 2)
    assert clock.now == pytest.approx(2 + 0.4 + 4)
    replica.submit(
        SimulatedRequest(16, 16, 4, done.append)
    )  # the last token of a prompt is always computed, with its block
    clock.after(3.8, replica.swap, 1)  # after 0.8 s of prefill and 3 tokens: 19 tokens are computed anew
    clock.run(lambda: len(done) == 3)
    assert clock.now == pytest.approx(6.4 + 0.8 + 4 + 1.9)
