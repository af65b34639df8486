"""From trajectories to rows: who is trained, with which advantage, and where each token ends up."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.buffer.trajectory import FINISHED, Outcome, Trajectory, Turn, VersionSpan
from slipstream.configs.algorithm import Algorithm, Grpo, Remax
from slipstream.errors import LearnerError
from slipstream.learner import packing
from slipstream.learner.metrics import summarize
from slipstream.learner.packing import fresh_microbatches
from slipstream.tests.columns import joined, to_train_batch

PLAIN = Algorithm(advantage=Grpo(normalize=False))


def trajectory(member, reward, versions, branch=0, group=0, outcome=FINISHED):
    """One token per entry of `versions`: -1 is context, anything else is the version that sampled it."""
    n = len(versions)
    mask = np.array(versions) >= 0
    spans = tuple(VersionSpan(i, i + 1, v) for i, v in enumerate(versions) if v >= 0)
    first = int(mask.argmax())
    made = Trajectory(
        id=f"{group}.0.{member}.{branch}",
        group_id=group,
        member=member,
        branch=branch,
        task_id="t",
        env="e",
        token_ids=np.arange(100 * member + 10 * branch, 100 * member + 10 * branch + n, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        version_spans=spans,
        turns=(Turn(first, n, "stop"),) if mask.any() else (),
        reward=reward,
        turn_rewards=(reward,),
        outcome=outcome,
    )
    made.check()
    return made


def advantage(sequence):
    """Of the only turn."""
    (value,) = set(sequence.advantages[sequence.loss_mask].tolist())
    return value


def test_a_member_counts_once_in_the_baseline_and_its_branches_share_the_advantage():
    group = (trajectory(0, 1.0, [-1, 5]), trajectory(0, 1.0, [-1, -1, 5], branch=1), trajectory(3, 0.0, [-1, 5]))
    sequences = to_train_batch([group], PLAIN, version=5, oldest_version=3)
    assert [advantage(s) for s in sequences] == [0.5, 0.5, -0.5]


def test_tokens_before_the_oldest_version_are_context():
    (sequence,) = to_train_batch([(trajectory(0, 1.0, [-1, 2, 3, -1, 5]),)], PLAIN, version=5, oldest_version=3)
    assert sequence.loss_mask.tolist() == [False, False, True, False, True]
    assert sequence.staleness.tolist() == [-1, -1, 2, -1, 0]
    assert sequence.behavior_logprobs.tolist() == [0, 0, -0.5, 0, -0.5]


def test_what_follows_the_last_trained_token_is_cut_and_what_has_none_is_left_out():
    group = (trajectory(0, 1.0, [-1, 5, -1, -1]), trajectory(1, 1.0, [-1, 1, 1]))
    sequences = to_train_batch([group], PLAIN, version=5, oldest_version=4)
    assert [s.token_ids.tolist() for s in sequences] == [[0, 1]]


def test_the_first_token_is_never_trained():
    (sequence,) = to_train_batch([(trajectory(0, 1.0, [5, 5]),)], PLAIN, version=5, oldest_version=0)
    assert sequence.loss_mask.tolist() == [False, True]


def test_late_episodes_count_in_the_baseline_and_carry_no_loss():
    group = (trajectory(0, 1.0, [-1, 5]), trajectory(1, 0.0, [-1, 5]), trajectory(2, 1.0, [-1, 5, 5]))
    sequences = to_train_batch([group], PLAIN, 5, 5, withheld={"0.0.1": "late"})
    assert [advantage(s) for s in sequences] == pytest.approx([1 / 3, 1 / 3])
    summary = summarize([group], sequences)
    assert (summary.episodes, summary.tokens_trained, summary.tokens_withheld) == (3, 3, 1)
    assert summary.reward_mean == pytest.approx(2 / 3)


def test_what_was_played_greedily_is_in_no_statistic_of_episodes_and_its_tokens_are_withheld():
    greedy = msgspec.structs.replace(trajectory(0, 9.0, [-1, 5, 5, 5]), metrics={"calls": 9.0})
    group = (greedy, *(msgspec.structs.replace(trajectory(m, 1.0, [-1, 5]), metrics={"calls": 1.0}) for m in (1, 2)))
    withheld = {"0.0.0": "baseline", "0.0.2": "filtered"}
    sequences = to_train_batch([group], PLAIN, 5, 5, withheld)
    assert len(sequences) == 1
    summary = summarize([group], sequences, withheld)
    assert (summary.reward_mean, summary.reward_std, summary.environment) == (1.0, 0.0, {"calls": 1.0})
    assert (summary.episodes, summary.episode_tokens_mean, summary.turns_mean) == (2, 1.0, 1.0)
    assert (summary.tokens_trained, summary.tokens_withheld) == (1, 4)


def test_a_failure_is_trained_with_its_penalty_and_is_in_no_statistic_of_rewards():
    failed = msgspec.structs.replace(
        trajectory(1, -1.0, [-1, 5]), outcome=Outcome("failed", "tool"), turn_rewards=(), metrics={"calls": 9.0}
    )
    group = (msgspec.structs.replace(trajectory(0, 1.0, [-1, 5]), metrics={"calls": 1.0}), failed)
    sequences = to_train_batch([group], PLAIN, version=5, oldest_version=0)
    assert [advantage(s) for s in sequences] == [1.0, -1.0]
    summary = summarize([group], sequences)
    assert (summary.reward_mean, summary.reward_std, summary.episodes) == (1.0, 0.0, 2)
    assert summary.environment == {"calls": 1.0}


def test_failures_with_rewards_and_quarrelling_branches_are_refused():
    failed = trajectory(0, 1.0, [-1, 5], outcome=Outcome("failed", "tool"))
    with pytest.raises(LearnerError, match="failed and carries rewards"):
        to_train_batch([(failed,)], PLAIN, version=5, oldest_version=0)
    two = (trajectory(0, 1.0, [-1, 5]), trajectory(0, 0.0, [-1, 5], branch=1))
    with pytest.raises(LearnerError, match="reward differs"):
        to_train_batch([two], PLAIN, version=5, oldest_version=0)


def test_the_summary_counts_every_sampled_token():
    groups = [
        (trajectory(0, 1.0, [-1, 5, 4, 2]), trajectory(1, 0.0, [-1, 5])),
        (trajectory(0, 1.0, [-1, 1, 1], group=1), trajectory(0, 1.0, [-1, -1, 4], branch=1, group=1)),
    ]
    sequences = to_train_batch(groups, PLAIN, version=5, oldest_version=3)
    summary = summarize(groups, sequences)
    assert (summary.episodes, summary.tokens_trained, summary.tokens_withheld) == (3, 4, 3)
    assert summary.staleness_tokens == {"0": 2, "1": 2}
    assert (summary.staleness_mean, summary.staleness_max) == (0.5, 1)
    assert summary.reward_mean == pytest.approx(2 / 3)
    assert summary.reward_std == pytest.approx(np.std([1, 0, 1]))
    assert summary.episode_tokens_mean == pytest.approx(7 / 3)
    assert summary.turns_mean == pytest.approx(4 / 3)


def test_groups_without_a_difference_and_truncated_episodes_are_counted():
    cut = Outcome("truncated")
    groups = [
        (trajectory(0, 1.0, [-1, 5]), trajectory(1, 1.0, [-1, 5], outcome=cut)),
        (trajectory(0, 1.0, [-1, 5], group=1), trajectory(0, 1.0, [-1, -1, 5], branch=1, group=1)),
        (trajectory(0, 1.0, [-1, 5], group=2), trajectory(1, 0.0, [-1, 5], group=2, outcome=cut)),
    ]
    summary = summarize(groups, to_train_batch(groups, PLAIN, version=5, oldest_version=3))
    assert (summary.groups, summary.groups_alike, summary.episodes) == (3, 1, 5)  # the second has a single episode
    assert summary.truncated == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    ("rewards", "alike"), [([0.0, 1.0, 1.0], 0), ([1.0, 1.0, 1.0], 1), ([1.0, 1.0], 1), ([0.0, 1.0], 0)]
)
def test_the_greedy_member_is_one_that_the_others_are_compared_with(rewards, alike):
    group = tuple(trajectory(member, reward, [-1, 5]) for member, reward in enumerate(rewards))
    withheld = {"0.0.0": "baseline"}
    trained = to_train_batch([group], Algorithm(advantage=Remax()), 5, 5, withheld)
    summary = summarize([group], trained, withheld)
    assert (summary.groups_alike, summary.episodes) == (alike, len(rewards) - 1)
    assert trained.advantages[trained.loss_mask].any() == (not alike)


def test_an_empty_batch_has_a_summary():
    assert summarize([], joined([])).tokens_trained == 0


@given(st.lists(st.integers(2, 40), min_size=1, max_size=20), st.integers(1, 4), st.integers(1, 3), st.integers(8, 64))
@settings(deadline=None)
def test_ranks_and_minibatches_hold_every_token_once(lengths, ranks, count, budget):
    groups = [(trajectory(0, 1.0, [-1, *[5] * (n - 1)], group=i),) for i, n in enumerate(lengths)]
    sequences = to_train_batch(groups, PLAIN, version=5, oldest_version=0)
    parts = packing.minibatches(sequences, count)
    assert all(map(len, parts))
    assert len(parts) == min(count, len(sequences))
    rows = [row for part in parts for rank in range(ranks) for row in packing.microbatches(part, rank, ranks, budget)]
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(lengths) - len(lengths)
    assert sorted(n for row in rows for n in np.diff(row.cu_seqlens).tolist()) == sorted(lengths)


def test_a_row_is_its_sequences_side_by_side():
    group = (trajectory(0, 1.0, [-1, 5, 4]), trajectory(1, 0.0, [-1, -1, 5, 5]))
    row = packing.to_microbatch(to_train_batch([group], PLAIN, version=5, oldest_version=5))
    assert row.cu_seqlens == (0, 2, 6)
    assert row.token_ids.tolist() == [0, 1, 100, 101, 102, 103]
    assert row.position_ids.tolist() == [0, 1, 0, 1, 2, 3]
    assert row.loss_mask.tolist() == [False, True, False, False, True, True]
    assert row.advantages.tolist() == [0, 0.5, 0, 0, -0.5, -0.5]
    assert row.staleness.tolist() == [-1, 0, -1, -1, 0, 0]
    assert row.proximal_logprobs.isnan().tolist() == row.loss_mask.tolist()


def test_mismatch_looks_at_lag_zero_only():
    group = (trajectory(0, 1.0, [-1, 5, 4, 5]),)
    row = packing.to_microbatch(to_train_batch([group], PLAIN, version=5, oldest_version=4))
    row = packing.with_proximal(row, torch.tensor([9.0, -0.5, -3.0, -0.75]))
    assert row.proximal_logprobs.tolist() == [0.0, -0.5, -3.0, -0.75]
    assert packing.mismatch([row]) == (0.25, 2)
    assert packing.mismatch([]) == (0.0, 0)


def test_tokens_of_a_mixed_policy_are_trained_and_counted_and_not_compared():
    spans = (VersionSpan(1, 3, 5), VersionSpan(3, 4, 5, 4), VersionSpan(4, 5, 5, 5), VersionSpan(5, 6, 4, 3))
    made = msgspec.structs.replace(trajectory(0, 1.0, [-1, 5, 5, 5, 5, 4, -1]), version_spans=spans)
    made.check()
    sequence = sequences = to_train_batch([(made,)], PLAIN, version=5, oldest_version=4)
    assert sequence.mixed.tolist() == [False, False, False, True, False, True]
    assert summarize([(made,)], sequences).mixed_tokens == 2
    row = packing.with_proximal(packing.to_microbatch(sequences), torch.tensor([9.0, -0.5, -0.625, -7.0, -0.5, -9.0]))
    assert row.loss_mask.sum() == 5
    assert packing.mismatch([row]) == (0.125, 3)
    (late,) = to_train_batch([(made,)], PLAIN, version=5, oldest_version=5)
    assert late.mixed.tolist() == [False, False, False, True, False]


def test_only_mixed_tokens_compare_nothing():
    made = msgspec.structs.replace(trajectory(0, 1.0, [-1, 5]), version_spans=(VersionSpan(1, 2, 5, 0),))
    (row,) = fresh_microbatches([made], version=5, budget=64)
    assert packing.mismatch([packing.with_proximal(row, torch.tensor([0.0, -3.0]))]) == (0.0, 0)


def test_fresh_microbatches_score_the_tokens_of_one_version_across_a_change_of_weights():
    (row,) = fresh_microbatches(
        [trajectory(0, 1.0, [-1, 4, 4, 5, 5, -1, 5]), trajectory(1, 0.0, [-1, 4])], version=5, budget=64
    )
    assert row.loss_mask.tolist() == [False, False, False, True, True, False, True]
    assert not row.advantages.any()
    assert fresh_microbatches([trajectory(0, 1.0, [-1, 4])], version=5, budget=64) == []


def test_what_environments_report_is_averaged_over_episodes():
    def reporting(member: int, branch: int, **metrics: float):
        return msgspec.structs.replace(trajectory(member, 1.0, [-1, 5], branch=branch), metrics=metrics)

    group = (reporting(0, 0, calls=1.0), reporting(0, 1, calls=1.0), reporting(1, 0, calls=4.0, errors=2.0))
    assert summarize([group], joined([])).environment == {"calls": 2.5, "errors": 2.0}


def test_of_several_environments_each_reports_its_own():
    def of(env: str, reward: float, group: int, **metrics: float):
        return msgspec.structs.replace(trajectory(0, reward, [-1, 5], group=group), env=env, metrics=metrics)

    groups = [(of("sums", 1.0, 0, calls=1.0),), (of("games", 0.25, 1, calls=3.0),), (of("games", 0.75, 2),)]
    assert summarize(groups, joined([])).environment == {
        "calls": 2.0,
        "games/calls": 3.0,
        "games/reward": 0.5,
        "sums/calls": 1.0,
        "sums/reward": 1.0,
    }


def test_selected_sequences_keep_their_columns_and_their_episodes():
    group = (trajectory(0, 1.0, [-1, 5, 4]), trajectory(1, 0.0, [-1, -1, 5, 5]), trajectory(2, 1.0, [-1, 5]))
    whole = to_train_batch([group], PLAIN, version=5, oldest_version=4)
    chosen = whole.select([2, 1], np.array([2, 3]))
    assert chosen.ids == ("0.0.2.0", "0.0.1.0")
    assert chosen.offsets.tolist() == [0, 2, 5]
    assert chosen.token_ids.tolist() == [200, 201, 100, 101, 102]
    assert chosen.loss_mask.tolist() == [False, True, False, False, True]
    assert chosen.positive.tolist() == [True, False]
    assert [whole.episode_ids[e] for e in chosen.episode] == ["0.0.2", "0.0.1"]
    assert [one.token_ids.tolist() for one in whole] == [[0, 1, 2], [100, 101, 102, 103], [200, 201]]
