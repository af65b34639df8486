"""Soft overlong punishment against equation 13 of the DAPO paper, and where in a batch it counts."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from slipstream.buffer.trajectory import TRUNCATED, Outcome, Trajectory
from slipstream.configs import load
from slipstream.configs.algorithm import Algorithm, Grpo, TurnLevel
from slipstream.errors import ConfigError
from slipstream.learner.algorithms.estimators import overlong
from slipstream.learner.metrics import summarize
from slipstream.tests.columns import credit, to_train_batch
from slipstream.tests.test_learner_credit import branches

MEAN = Algorithm(advantage=Grpo(normalize=False))


def equation_13(length: int, longest: int, cache: int) -> float:
    """Yu et al. 2025, with L_max `longest` and L_cache `cache`."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "zone"), [(20480, 4096), (64, 1), (64, 63), (7, 3)])
def test_the_punishment_is_that_of_the_paper(longest: int, zone: int) -> None:
    lengths = np.arange(1, longest + 5, max(1, longest // 200))
    lengths = np.unique([*lengths, longest - zone, longest - zone + 1, longest - 1, longest, longest + 1])
    expected = [equation_13(int(n), longest, zone) for n in lengths]
    shape = overlong(zone, longest)
    assert shape is not None
    found = shape(lengths)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert found.min() == -1.0


def test_without_a_zone_there_is_none() -> None:
    assert overlong(0, 8) is None


def advantages(
    members: list[list[Trajectory]], algorithm: Algorithm, zone: int, longest: int
) -> dict[str, list[float]]:
    group = tuple(t for member in members for t in member)
    found = credit([group], algorithm, shape=overlong(zone, longest)).advantages
    return {t.id: [float(found[t.id][turn.start]) for turn in t.turns] for t in group}


def test_an_episode_is_as_long_as_the_context_of_its_longest_branch() -> None:
    """Two turns of 2 and 3 tokens with their context: 5 in one branch, 3 at most in two."""
    whole, split = branches(0, 0, [0.0, 1.0]), branches(0, 1, [0.0, 1.0], split=1)
    assert [len(t) for t in (*whole, *split)] == [5, 2, 3]
    found = advantages([whole, split], MEAN, zone=4, longest=6)
    assert found == {"0.0.0.0": [-0.25, -0.25], "0.0.1.0": [0.25], "0.0.1.1": [0.25]}  # 1 - 3/4 and 1 - 1/4


def test_by_turns_it_is_earned_after_the_last_one() -> None:
    whole, split = branches(0, 0, [0.0, 1.0]), branches(0, 1, [0.0, 1.0], split=1)
    found = advantages([whole, split], Algorithm(advantage=TurnLevel(gamma=0.5, normalize=False)), zone=4, longest=6)
    assert found == {"0.0.0.0": [-0.125, -0.25], "0.0.1.0": [0.125], "0.0.1.1": [0.25]}


def test_what_was_cut_off_is_punished_and_a_failure_has_its_penalty_only() -> None:
    cut = branches(0, 0, [1.0, 0.0], outcome=TRUNCATED)
    failed = [
        msgspec.structs.replace(t, reward=-1.0, turn_rewards=(), outcome=Outcome("failed", "tool"))
        for t in branches(0, 1, [0.0, 0.0])
    ]
    found = advantages([cut, failed], MEAN, zone=2, longest=5)
    assert found == {"0.0.0.0": [0.5, 0.5], "0.0.1.0": [-0.5, -0.5]}  # 1 - 1 and -1


def test_late_members_are_punished_too_and_statistics_have_the_plain_reward() -> None:
    groups = [(*branches(0, 0, [0.0, 1.0]), *branches(0, 1, [1.0]))]
    sequences = to_train_batch(groups, MEAN, 5, 5, {"0.0.0": "late"}, shape=overlong(4, 6))
    assert [set(s.advantages[s.loss_mask].tolist()) for s in sequences] == [{0.375}]
    summary = summarize(groups, sequences)
    assert (summary.reward_mean, summary.reward_std) == (1.0, 0.0)


def test_equal_rewards_of_unequal_length_differ_where_nothing_is_refilled() -> None:
    """The paper filters by accuracy first; so the rewards that the buffer compares are the environment's own."""
    found = advantages([branches(0, 0, [0.0, 1.0]), branches(0, 1, [1.0])], MEAN, zone=4, longest=6)
    assert found["0.0.0.0"] == [-0.375, -0.375]
    assert load("dapo").buffer.dynamic_sampling


@pytest.mark.parametrize("zone", [256, 1000])
def test_a_zone_that_leaves_no_length_unpunished_is_refused(zone: int) -> None:
    with pytest.raises(ConfigError, match=rf"overlong={zone} .* agent.max_tokens=256; allowed are 0 to 255"):
        load("quickstart", [f"learner.algorithm.overlong={zone}"])
    with pytest.raises(ConfigError, match=r"learner\.algorithm\.overlong"):
        load("quickstart", ["learner.algorithm.overlong=-1"])
