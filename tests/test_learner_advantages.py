"""Every advantage estimator against its paper's formula in plain float64, and the properties that it promises."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.configs.algorithm import Algorithm, Grpo, Opo, ReinforcePP, ReinforcePPBaseline, Remax, Rloo, TurnLevel
from slipstream.learner.algorithms import advantage_of
from slipstream.tests.advantages import ALL, BY_GROUP, DR_GRPO, ORACLES, Episode, Groups, names, turn_level
from slipstream.tests.columns import episodes_only


def estimate(config, groups: Groups) -> np.ndarray:
    """float64[N] of the estimator under test; every turn has one token."""
    episodes = [e for group in groups for e in group]
    batch = episodes_only(
        [e.turns for e in episodes],
        np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        rewards=np.array([e.reward for e in episodes]),
        lengths=np.array([e.length for e in episodes]),
        greedy=np.array([e.greedy for e in episodes]),
    )
    return advantage_of(Algorithm(advantage=config))(batch)


rewards = st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-10, 10))
episodes = st.builds(Episode, turns=st.lists(rewards, min_size=1, max_size=4), length=st.integers(1, 300))
groups = st.tuples(st.lists(episodes, min_size=1, max_size=9), st.booleans()).map(
    lambda drawn: [msgspec.structs.replace(e, greedy=drawn[1] and i == 0) for i, e in enumerate(drawn[0])]
)
batches = st.lists(groups, min_size=1, max_size=6)


@given(batches)
@settings(deadline=None)
def test_advantages_equal_the_formula_of_the_paper(groups):
    for config in ALL:
        expected = ORACLES[type(config)](config, groups)
        np.testing.assert_allclose(estimate(config, groups), expected, rtol=1e-6, atol=1e-6, err_msg=names(config))


@given(st.floats(0, 1), st.booleans(), batches)
@settings(deadline=None)
def test_turn_level_equals_its_formula_at_every_discount(gamma, normalize, groups):
    config = TurnLevel(gamma=gamma, normalize=normalize)
    np.testing.assert_allclose(estimate(config, groups), turn_level(config, groups), rtol=1e-6, atol=1e-6)


@given(batches, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_the_order_of_groups_and_of_episodes_changes_nothing(groups, random):
    def by_name(config, order: list[list[tuple[int, int]]]) -> dict[tuple[int, int], np.ndarray]:
        flat = [name for row in order for name in row]
        parts = estimate(config, [[groups[g][i] for g, i in row] for row in order])
        ends = np.cumsum([len(groups[g][i].turns) for g, i in flat])
        return dict(zip(flat, np.split(parts, ends[:-1]), strict=True))

    order = [[(g, i) for i in range(len(group))] for g, group in enumerate(groups)]
    shuffled = [random.sample(row, len(row)) for row in order]
    random.shuffle(shuffled)
    for config in ALL:
        before, after = by_name(config, order), by_name(config, shuffled)
        found, expected = (np.concatenate([values[name] for name in before]) for values in (after, before))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9, err_msg=names(config))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), rewards, st.integers(1, 300))
@settings(deadline=None)
def test_equal_rewards_teach_nothing(sizes, reward, length):
    groups = [[Episode([reward], length + i, greedy=i == 0) for i in range(size)] for size in sizes]
    for config in ALL:
        assert np.abs(estimate(config, groups)).max() < 1e-9, names(config)


@pytest.mark.parametrize("config", BY_GROUP, ids=names)
def test_an_episode_without_company_teaches_nothing(config):
    """A group whose other members all failed has no baseline, and does not end the run; the group beside it learns as ever."""
    lone, pair = [Episode([3.0], 5)], [Episode([1.0], 4), Episode([0.0], 4, greedy=True)]
    advantages = estimate(config, [lone, pair])
    assert advantages[0] == pytest.approx(0.0, abs=1e-12)
    assert advantages[1] > 0.4


@given(batches)
@settings(deadline=None)
def test_rloo_is_the_centred_reward_a_little_larger(groups):
    sizes = np.array([len(group) for group in groups for e in group for _ in e.turns])
    factor = np.where(sizes > 1, sizes / np.maximum(sizes - 1, 1), 0.0)
    np.testing.assert_allclose(estimate(Rloo(), groups), factor * estimate(DR_GRPO, groups), rtol=1e-9, atol=1e-9)


@given(batches)
@settings(deadline=None)
def test_reinforce_pp_has_mean_0_and_deviation_1_over_the_tokens_of_a_batch(groups):
    groups = [*groups, [Episode([0.0], 3), Episode([1.0, 4.0], 900)]]  # never all equal
    for config in (ReinforcePP(), ReinforcePPBaseline()):
        company = [len(group) > 1 or config == ReinforcePP() for group in groups for e in group for _ in e.turns]
        advantages = estimate(config, groups)[company]
        assert advantages.mean() == pytest.approx(0.0, abs=1e-9), names(config)
        assert advantages.std() == pytest.approx(1.0, abs=1e-9), names(config)


@given(batches, st.floats(-10, 10))
@settings(deadline=None)
def test_remax_is_blind_to_the_other_samples_and_to_what_all_earn_more(groups, more):
    groups = [[msgspec.structs.replace(e, greedy=i == 0) for i, e in enumerate(group)] for group in groups]
    whole, at = estimate(Remax(), groups), 0
    for group in groups:
        for e in group:
            pair = [Episode([e.reward + more], e.length), Episode([group[0].reward + more], 1, greedy=True)]
            np.testing.assert_allclose(
                whole[at : at + len(e.turns)], estimate(Remax(), [pair])[0], rtol=1e-9, atol=1e-9
            )
            at += len(e.turns)


def test_a_greedy_episode_is_a_baseline_and_teaches_nothing_itself():
    groups = [[Episode([2.0, 1.0], 9), Episode([1.0], 4, greedy=True), Episode([0.0], 4)], [Episode([7.0], 2)]]
    assert estimate(Remax(), groups).tolist() == [2.0, 2.0, 0.0, -1.0, 0.0]


@given(batches)
@settings(deadline=None)
def test_opo_weighted_by_length_sums_to_zero_in_every_group(groups):
    advantages, at = estimate(Opo(), groups), 0
    for group in groups:
        weighted = 0.0
        for e in group:
            weighted += e.length * advantages[at]
            at += len(e.turns)
        assert weighted == pytest.approx(0.0, abs=1e-6)


def test_with_equal_lengths_opo_is_dr_grpo():
    groups = [[Episode([r], 7) for r in (0.0, 1.0, 5.0)], [Episode([r], 3) for r in (2.0, -1.0)]]
    np.testing.assert_allclose(estimate(Opo(), groups), estimate(DR_GRPO, groups), atol=1e-12)


@given(st.lists(st.lists(rewards, min_size=1, max_size=6), min_size=1, max_size=4), st.integers(1, 4), st.booleans())
@settings(deadline=None)
def test_turn_level_is_grpo_where_only_the_last_of_equally_many_turns_is_rewarded(outcomes, turns, normalize):
    groups = [[Episode([0.0] * (turns - 1) + [r], turns) for r in row] for row in outcomes]
    undiscounted = estimate(TurnLevel(gamma=1.0, normalize=normalize), groups)
    np.testing.assert_allclose(undiscounted, estimate(Grpo(normalize=normalize), groups), atol=1e-9)


def test_a_turn_is_not_credited_with_what_came_before_it():
    """Both end alike; one had earned something at first. Only the first turn tells them apart."""
    groups = [[Episode([1.0, 0.0], 4), Episode([0.0, 0.0], 4)]]
    assert estimate(TurnLevel(normalize=False), groups).tolist() == [0.5, 0.0, -0.5, 0.0]
    assert estimate(DR_GRPO, groups).tolist() == [0.5, 0.5, -0.5, -0.5]
