"""Which of a step's trajectories the trackers get, and what their rows say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import pytest
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs import load
from slipstream.launch.supervisor.samples import ROWS, TABLES, choose, sampler
from slipstream.monitor.recorder import Recorder
from slipstream.monitor.trackers.base import SampledTokens
from slipstream.tests.episodes import SAMPLED, trajectory


def rows_of(rewards: Sequence[float], version: int = 0) -> list[Trajectory]:
    made = [trajectory(f"{group}.0.0", version=version) for group in range(len(rewards))]
    return [msgspec.structs.replace(one, reward=reward) for one, reward in zip(made, rewards, strict=True)]


def test_the_best_and_the_worst_are_among_few() -> None:
    rows = rows_of([0.1 * i for i in range(10)])
    for version in range(5):
        chosen = choose(version, rows)
        assert len({one.id for one in chosen}) == ROWS
        assert (chosen[0].reward, chosen[-1].reward) == (0.0, 0.9)
        assert choose(version, rows[::-1]) == chosen  # whatever order they come in
    assert choose(1, rows) != choose(2, rows)
    assert choose(1, rows[:2]) == rows[:2]
    assert choose(1, []) == choose(1, [trajectory("0.0.0", branch=1)]) == []


class Recorded:
    """Where the recorder stands."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        self.rows: list[SampledTokens] = []

    def sampled(self, version: int, tokens: Sequence[SampledTokens], decode: object) -> None:
        self.versions.append(version)
        self.rows += tokens


@pytest.mark.parametrize(("steps", "tables"), [(30, 30), (199, TABLES), (1000, TABLES + 1)])
def test_a_run_has_at_most_so_many_tables(steps: int, tables: int, tmp_path: Path) -> None:
    config, recorded = load("quickstart", [f"learner.steps={steps}", "run.trackers=[wandb]"]), Recorded()
    sample = sampler(config, tmp_path, cast(Recorder, recorded))
    for version in range(1, steps + 1):
        sample(version, rows_of([1.0], version - 2))
    assert len(recorded.versions) == tables
    newest = recorded.rows[-1]
    assert (newest.row.step, newest.row.id, newest.row.reward, newest.row.staleness) == (
        recorded.versions[-1],
        "0.0.0.0",
        1.0,
        1.0,
    )
    assert (newest.row.outcome, newest.row.tokens) == ("finished", len(newest.prompt) + len(newest.response))
    assert len(newest.response) == SAMPLED


def test_without_a_tracker_nothing_is_sampled(tmp_path: Path) -> None:
    recorded = Recorded()
    sampler(load("quickstart"), tmp_path, cast(Recorder, recorded))(1, rows_of([1.0]))
    sampler(load("quickstart", ["run.trackers=[wandb]"]), tmp_path, None)(
        1, rows_of([1.0])
    )  # a rank that records nothing
    assert recorded.versions == []
