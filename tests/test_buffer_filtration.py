"""Policy filtration in the buffer: who is trained on is chosen by rewards when a group is complete, and stays chosen.

That the accounts hold wherever a run is, and through crashes, is in `test_buffer_replay`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.buffer.admission import Filter
from slipstream.buffer.client import BufferClient
from slipstream.buffer.group_table import Episode, Group
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.replay import Replay
from slipstream.buffer.sample_filter import dropped
from slipstream.buffer.trajectory import FINISHED, TRUNCATED
from slipstream.configs.schema import Buffer
from slipstream.tests.episodes import SAMPLED, trajectory
from slipstream.tests.fleets import mark_served
from slipstream.tests.replays import failed, lease_of, replay_of, state, step
from slipstream.tests.test_buffer_dynamic_sampling import earn
from slipstream.tests.test_buffer_service import SOON, serving


def group_of(rewards: Sequence[float], number: int = 0, order: Sequence[int] | None = None) -> Group:
    """Members with these rewards, delivered in `order`."""
    members = range(len(rewards)) if order is None else order
    episodes = [Episode(f"{number}.0.{m}", account="ready", kept={0: 3}, reward=rewards[m]) for m in members]
    return Group(number, episodes={e.id: e for e in episodes})


def kept(group: Group, rule: Filter) -> list[int]:
    out = {e.member for e in dropped(group, rule)}
    return sorted(e.member for e in group.episodes.values() if e.member not in out)


def filtered(replay: Replay, group: int = 0) -> list[int]:
    return [e.member for e in replay.table.groups[group].episodes.values() if e.withheld == "filtered"]


rewards = st.lists(st.integers(-8, 8).map(lambda quarters: quarters / 4), min_size=1, max_size=9)


@given(rewards, st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_by_rank_of_rewards_and_by_nothing_else(earned, number, random):
    group = group_of(earned, number)
    order = list(range(len(earned)))
    random.shuffle(order)
    again = group_of([3 * r - 7 for r in earned], number, order)  # other rewards of the same order, others first
    for rule in ("none", "best", "best_random", "best_worst"):
        assert kept(group, rule) == kept(again, rule)
    assert kept(group, "none") == list(range(len(earned)))
    (best,) = kept(group, "best")
    assert earned[best] == max(earned)
    worst = [m for m in kept(group, "best_worst") if m != best]
    lot = [m for m in kept(group, "best_random") if m != best]
    assert best in kept(group, "best_worst")
    assert best in kept(group, "best_random")
    assert len(worst) == len(lot) == (len(earned) > 1)
    assert all(earned[m] == min(earned) for m in worst)


def test_the_lot_falls_on_each_of_the_others_alike_often() -> None:
    earned = [0.25, 1.0, 0.0, 0.5]
    lots = Counter(m for n in range(3000) for m in kept(group_of(earned, n), "best_random"))
    assert lots.pop(1) == 3000
    assert set(lots) == {0, 2, 3}
    assert all(900 < times < 1100 for times in lots.values())


def test_only_those_that_could_carry_loss_are_ranked() -> None:
    group = group_of([9.0, 1.0, 0.5, 0.0, -9.0])
    group.episodes["0.0.0"].withheld = "baseline"
    group.episodes["0.0.4"].account = "discarded"
    assert {e.member for e in dropped(group, "best_worst")} == {2}


@pytest.mark.parametrize(
    ("rule", "out"), [("none", []), ("best", [0, 2, 3]), ("best_worst", [2, 3]), ("best_random", None)]
)
def test_who_is_left_out_counts_as_filtered_once_the_others_are_trained(rule: Filter, out: list[int] | None) -> None:
    replay = replay_of(group_size=4, filter=rule)
    lease = lease_of(replay)
    earn(replay, lease, [0.0, 1.0, 0.5])
    assert filtered(replay) == []  # the last one may still earn more
    assert replay.leases.deliver(lease.episode(3), FINISHED, {0: 3}, {0: 3}, 0.25)
    assert len(filtered(replay)) == 2 if out is None else filtered(replay) == out
    assert replay.table.ledgers.total == Ledger(generated=12, ready=12)
    step(replay)
    left = 3 * len(filtered(replay))
    assert replay.table.ledgers.total == Ledger(
        generated=12, trained=12 - left, withheld={"filtered": left} if left else {}
    )


def test_a_penalty_has_a_rank_and_a_dropped_failure_has_none() -> None:
    replay = replay_of(group_size=4, filter="best_worst")
    lease = lease_of(replay)
    earn(replay, lease, [0.0, 1.0])
    assert replay.leases.deliver(lease.episode(2), failed("tool"), {0: 3}, {0: 3}, -1.0)
    replay.leases.deliver(lease.episode(3), failed("tool"), {0: 3}, {})
    assert filtered(replay) == [0]


def test_what_a_limit_cut_off_is_not_trained_on_and_a_penalty_is() -> None:
    """DAPO's overlong filtering. The choice is kept where the buffer restarts between two members."""
    replay = replay_of(group_size=4, filter="untruncated")
    lease = lease_of(replay)
    assert replay.leases.deliver(lease.episode(0), TRUNCATED, {0: 3}, {0: 3}, 1.0)
    assert replay.leases.deliver(lease.episode(1), FINISHED, {0: 3}, {0: 3}, 0.0)
    assert replay.leases.deliver(lease.episode(2), failed("tool"), {0: 3}, {0: 3}, -1.0)
    assert filtered(replay) == []
    assert replay.leases.deliver(lease.episode(3), TRUNCATED, {0: 3}, {0: 3}, 0.0)
    assert filtered(replay) == [0, 3]
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=12, trained=6, withheld={"filtered": 6})


