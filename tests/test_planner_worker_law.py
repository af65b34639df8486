"""What is said of a worker's event loop, waiting and work between completions, and of the decode steps that pushes wait for."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from slipstream.planner.engine import DecodeCurve
from slipstream.planner.fit import _push_steps
from slipstream.planner.kernel import ONE_AT_A_TIME, SharedProcessor, VirtualClock
from slipstream.planner.run_spans import Gap, ReplicaSpans, RunSpans, WorkerSpans, read_run_spans
from slipstream.planner.worker_law import BUSY, WorkerLoad, worker_contention, worker_loads

NEVER = np.zeros((0, 2))


def load_of(*gaps: tuple[float, float], cpu: float, steps: object = NEVER, contention: float = 1.0) -> WorkerLoad:
    """Of a worker whose process used `cpu` seconds from 0 to 10."""
    kinds = np.full(len(gaps), Gap.BETWEEN)
    spans = WorkerSpans(frozenset({"e"}), np.array(gaps), kinds, np.array([(0.0, 5.0), (10.0, 5.0 + cpu)]))
    return WorkerLoad(spans, np.array(steps, dtype=np.float64).reshape(-1, 2), contention)


def test_a_loop_that_computes_all_the_time_is_shared_by_those_that_wait_for_it() -> None:
    load = load_of((0, 4), (1, 4), (3, 4), cpu=4)
    assert load.split(0, 4) == pytest.approx((0, 1 + 2 / 2 + 1 / 3))
    assert load.split(1, 4) == pytest.approx((0, 2 / 2 + 1 / 3))
    assert load.split(3, 4) == pytest.approx((0, 1 / 3))
    works = sum(load.split(since, 4)[1] for since in (0, 1, 3))
    assert works == pytest.approx(4)  # the time of the loop, all of it


def test_beside_the_learners_steps_the_same_work_takes_longer() -> None:
    load = load_of((0, 4), (2, 4), cpu=4, steps=[(1, 2), (3, 8)], contention=2.0)
    assert load.split(0, 4) == pytest.approx((0, 1 + 1 / 2 + 1 / 2 + 1 / 4))


def test_episodes_that_wait_for_slow_tools_are_no_work_of_the_loop() -> None:
    """Of eight seconds in which episodes waited for tools the loop computed 0.04."""
    load = load_of(*[(0, 8)] * 16, cpu=0.04)
    assert load.share == pytest.approx(BUSY * 0.04 / 8)
    waited, work = load.split(0, 8)
    assert waited == pytest.approx(8 * (1 - load.share), rel=1e-4)
    assert work == pytest.approx(load.share * 8 / 16, rel=0.01)


def test_without_its_cpu_time_all_is_waiting() -> None:
    spans = WorkerSpans(frozenset({"a", "b"}), np.array([(0.0, 2.0)]), np.array([Gap.BETWEEN]), np.zeros((0, 2)))
    loads = worker_loads([spans], NEVER, 1.0)
    assert loads.keys() == {"a", "b"}
    assert loads["a"].split(0, 2) == (2.0, 0.0)
    assert loads["a"].split(3, 2) == (0.0, 0.0)


@pytest.mark.parametrize("slower", [1.0, 2.5])
def test_a_worker_takes_longer_beside_the_learner_by_its_own_contention(slower: float) -> None:
    """Episodes come every 0.2 s; the loop, which they share, works for 0.1 s before a completion and for 0.05 s after it."""
    clock, ended = VirtualClock(), dict[tuple[float, int], float]()
    loop = SharedProcessor(clock, ONE_AT_A_TIME, lambda job: ended.__setitem__(job, clock.now))
    steps = [(start + 1.0, start + 2.4) for start in np.arange(0.0, 57.0, 3.0).tolist()]
    for begin, end in steps:
        clock.after(begin, loop.slow, slower)
        clock.after(end, loop.slow, 1.0)
    for began in np.arange(0.0, 60.0, 0.2).tolist():
        clock.after(began, loop.add, (began, Gap.BEFORE), 0.1)
        clock.after(began + 0.07, loop.add, (began + 0.07, Gap.AFTER), 0.05)
    clock.run(lambda: len(ended) == 600)
    gaps, kinds = np.array([(began, end) for (began, _), end in ended.items()]), np.array([kind for _, kind in ended])
    worker = WorkerSpans(frozenset(), gaps, kinds, NEVER)
    assert worker_contention([worker], np.array(steps)) == pytest.approx(slower, abs=0.15)
    assert worker_contention([worker], NEVER) == 1.0
    assert worker_contention([], np.array(steps)) == 1.0


def test_gaps_are_read_from_the_spans_of_a_worker(tmp_path: Path) -> None:
    def span(what: str, t0: float, t1: float, **ids: object) -> str:
        return json.dumps({"t0": t0, "t1": t1, "what": what, "ids": ids}) + "\n"

    turn = {"replica": "engine-0", "prompt": 8, "cached": 0, "tokens": 4, "version": 0, "queued_s": 0.0, "first_s": 0.1}
    (tmp_path / "spans").mkdir()
    (tmp_path / "series").mkdir()
    (tmp_path / "spans" / "worker-0.1.jsonl").write_text(
        span("turn", 101, 102, episode="0.0.0", **turn)
        + span("turn", 103, 104, episode="0.0.0", **turn)
        + span("turn", 103, 105, episode="0.0.1", **turn)  # of an episode that did not end
        + span("episode", 100, 104.5, episode="0.0.0")
    )
    lines = [(100, 3.0), (101, 3.5), (102, 0.5), (106, 1.5)]  # the process was started again at 101.5
    (tmp_path / "series" / "worker-0.1.jsonl").write_text(
        "".join(json.dumps({"t": t, "cpu_s": cpu}) + "\n" for t, cpu in lines)
    )
    (tmp_path / "spans" / "learner-0.1.jsonl").write_text(span("publish", 103, 103.5) + span("train", 105, 106))
    spans = read_run_spans(tmp_path)
    (worker,) = spans.workers
    assert worker.episodes == {"0.0.0"}
    assert worker.gaps.tolist() == [[100, 101], [102, 103], [104, 104.5]]
    assert worker.kinds.tolist() == [Gap.BEFORE, Gap.BETWEEN, Gap.AFTER]
    (leased,) = read_run_spans(tmp_path, {0: 99.5}).workers
    assert leased.gaps.tolist() == [[99.5, 101], [102, 103], [104, 104.5]]
    assert worker.cpu.tolist() == [[102, 0.5], [106, 1.5]]
    assert spans.published.tolist() == [[103, 103.5]]
    assert spans.steps.tolist() == [[105, 106]]


@pytest.mark.parametrize(("replicas", "most"), [(1, 8), (2, 8), (1, 4)])
def test_a_push_waits_for_steps_of_the_replicas(replicas: int, most: int) -> None:
    """0.1 s alone, and five steps of at most so many sequences; the others queue."""
    decode = DecodeCurve(((1.0, 0.01), (4.0, 0.02), (8.0, 0.025)))
    numbers = [0, 3, 6, 2, 8, 5, 1]
    turns, published = list[tuple[float, ...]](), list[tuple[float, float]]()
    for at, number in enumerate(numbers):
        turns += [(at - 0.5, at, at + 0.9, 10, 5, 0)] * number
        published.append((at, at + 0.1 + 5 * decode.under_way_s(min(number, most))))
    replica = ReplicaSpans(np.array(turns), NEVER)
    spans = RunSpans((), (replica,) * replicas, (), np.array(published), {}, NEVER)
    steps, slowed = _push_steps(spans, decode, most)
    assert steps == pytest.approx(5)
    assert slowed == pytest.approx(1 + 5 * np.mean([decode.under_way_s(min(number, most)) for number in numbers]) / 0.1)
    same = msgspec.structs.replace(spans, published=np.array([(at, at + 0.2) for at in range(len(numbers))]))
    assert _push_steps(same, decode, most) == pytest.approx((0.0, 1.0))
