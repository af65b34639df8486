"""avg@k and pass@k: what they count, and that they are unbiased."""

from __future__ import annotations

import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.buffer.trajectory import FINISHED, TRUNCATED, Outcome
from slipstream.common.scores import EvaluationResult
from slipstream.monitor.series import evaluation_line
from slipstream.rollout.player import EpisodeResult
from slipstream.rollout.scores import score, unbiased_pass_at

FAILED = EpisodeResult(Outcome("failed", "tool", "it broke"), 0.0, ())


def ended(reward: float, outcome: Outcome = FINISHED) -> EpisodeResult:
    return EpisodeResult(outcome, reward, ())


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n), st.integers(0, n))))
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_solution(case: tuple[int, int, int]) -> None:
    k, samples, solved = case
    draws = list(itertools.combinations([True] * solved + [False] * (samples - solved), k))
    assert unbiased_pass_at(k, samples, solved) == pytest.approx(statistics.fmean(map(any, draws)))


def test_errors_are_over_tasks_and_failed_episodes_count_in_no_score() -> None:
    tasks = [
        [ended(1.0), ended(0.0), ended(1.0), ended(0.5, TRUNCATED)],
        [ended(0.0), ended(0.0), FAILED, ended(0.0)],
        [FAILED] * 4,
    ]
    found = score(tasks)
    assert (found.tasks, found.samples) == (2, 4)
    assert found.reward_mean == pytest.approx((0.625 + 0.0) / 2)
    assert found.reward_stderr == pytest.approx(statistics.stdev([0.625, 0.0]) / 2**0.5)
    assert found.outcomes == {"finished": 6, "truncated": 1, "failed_tool": 5}
    assert list(found.pass_at) == ["1", "2", "4"]
    assert (found.pass_at["1"].mean, found.pass_at["1"].tasks) == (pytest.approx(0.25), 2)
    assert (found.pass_at["4"].mean, found.pass_at["4"].tasks) == (1.0, 1)  # three of the second task's did not fail


def test_one_sample_is_what_it_was() -> None:
    found = score([[ended(1.0)], [ended(0.5)], [FAILED]])
    assert (found.tasks, found.reward_mean, found.samples) == (2, 0.75, 1)
    assert found.reward_stderr == pytest.approx(0.25)
    assert found.pass_at["1"].mean == 0.5


def test_nothing_but_failures_is_no_score() -> None:
    found = score([[FAILED, FAILED]])
    assert (found.tasks, found.reward_mean, found.reward_stderr, found.pass_at) == (0, None, None, {})


def test_the_line_of_an_evaluation() -> None:
    found = score([[ended(1.0), ended(0.0)], [ended(0.0), ended(0.0)]])
    values = {name: getattr(found, name) for name in found.__struct_fields__}
    result = EvaluationResult(**values, label="step 20", version=20, step=20, seconds=1.0)
    assert evaluation_line(result) == (
        "step 20: reward 0.250 ± 0.250 over 2 held-out tasks, 2 samples each; pass@1 0.250 ± 0.250, pass@2 0.500 ± 0.500"
    )


def test_the_line_of_an_evaluation_has_the_means_of_a_mixtures_environments() -> None:
    parts = {"sums": score([[ended(1.0)], [ended(0.75)]]), "games": score([[FAILED]])}
    result = EvaluationResult(
        label="final",
        version=40,
        seconds=1.0,
        tasks=2,
        reward_mean=0.875,
        reward_stderr=0.125,
        outcomes={"finished": 2},
        environments=parts,
    )
    assert evaluation_line(result) == "final: reward 0.875 ± 0.125 over 2 held-out tasks (sums 0.875, games –)"