def test_late_members_are_not_chosen_from_and_choose_nobody() -> None:
    replay = replay_of(group_size=4, min_members=3, filter="best")
    lease = lease_of(replay)
    earn(replay, lease, [0.0, 1.0, 0.5])
    assert replay.leases.deliver(lease.episode(3), FINISHED, {0: 3}, {0: 3}, 2.0)
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=12, trained=3, withheld={"filtered": 6, "late": 3})


def test_a_choice_is_kept_through_a_rollback() -> None:
    replay = replay_of(staleness=4, group_size=3, filter="best_random")
    earn(replay, lease_of(replay), [0.0, 1.0, 0.5])
    chosen = filtered(replay)
    step(replay)
    replay.recover(0)
    assert replay.table.ledgers.total == Ledger(generated=9, ready=9)
    step(replay)
    assert filtered(replay) == chosen
    assert replay.table.ledgers.total == Ledger(generated=9, trained=6, withheld={"filtered": 3})


def test_a_group_of_which_only_filtered_episodes_are_young_enough_is_discarded() -> None:
    replay = replay_of(staleness=1, filter="best")
    replay.table.counters.version = 2
    replay.mark_served(1)
    lease = lease_of(replay)
    replay.leases.deliver(lease.episode(0), FINISHED, {0: 3}, {0: 3}, 1.0)
    replay.leases.deliver(lease.episode(1), FINISHED, {1: 3}, {1: 3}, 0.0)
    assert replay.take(2) is None
    assert state(replay) == "discarded"
    assert replay.table.ledgers.total.discarded == {"stale": 6}


async def test_the_choice_is_in_the_store_and_told_with_the_batch(tmp_path: Path, address: str) -> None:
    path = tmp_path / "buffer.sqlite"
    config = Buffer(max_staleness=0, groups_per_batch=1, group_size=3, filter="best_worst")

    async def deliver(client: BufferClient, member: int, reward: float) -> None:
        sent = msgspec.structs.replace(trajectory(f"0.0.{member}"), reward=reward)
        await client.deliver(f"0.0.{member}", {0: SAMPLED}, FINISHED, (sent,))

    async with asyncio.timeout(SOON):
        async with serving(path, address, config), BufferClient(address, "w") as client:
            mark_served(client, 0)
            await client.lease()
            await deliver(client, 0, 0.25)
            await deliver(client, 2, 0.5)
        async with serving(path, address, config), BufferClient(address, "w") as client:
            await deliver(client, 1, 0.75)  # two more rewards come from the store
        unfiltered = msgspec.structs.replace(config, filter="none")  # what was chosen stays chosen
        async with serving(path, address, unfiltered), BufferClient(address, "w") as client:
            batch = await client.take(0, SOON)
            assert batch.withheld == {"0.0.2": "filtered"}
            assert [t.reward for t in batch.groups[0]] == [0.25, 0.75, 0.5]
            await client.commit(0)
            stats = await client.stats()
    assert stats.ledger == Ledger(generated=9, trained=6, withheld={"filtered": 3})
    accounts = ledger_report(path)
    assert accounts.balances
    assert accounts.total == stats.ledger
