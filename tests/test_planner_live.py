"""When the staleness bound of a run that goes on moves, and that it comes to rest."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.monitor.alerts import SETTLING
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.run import SimulationResult, simulate
from slipstream.planner.tune.live import EVERY, PATIENT, BoundMove, BoundRule
from slipstream.tests.test_planner_explain import run_of


def row(wait: float = 0.0, age: int = 0, ess: float = 1.0) -> dict[str, Any]:
    """A step of a second of which the learner waited a share."""
    return {
        "wait_s": wait,
        "step_s": 0.9 * (1 - wait),
        "push_s": 0.1 * (1 - wait),
        "staleness_tokens": {str(age): 100},
        "ess_by_staleness": {str(age): ess},
        "tokens_withheld": 0,
        "tokens_generated": 100,
        "slot_s": 8.0,
        "idle_slot_s": 0.0,
        "learner_tokens_per_s": 200.0,
    }


def moves(rule: BoundRule, *rows: dict[str, Any], times: int = EVERY) -> list[BoundMove]:
    found = [move for one in rows for _ in range(times) if (move := rule.observe(one)) is not None]
    return found


def test_a_learner_that_waits_gets_a_higher_bound_and_old_tokens_a_lower_one() -> None:
    (up,) = moves(BoundRule(1, 0, 4, lambda bound: 0.5), row(wait=0.2, age=1))
    assert (up.bound, up.why) == (2, "the learner waits 20 % of the time, ess 1.000")
    (down,) = moves(BoundRule(2, 0, 4, lambda bound: 0.01), row(wait=0.01, age=2))
    assert down.bound == 1
    assert down.why.endswith("staleness 2.00; simulated loss 1.0 %")


@pytest.mark.parametrize(
    ("rule", "one"),
    [
        (BoundRule(4, 0, 4, lambda bound: 0.0), row(wait=0.5)),  # no higher
        (BoundRule(1, 1, 4, lambda bound: 0.0), row(age=1)),  # no lower
        (BoundRule(1, 0, 4, lambda bound: 0.0), row(wait=0.2, age=1, ess=0.85)),
        (BoundRule(2, 0, 4, lambda bound: 0.0), row(wait=0.06, age=2)),
        (BoundRule(2, 0, 4, lambda bound: 0.0), row(age=1)),
        (BoundRule(2, 0, 4, lambda bound: 0.04), row(age=2)),
        (BoundRule(2, 0, 4, lambda bound: None), row(age=2)),
    ],
    ids=["highest", "lowest", "not fresh", "waits a little", "young", "a loss", "a loss that is not known"],
)
def test_it_stays_where_a_move_is_not_allowed_or_not_worth_it(rule: BoundRule, one: dict[str, Any]) -> None:
    assert moves(rule, one, times=5 * EVERY) == []


def test_a_critics_warm_up_and_a_sample_size_that_nobody_measured_move_nothing() -> None:
    rule = BoundRule(1, 0, 4, lambda bound: 0.5)
    waits = row(wait=0.2, age=1)
    assert moves(rule, waits | {"grad_norm": None}) == []
    assert moves(rule, waits | {"grad_norm": 1.0}, times=EVERY - 1) == []  # those of the warm-up are not counted
    assert [move.bound for move in moves(rule, waits, times=1)] == [2]
    unmeasured = waits | {"ess_by_staleness": {}}
    for ess, number in ((None, 0), (0.5, 0), (0.99, 1)):  # of all tokens
        assert len(moves(BoundRule(1, 0, 4, lambda bound: 0.5), unmeasured | {"ess": ess})) == number


def test_after_a_move_the_run_fills_up_first_and_a_move_back_takes_longer() -> None:
    rule = BoundRule(1, 0, 4, lambda bound: 0.0)
    (move,) = moves(rule, row(wait=0.2, age=1))
    rule.moved(move.bound)
    back = row(age=2)
    assert moves(rule, back, times=2 + SETTLING + EVERY - 1) == []
    (move,) = moves(rule, back, times=1)
    rule.moved(move.bound)
    again = row(wait=0.2, age=1)
    assert moves(rule, again, times=2 + SETTLING + 2 * EVERY - 1) == []
    assert len(moves(rule, again, times=1)) == 1


def test_a_change_by_the_user_begins_a_new_window() -> None:
    rule = BoundRule(1, 0, 4, lambda bound: 0.0)
    assert moves(rule, row(wait=0.2, age=1), times=EVERY - 1) == []
    rule.moved(3)
    assert moves(rule, row(wait=0.2, age=1), times=3 + SETTLING + EVERY - 1) == []
    assert [move.bound for move in moves(rule, row(wait=0.2, age=1), times=1)] == [4]


@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(0, 6), st.floats(0.5, 1.0), st.booleans()), max_size=120),
    st.floats(0.0, 0.1),
)
def test_the_bound_stays_in_its_limits_and_moves_by_one(
    low: int, steps: list[tuple[float, int, float, bool]], loss: float
) -> None:
    high, since = low + 2, 0
    rule = BoundRule(low + 1, low, high, lambda bound: loss)
    for wait, age, ess, obeyed in steps:
        since += 1
        move = rule.observe(row(wait, age, ess))
        if move is None:
            continue
        assert low <= move.bound <= high
        assert abs(move.bound - rule.bound) == 1
        assert since >= EVERY
        since = 0
        if obeyed:
            rule.moved(move.bound)


@functools.cache
def run_at(bound: int) -> SimulationResult:
    return simulate(SimulationPlan.of(run_of(), (f"buffer.max_staleness={bound}",)), bound + SETTLING + PATIENT * EVERY)


def loss_at(bound: int) -> float:
    own, other = (run_at(one).figures.trained_tokens_per_s for one in (bound + 1, bound))
    return 1 - other / own


@pytest.mark.parametrize("start", [0, 1, 4])
def test_a_run_comes_to_rest_where_its_learner_hardly_waits(start: int) -> None:
    """Whatever the bound that it starts with, it ends at one that neither rule moves again."""
    rule, made = BoundRule(start, 0, 6, loss_at), list[int]()
    for _ in range(12):
        samples = run_at(rule.bound).samples
        for sample in samples:
            move = rule.observe(
                {
                    "wait_s": sample.wait_s,
                    "step_s": sample.step_s,
                    "push_s": sample.push_s,
                    "staleness_tokens": {str(lag): n for lag, n in sample.tokens_by_staleness.items()},
                    "ess_by_staleness": dict.fromkeys(map(str, sample.tokens_by_staleness), 1.0),
                    "tokens_withheld": sample.withheld,
                    "tokens_generated": sample.generated,
                    "slot_s": sample.slot_s,
                    "idle_slot_s": sample.idle_slot_s,
                    "learner_tokens_per_s": sample.context / sample.step_s,
                }
            )
            if move is not None:
                made.append(move.bound)
                rule.moved(move.bound)
                break
    assert rule.bound in (1, 2)
    assert len(made) <= abs(start - rule.bound) + 2
