"""Which task a new group gets, and what is known of each task: exact in memory, in the file and across kills."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.buffer.admission import Admission, ReplayConfig, ReplayCounters
from slipstream.buffer.messages import Lease
from slipstream.buffer.replay import Replay
from slipstream.buffer.store import WriteBatch
from slipstream.buffer.task_table import (
    HOPELESS_AFTER,
    RETIRED_AFTER,
    Attempt,
    PoolSampler,
    SequentialSampler,
    TaskStatistics,
    TaskTable,
    pool_of,
)
from slipstream.buffer.trajectory import FINISHED, Outcome
from slipstream.errors import EnvError
from slipstream.tests.stores import opened, sql
from slipstream.tests.tiers import examples

GROUP = 8


def play(table: TaskTable, task: int, *rewards: float, version: int = 0) -> None:
    for reward in rewards:
        table.attempted(0, task, Attempt(f"t{task}", reward), version)


def chances(tasks: int) -> list[float]:
    """Of solving each: a third never, a third always, a third now and then."""
    return [(0.0, 0.3, 1.0)[task % 3] for task in range(tasks)]


def simulate(table: TaskTable, draws: range, solving: list[float], seed: int = 0) -> list[int]:
    """The tasks of groups that end before the next one is chosen."""
    chosen = list[int]()
    for draw in draws:
        task = table.choose(0, draw)
        chosen.append(task)
        rng = random.Random(f"{seed} {draw}")
        play(table, task, *(float(rng.random() < solving[task]) for _ in range(GROUP)))
    return chosen


def test_solved_tasks_are_retired_and_hopeless_ones_are_rare_but_each_comes_again() -> None:
    tasks = 30
    chosen = simulate(TaskTable([PoolSampler(tasks, 3)], [tasks]), range(6000), chances(tasks))
    first, later = Counter(chosen[:600]), Counter(chosen[600:])
    assert set(first) == set(range(tasks))
    solved, hopeless = range(2, tasks, 3), range(0, tasks, 3)
    assert all(first[task] * GROUP == RETIRED_AFTER for task in solved)
    assert all(task not in later for task in solved)
    times = [later[task] for task in hopeless]
    assert min(times) > 0
    assert max(times) - min(times) <= 1
    assert 0.04 < sum(times) / 5400 < 0.09
    assert all(later[task] > 100 for task in range(1, tasks, 3))


def test_when_all_are_solved_they_are_played_again() -> None:
    chosen = simulate(TaskTable([PoolSampler(3, 0)], [3]), range(40), [1.0] * 3)
    assert Counter(chosen[:6]) == {0: 2, 1: 2, 2: 2}
    assert set(chosen[6:]) == {0, 1, 2}


def test_a_hopeless_task_that_is_solved_once_is_learned_from_again() -> None:
    assert pool_of(TaskStatistics(1, 1, 0)) == "learning"
    assert pool_of(TaskStatistics(2, HOPELESS_AFTER, 0)) == "hopeless"
    assert pool_of(TaskStatistics(2, HOPELESS_AFTER + 1, 1, 1)) == "learning"
    assert pool_of(TaskStatistics(9, 99, 50, RETIRED_AFTER - 1)) == "learning"
    assert pool_of(TaskStatistics(9, 99, 50, RETIRED_AFTER)) == "solved"


def test_while_groups_are_played_no_unseen_task_is_chosen_twice() -> None:
    table = TaskTable([PoolSampler(50, 1)], [50])
    chosen = [table.choose(0, draw) for draw in range(20)]
    assert len(set(chosen)) > 10  # half of the draws are unseen ones


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 99), kills=st.sets(st.integers(1, 199), max_size=4), tasks=st.integers(1, 40))
def test_a_buffer_that_was_killed_chooses_as_one_that_was_not(
    seed: int, kills: set[int], tasks: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The statistics go through the file, in transactions of several choices and attempts each."""
    path, solving = tmp_path_factory.mktemp("run") / "buffer.sqlite", chances(tasks)
    expected = simulate(TaskTable([PoolSampler(tasks, seed)], [tasks]), range(200), solving, seed)
    ends, chosen = sorted({*kills, 200}), list[int]()
    for start, end in zip([0, *ends], ends, strict=False):
        with opened(path) as store:
            table = TaskTable([PoolSampler(tasks, seed)], [tasks], store.tasks([0]))
            middle = (start + end) // 2
            for draws in (range(start, middle), range(middle, end)):
                chosen += simulate(table, draws, solving, seed)
                store.save(WriteBatch.of(ReplayCounters(), [], tasks=table.drain()))
    assert chosen == expected
    sums = sql(path, "SELECT sum(groups), sum(attempts) FROM tasks")
    assert sums == [(200, 200 * GROUP)]


