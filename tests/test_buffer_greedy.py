"""A greedy member of each group in the buffer: it is waited for, is never trained on, and no group is without it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from slipstream.buffer.client import BufferClient
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.trajectory import FINISHED
from slipstream.configs.schema import Buffer
from slipstream.tests.episodes import SAMPLED
from slipstream.tests.fleets import mark_served
from slipstream.tests.replays import fail, failed, lease_of, play, replay_of, state, step
from slipstream.tests.test_buffer_dynamic_sampling import earn
from slipstream.tests.test_buffer_service import SOON, deliver, serving


def test_the_first_member_is_leased_as_greedy_and_its_tokens_are_withheld() -> None:
    replay = replay_of(staleness=4, group_size=3, greedy=True)
    lease = lease_of(replay)
    assert (lease.members, lease.greedy) == ((0, 1, 2), (0,))
    play(replay, lease)
    assert replay.table.ledgers.total == Ledger(generated=9, ready=9)
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=9, trained=6, withheld={"baseline": 3})
    replay.recover(0)
    assert replay.table.ledgers.total == Ledger(generated=9, ready=9)
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=9, trained=6, withheld={"baseline": 3})


def test_without_the_rule_nobody_is_greedy() -> None:
    replay = replay_of()
    lease = lease_of(replay)
    assert lease.greedy == ()
    play(replay, lease)
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=6, trained=6)


def test_a_group_is_not_complete_without_its_greedy_member() -> None:
    replay = replay_of(group_size=4, min_members=2, greedy=True)
    lease = lease_of(replay)
    for member in (1, 2):
        assert replay.leases.deliver(lease.episode(member), FINISHED, {0: 3}, {0: 3})
    assert state(replay) == "leased"
    assert replay.leases.deliver(lease.episode(0), FINISHED, {0: 4}, {0: 4})
    assert state(replay) == "ready"
    assert replay.leases.deliver(lease.episode(3), FINISHED, {0: 5}, {0: 5})
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=15, trained=6, withheld={"baseline": 4, "late": 5})


def test_a_greedy_member_alone_is_no_group() -> None:
    replay = replay_of(group_size=3, min_members=2, greedy=True)
    lease = lease_of(replay)
    assert replay.leases.deliver(lease.episode(0), FINISHED, {0: 3}, {0: 3})
    assert state(replay) == "leased"
    for member in (1, 2):
        fail(replay, lease.episode(member))
    assert replay.table.ledgers.total.discarded == {"too_few_members": 3}


def test_where_the_greedy_member_fails_for_good_nobody_else_is_waited_for() -> None:
    replay = replay_of(group_size=3, greedy=True)
    lease = lease_of(replay)
    assert replay.leases.deliver(lease.episode(1), FINISHED, {0: 3}, {0: 3})
    fail(replay, lease.episode(0), tokens=2)
    assert state(replay) == "discarded"
    assert replay.leases.progress("a", {lease.episode(2): {0: 4}}, 0.0) == [lease.episode(2)]
    assert replay.table.ledgers.total == Ledger(generated=9, discarded={"no_baseline": 7, "failed_tool": 2})
    assert lease_of(replay).group_id == 1  # its place is another's


def test_a_greedy_member_that_may_try_again_is_greedy_again() -> None:
    replay = replay_of(group_size=3, min_members=2, greedy=True, retries={"engine": 1})
    lease = lease_of(replay)
    for member in (1, 2):
        assert replay.leases.deliver(lease.episode(member), FINISHED, {0: 3}, {0: 3})
    fail(replay, lease.episode(0), "engine")
    again = lease_of(replay)
    assert (again.members, again.greedy) == ((0,), (0,))
    replay.leases.release("a", "worker_lost")
    again = lease_of(replay, "b")
    assert (again.attempt, again.greedy) == (2, (0,))
    play(replay, again)
    assert state(replay) == "ready"


def test_a_lease_for_the_others_has_no_greedy_member() -> None:
    replay = replay_of(group_size=3, greedy=True)
    assert replay.leases.deliver(lease_of(replay).episode(0), FINISHED, {0: 3}, {0: 3})
    replay.leases.release("a", "worker_lost")
    again = lease_of(replay)
    assert (again.members, again.greedy) == ((1, 2), ())


def test_the_penalty_of_a_greedy_failure_is_a_baseline() -> None:
    replay = replay_of(greedy=True)
    lease = lease_of(replay)
    assert replay.leases.deliver(lease.episode(0), failed("policy"), {0: 3}, {0: 3}, -1.0)
    assert replay.leases.deliver(lease.episode(1), FINISHED, {0: 3}, {0: 3}, 1.0)
    assert state(replay) == "ready"


@pytest.mark.parametrize(("rewards", "found"), [([1.0, 1.0, 1.0], "discarded"), ([0.0, 1.0, 1.0], "ready")])
def test_under_dynamic_sampling_a_baseline_that_differs_is_enough(rewards: list[float], found: str) -> None:
    replay = replay_of(group_size=3, greedy=True, dynamic_sampling=True)
    earn(replay, lease_of(replay), rewards)
    assert state(replay) == found


def test_a_group_of_which_only_the_greedy_member_is_young_enough_is_discarded() -> None:
    replay = replay_of(staleness=1, greedy=True)
    replay.table.counters.version = 2
    replay.mark_served(1)
    lease = lease_of(replay)
    replay.leases.deliver(lease.episode(0), FINISHED, {1: 3}, {1: 3}, 1.0)
    replay.leases.deliver(lease.episode(1), FINISHED, {0: 3}, {0: 3}, 0.0)
    assert replay.take(2) is None
    assert replay.table.ledgers.total.discarded == {"stale": 6}


async def test_learner_and_store_are_told_who_is_the_baseline(tmp_path: Path, address: str) -> None:
    path = tmp_path / "buffer.sqlite"
    config = Buffer(max_staleness=0, groups_per_batch=1, group_size=3)
    async with asyncio.timeout(SOON):
        async with serving(path, address, config, greedy=True), BufferClient(address, "w") as client:
            mark_served(client, 0)
            lease = await client.lease()
            assert lease.greedy == (0,)
            await deliver(client, lease, 0, 2)
            fresh = await client.fresh(0, 10)
            assert [t.episode for t in fresh] == ["0.0.2"]  # its log-probs are compared with the learner's
        async with serving(path, address, config, greedy=True), BufferClient(address, "w") as client:
            await deliver(client, lease, 1)
            batch = await client.take(0, SOON)
            assert batch.withheld == {"0.0.0": "baseline"}
            assert [t.member for t in batch.groups[0]] == [0, 1, 2]
            await client.commit(0)
            stats = await client.stats()
    assert stats.ledger == Ledger(generated=3 * SAMPLED, trained=2 * SAMPLED, withheld={"baseline": SAMPLED})
    assert ledger_report(path).total == stats.ledger
