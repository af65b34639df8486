"""Dynamic sampling in the buffer: groups of equal rewards leave, others take their places, and nothing is lost to the accounts.

That the rule holds wherever a run is, and through crashes, is in `test_buffer_replay` and `test_buffer_crashes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from slipstream.buffer.client import BufferClient
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.messages import Lease
from slipstream.buffer.replay import Replay
from slipstream.buffer.trajectory import FINISHED, TRUNCATED, Outcome
from slipstream.configs import load
from slipstream.configs.schema import Buffer
from slipstream.errors import ConfigError
from slipstream.tests.episodes import SAMPLED, trajectory
from slipstream.tests.fleets import mark_served
from slipstream.tests.replays import fail, failed, lease_of, replay_of, state, step
from slipstream.tests.test_buffer_service import SOON, serving


def earn(replay: Replay, lease: Lease, rewards: Sequence[float], outcome: Outcome = FINISHED) -> None:
    """The first members of a lease end, three tokens each."""
    for member, reward in zip(lease.members, rewards, strict=False):
        replay.leases.deliver(lease.episode(member), outcome, {lease.version: 3}, {lease.version: 3}, reward)


@pytest.mark.parametrize("reward", [0.0, 1.0, -0.5])
def test_a_group_of_equal_rewards_is_discarded_and_another_takes_its_place(reward: float) -> None:
    replay = replay_of(staleness=0, dynamic_sampling=True)
    earn(replay, lease_of(replay), [reward, reward])
    assert state(replay) == "discarded"
    assert replay.table.ledgers.total == Ledger(generated=6, discarded={"equal_rewards": 6})
    assert replay.table.counters.refilled == 1
    assert replay.leases.outstanding() == [0]
    assert replay.take(0) is None
    lease = lease_of(replay)
    assert (lease.group_id, lease.task) == (1, 1)
    earn(replay, lease, [0.0, reward + 2])
    step(replay)
    assert replay.table.ledgers.total == Ledger(generated=12, trained=6, discarded={"equal_rewards": 6})


def test_without_the_rule_such_a_group_is_trained_on() -> None:
    replay = replay_of()
    earn(replay, lease_of(replay), [1.0, 1.0])
    step(replay)
    assert replay.table.counters.refilled == 0


def test_one_that_differs_is_enough_and_an_episode_that_was_cut_off_is_one() -> None:
    replay = replay_of(group_size=3, dynamic_sampling=True)
    lease = lease_of(replay)
    earn(replay, lease, [1.0, 1.0])
    assert state(replay) == "leased"
    assert replay.leases.deliver(lease.episode(2), TRUNCATED, {0: 3}, {0: 3}, 0.0)
    assert state(replay) == "ready"


def test_the_penalty_of_a_failure_is_a_reward_and_a_dropped_failure_has_none() -> None:
    replay = replay_of(group_size=3, dynamic_sampling=True)
    lease = lease_of(replay)
    earn(replay, lease, [0.0, 0.0])
    assert replay.leases.deliver(lease.episode(2), failed("tool"), {0: 3}, {0: 3}, -1.0)
    assert state(replay) == "ready"
    lease = lease_of(replay)
    earn(replay, lease, [0.0, 0.0])
    fail(replay, lease.episode(2), tokens=3)
    assert state(replay, 1) == "discarded"
    assert replay.table.ledgers.total == Ledger(generated=18, ready=9, discarded={"equal_rewards": 6, "failed_tool": 3})


def test_too_few_members_are_no_group_of_equal_rewards() -> None:
    replay = replay_of(dynamic_sampling=True)
    lease = lease_of(replay)
    fail(replay, lease.episode(0))
    earn(replay, lease, [0.0, 0.0])
    assert replay.table.ledgers.total.discarded == {"too_few_members": 3}
    assert replay.table.counters.refilled == 0


def test_slow_members_are_waited_for_while_the_others_earned_the_same() -> None:
    replay = replay_of(group_size=4, min_members=2, dynamic_sampling=True)
    lease = lease_of(replay)
    earn(replay, lease, [1.0, 1.0])
    assert state(replay) == "leased"
    assert replay.leases.deliver(lease.episode(2), FINISHED, {0: 3}, {0: 3}, 0.0)
    assert state(replay) == "ready"
    assert not any(e.withheld for e in replay.table.groups[0].episodes.values())  # the one that differs teaches
    assert replay.leases.deliver(lease.episode(3), FINISHED, {0: 3}, {0: 3}, 1.0)
    assert [e.id for e in replay.table.groups[0].episodes.values() if e.withheld] == ["0.0.3"]
    lease = lease_of(replay)
    earn(replay, lease, [1.0, 1.0, 1.0, 1.0])
    assert state(replay, 1) == "discarded"


def test_a_slow_member_whose_worker_is_lost_is_played_again() -> None:
    replay = replay_of(group_size=3, min_members=2, dynamic_sampling=True)
    earn(replay, lease_of(replay), [1.0, 1.0])
    replay.leases.release("a", "worker_lost")
    again = lease_of(replay, "b")
    assert (again.group_id, again.attempt, again.members) == (0, 1, (2,))
    earn(replay, again, [0.0])
    assert state(replay) == "ready"


def test_every_environment_refills_its_own_part_of_a_batch() -> None:
    replay = replay_of(staleness=0, per_batch=2, shares=(1.0, 1.0), dynamic_sampling=True)
    hopeless, other = lease_of(replay), lease_of(replay)
    assert (hopeless.env, other.env) == (0, 1)
    earn(replay, other, [0.0, 1.0])
    for task in range(1, 4):
        earn(replay, hopeless, [0.0, 0.0])
        assert replay.take(0) is None
        hopeless = lease_of(replay)
        assert (hopeless.env, hopeless.task) == (0, task)
        assert replay.leases.grant("a", 0.0) is None
    earn(replay, hopeless, [0.0, 1.0])
    assert [g.env for g in replay.take(0) or []] == [1, 0]


async def test_rewards_are_remembered_through_a_crash_and_refills_are_counted(tmp_path: Path, address: str) -> None:
    path = tmp_path / "buffer.sqlite"
    config = Buffer(max_staleness=0, groups_per_batch=1, group_size=2, dynamic_sampling=True)

    async def deliver(client: BufferClient, group: int, member: int, reward: float) -> None:
        episode = f"{group}.0.{member}"
        sent = msgspec.structs.replace(trajectory(episode), reward=reward)
        await client.deliver(episode, {0: SAMPLED}, FINISHED, (sent,))

    async with asyncio.timeout(SOON):
        async with serving(path, address, config), BufferClient(address, "w") as client:
            mark_served(client, 0)
            await client.lease()
            await deliver(client, 0, 0, 0.25)
        async with serving(path, address, config), BufferClient(address, "w") as client:
            await deliver(client, 0, 1, 0.25)
            stats = await client.stats()
            assert (stats.refilled_groups, stats.ready_groups) == (1, 0)
            assert stats.ledger == Ledger(generated=6, discarded={"equal_rewards": 6})
            await client.lease()
            await deliver(client, 1, 0, 0.25)
        async with serving(path, address, config), BufferClient(address, "w") as client:
            await deliver(client, 1, 1, 0.5)
            stats = await client.stats()
            assert (stats.refilled_groups, stats.ready_groups) == (1, 1)
            assert [t.reward for t in (await client.take(0, SOON)).groups[0]] == [0.25, 0.5]
    accounts = ledger_report(path)
    assert accounts.balances
    assert accounts.total == stats.ledger


def test_advantages_that_learn_from_equal_rewards_are_refused_with_it() -> None:
    for kind in ("reinforce_pp", "turn_level"):
        with pytest.raises(ConfigError, match=rf"kind={kind} learns.*grpo, rloo, reinforce_pp_baseline, opo"):
            load("quickstart", ["buffer.dynamic_sampling=true", f"learner.algorithm.advantage.kind={kind}"])
    for kind in ("grpo", "rloo", "reinforce_pp_baseline", "opo"):
        load("quickstart", ["buffer.dynamic_sampling=true", f"learner.algorithm.advantage.kind={kind}"])


def test_dpo_goes_with_it_and_no_imitation_does() -> None:
    assert load("dpo", ["buffer.dynamic_sampling=true"]).buffer.dynamic_sampling
    imitation = "learner.algorithm.terms.imitation=0.1"
    for preset in ("dpo", "quickstart", "dapo"):
        with pytest.raises(
            ConfigError, match=r"groups that teach: learner.algorithm.terms.imitation=0.1 learns"
        ) as caught:
            load(preset, ["buffer.dynamic_sampling=true", imitation])
        assert "kind=none learns" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"kind=none learns from groups of equal rewards"):
        load("quickstart", ["buffer.dynamic_sampling=true", imitation, "learner.algorithm.advantage.kind=none"])