def test_the_file_has_the_sums_the_newest_version_and_the_streak(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    with opened(path) as store:
        for rewards, version in (((1.0, 1.0), 3), ((1.0,), 5), ((0.0, 1.0), 4), ((1.0, 0.999), 6), ((1.0,), 7)):
            table = TaskTable([SequentialSampler()])
            assert table.choose(0, 12) == 12
            play(table, 12, *rewards, version=version)
            store.save(WriteBatch.of(ReplayCounters(), [], tasks=table.drain()))
            assert table.drain() == {}
        assert store.tasks([0]) == [(0, 12, TaskStatistics(5, 8, 6, 1, 7))]
        assert store.tasks([1]) == []
    assert sql(path, "SELECT * FROM tasks") == [(0, 12, "t12", 5, 8, 6, 1, 7)]
    assert sql(path, "SELECT env, id, attempts, solves, rate, version FROM rates") == [(0, "t12", 8, 6, 0.75, 7)]


def test_tasks_in_order_begin_again_after_the_last() -> None:
    assert [SequentialSampler(3).next(draw) for draw in range(5)] == [0, 1, 2, 0, 1]
    assert [SequentialSampler().next(draw) for draw in (0, 7)] == [0, 7]


def test_an_integer_of_numpy_is_an_integer() -> None:
    class Numpy(SequentialSampler):
        def next(self, draw: int) -> int:
            return np.int64(draw + 1)  # pyright: ignore[reportReturnType]

    table = TaskTable([Numpy()], [5])
    assert [table.choose(0, draw) for draw in (0, 3)] == [1, 4]
    assert {type(task) for _, task in table.drain()} == {int}


def lease_of(replay: Replay) -> Lease:
    lease = replay.leases.grant("a", 0.0)
    assert lease is not None
    return lease


def test_an_attempt_is_an_episode_that_ended_and_did_not_fail() -> None:
    table = TaskTable([PoolSampler(5, 0)], [5])
    replay = Replay(Admission(0, 2), ReplayConfig(4, 4, "withhold", 5.0, {"tool": 1}), tasks=table)
    replay.mark_served(0)
    lease, attempt = lease_of(replay), Attempt("t", 1.0)
    replay.leases.deliver(lease.episode(0), FINISHED, {0: 3}, {0: 3}, 1.0, attempt)
    replay.leases.deliver(lease.episode(0), FINISHED, {0: 3}, {0: 3}, 1.0, attempt)  # a repetition
    replay.leases.deliver(lease.episode(1), Outcome("failed", "tool"), {0: 3}, {}, None, attempt)
    replay.leases.deliver(lease.episode(2), Outcome("truncated"), {0: 3}, {0: 3}, 0.0, Attempt("t", 0.0))
    (change,) = table.drain().values()
    assert (change.groups, change.attempts, change.solves, change.streak) == (1, 2, 1, 0)


class Broken:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def observe(self, task: int, statistics: TaskStatistics) -> None:
        raise KeyError(task)

    def next(self, draw: int) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            ValueError("no"),
            r"env\.sampler: Broken\.next\(4\) raised ValueError: no \(test_buffer_samplers\.py:\d+ in next\)",
        ),
        (5, r"next\(4\) returned 5; allowed are 0 to 4"),
        (-1, r"returned -1; allowed"),
        (True, r"returned True; allowed"),
        ("1", r"returned '1'; allowed"),
        (None, r"returned None; allowed"),
        (np.float64(2.0), r"returned np.float64\(2.0\); allowed"),
        (2, r"observe\(2, \.\.\.\) raised KeyError: 2 \(test_buffer_samplers\.py:\d+ in observe\)"),
    ],
)
def test_a_mistake_of_a_sampler_names_its_line_and_a_restart_is_not_tried(answer: object, says: str) -> None:
    with pytest.raises(EnvError, match=says) as error:
        TaskTable([Broken(answer)], [5]).choose(0, 4)
    assert error.value.final
