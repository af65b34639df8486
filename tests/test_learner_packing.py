"""Packing and splitting are exact covers within their bounds; schedules are pure functions of the step."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.learner import packing, step

LENGTHS = st.lists(st.integers(1, 300), max_size=60)


@given(LENGTHS, st.integers(1, 512))
def test_rows_hold_every_sequence_once_within_the_budget(lengths, budget):
    rows = packing.pack(lengths, budget)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= budget or len(row) == 1 for row in rows)


@given(LENGTHS, st.integers(1, 512))
def test_rows_are_few_and_the_same_every_time(lengths, budget):
    rows = packing.pack(lengths, budget)
    assert rows == packing.pack(list(lengths), budget)
    short = [n for n in lengths if n <= budget]
    least = -(-sum(short) // budget)
    assert len(rows) - (len(lengths) - len(short)) <= max(least, 2 * least - 1)


@given(st.lists(st.floats(0.1, 1e6), max_size=60), st.integers(1, 9))
def test_ranks_hold_every_sequence_once_and_are_balanced(costs, ranks):
    parts = packing.split(costs, ranks)
    assert len(parts) == ranks
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert parts == packing.split(list(costs), ranks)
    loads = [sum(costs[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs, default=0.0) * (1 + 1e-9)


def test_a_long_sequence_costs_more_than_its_pieces():
    assert packing.cost(4000) > 2 * packing.cost(2000)


def test_warm_up_is_linear_then_constant():
    assert [step.warm_up(8.0, at, 4) for at in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert step.warm_up(8.0, 0, 0) == 8.0


def test_cosine_falls_from_the_peak_to_a_tenth():
    rates = [step.warm_up_cosine(1.0, at, 5, 100) for at in range(100)]
    assert rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert all(a < b for a, b in pairwise(rates[:5]))
    assert all(a > b for a, b in pairwise(rates[4:]))
