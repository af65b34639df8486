"""`slipstream bench distillation`: what its arms change of the preset, and when an arm earns what the teacher does."""

from __future__ import annotations

from pathlib import Path

import pytest
from slipstream.benchmarks.distillation import FLOORS, LEAST_STEPS, TAUGHT, WINDOW, Teacher, reached
from slipstream.benchmarks.learning_arms import Point
from slipstream.configs import load

TEACHER = Teacher(reward=0.97, stderr=0.005, steps=60)


def points(*rewards: float, episodes: int = 16) -> list[Point]:
    return [Point((number + 1) * episodes, 0.0, reward) for number, reward in enumerate(rewards)]


@pytest.mark.parametrize("arm", [TAUGHT, *FLOORS], ids=lambda arm: arm.name)
def test_every_arm_is_a_config_and_plays_as_many_episodes_as_the_window(arm) -> None:
    config = load("quickstart", arm.overrides(Path("teacher")))
    batch = config.buffer.groups_per_batch * config.buffer.group_size
    assert arm.lengthened * LEAST_STEPS * batch >= WINDOW
    assert config.learner.optimizer == load("quickstart").learner.optimizer
    assert config.buffer.max_staleness == load("quickstart").buffer.max_staleness


def test_distillation_and_grpo_take_as_many_episodes_and_steps_in_a_batch() -> None:
    batches = []
    for arm in (TAUGHT, FLOORS[0]):
        config = load("quickstart", arm.overrides(Path("teacher")))
        episodes = config.buffer.groups_per_batch * config.buffer.group_size
        batches.append((episodes, config.learner.algorithm.minibatches, arm.lengthened))
    assert batches[0] == batches[1]


def test_an_arm_reaches_the_teacher_where_the_window_differs_by_less_than_two_standard_errors() -> None:
    """It counts the episodes up to the first batch of the window."""
    batches = WINDOW // 16
    assert reached(points(*[0.97] * batches), TEACHER) == 16
    assert reached(points(*[0.5] * 3, *[0.97] * batches), TEACHER) == 3 * 16  # with one batch of 0.5 in the window
    assert reached(points(*[0.95] * 60), TEACHER) == 16
    assert reached(points(*[0.92] * 60), TEACHER) is None
    assert reached(points(*[0.97] * (batches - 1)), TEACHER) is None
