"""The bound as arithmetic: budgets and quotas of several environments add up, follow their shares, and starve no environment."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.buffer.admission import Admission

SHARES = st.lists(st.integers(1, 50), min_size=1, max_size=6).map(tuple)
FRACTIONS = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6).map(tuple)


@given(st.integers(0, 8), st.integers(1, 64), st.integers(0, 10_000))
def test_one_environment_has_the_whole_bound(staleness: int, per_batch: int, settled: int) -> None:
    admission = Admission(staleness, per_batch)
    assert admission.budgets([settled]) == ((staleness + 1) * per_batch,)
    assert admission.quotas([settled]) == (per_batch,)


@given(SHARES | FRACTIONS, st.integers(0, 8), st.integers(1, 64), st.data())
def test_budgets_and_quotas_add_up_whatever_was_trained(
    shares: tuple[float, ...], staleness: int, per_batch: int, data: st.DataObject
) -> None:
    admission = Admission(staleness, per_batch, shares)
    before = data.draw(st.tuples(*[st.integers(0, 300)] * len(shares)))
    budgets, quotas = admission.budgets(before), admission.quotas(before)
    assert sum(budgets) == (staleness + 1) * per_batch
    assert sum(quotas) == per_batch
    assert min(*budgets, *quotas) >= 0
    assert all(quota <= budget for quota, budget in zip(quotas, budgets, strict=True)), "a quota above its budget"


@given(SHARES, st.integers(1, 8), st.integers(1, 64), st.integers(0, 4))
def test_the_parts_of_all_shards_are_a_whole_batch(
    shares: tuple[float, ...], shards: int, more: int, staleness: int
) -> None:
    """Also by environment: the first batch is the one of a buffer with one process. Their clock has no part."""
    per_batch = shards + more - 1
    parts = [Admission(staleness, per_batch, shares, shard, shards) for shard in range(shards + 1)]
    none, own = [0] * len(shares), parts[1:] if shards > 1 else parts[:1]
    assert sum(one.part for one in own) == per_batch
    assert min(one.part for one in own) > 0
    assert [sum(env) for env in zip(*(one.quotas(none) for one in own), strict=True)] == list(
        Admission(staleness, per_batch, shares).quotas(none)
    )
    assert sum(sum(one.budgets(none)) for one in own) == (staleness + 1) * per_batch
    assert shards == 1 or sum(parts[0].budgets(none)) == sum(parts[0].quotas(none)) == 0


@given(SHARES, st.integers(2, 8), st.integers(1, 4))
def test_shards_meet_the_shares_of_environments_together(shares: tuple[int, ...], shards: int, each: int) -> None:
    """Each is within a group of its own share, and so are the batches of all together, within a group per shard."""
    counts = [train(Admission(0, each * shards, shares, shard, shards), 20) for shard in range(1, shards + 1)]
    for step in range(20):
        for env, share in enumerate(shares):
            due = Fraction(share, sum(shares)) * step * each * shards
            assert abs(sum(one[step][env] for one in counts) - due) < shards


def train(admission: Admission, steps: int) -> list[list[int]]:
    """Groups of each environment that were trained on after 0, 1, 2, ... steps."""
    counts = [[0] * len(admission.shares)]
    for _ in range(steps):
        counts.append([a + b for a, b in zip(counts[-1], admission.quotas(counts[-1]), strict=True)])
    return counts


@given(SHARES, st.integers(1, 16))
def test_shares_are_met_within_one_group_at_every_step(shares: tuple[int, ...], per_batch: int) -> None:
    for step, counts in enumerate(train(Admission(0, per_batch, shares), 100)):
        for share, count in zip(shares, counts, strict=True):
            due = Fraction(share, sum(shares)) * step * per_batch
            assert abs(count - due) < 1


@given(SHARES, st.integers(1, 8))
def test_no_environment_waits_longer_than_its_share_says(shares: tuple[int, ...], per_batch: int) -> None:
    counts = train(Admission(0, per_batch, shares), 4 * sum(shares))
    for env, share in enumerate(shares):
        often = -(-2 * sum(shares) // (share * per_batch))  # steps in which two of its groups are due
        for start in range(len(counts) - often):
            assert counts[start + often][env] > counts[start][env]


@given(SHARES | FRACTIONS, st.integers(0, 4), st.integers(1, 16), st.integers(0, 20))
def test_the_budget_covers_every_batch_that_may_be_taken_before_the_engines_serve_a_newer_one(
    shares: tuple[float, ...], staleness: int, per_batch: int, served: int
) -> None:
    """Else a step could need a group of an environment that may not begin one: nothing would ever move again."""
    admission = Admission(staleness, per_batch, shares)
    counts = train(admission, served + staleness + 1)
    budgets = admission.budgets(counts[served])
    assert [a + b for a, b in zip(counts[served], budgets, strict=True)] == counts[served + staleness + 1]


def test_an_environment_with_no_share_gets_nothing() -> None:
    admission = Admission(3, 5, (1.0, 0.0))
    assert admission.budgets([7, 0]) == (20, 0)
    assert admission.quotas([7, 0]) == (5, 0)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_oldest_trainable_version_and_the_last_chance(staleness: int) -> None:
    admission = Admission(staleness, 1)
    for version in range(10):
        oldest = admission.oldest_trainable(version)
        assert oldest == max(0, version - staleness)
        for leased_at in range(version + 1):
            within, after = leased_at >= oldest, leased_at >= admission.oldest_trainable(version + 1)
            assert admission.last_chance(version, leased_at) == (not after)
            assert within or not after
