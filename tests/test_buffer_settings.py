"""The rules of a buffer that change while it serves. Arbitrary sequences of changes are among the random runs of
`test_buffer_replay`; here are single ones, and the request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.buffer.admission import Admission, LiveRules, OnDeadline
from slipstream.buffer.client import BufferClient
from slipstream.buffer.client_registry import SUPERVISOR
from slipstream.buffer.replay import Replay
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import FINISHED
from slipstream.configs.schema import Buffer
from slipstream.errors import StateError
from slipstream.tests.episodes import trajectory
from slipstream.tests.fleets import buffer_service, mark_served
from slipstream.tests.replays import lease_of, play, replay_of, state, step
from slipstream.tests.runs import query

SOON = 60.0
"""Longer than anything here takes."""


def rules(staleness: int, per_batch: int = 1, members: int = 2, policy: OnDeadline = "withhold") -> LiveRules:
    return LiveRules(staleness, per_batch, members, policy)


def fill(replay: Replay) -> int:
    """Lease all that is granted; how many groups that is."""
    count = 0
    while replay.leases.grant("a", 0.0) is not None:
        count += 1
    return count


def trained_lags(replay: Replay) -> set[int]:
    """Of the tokens that carried loss, by the version that was made of them."""
    return {
        group.trained_at - 1 - version
        for group in replay.table.in_state("trained")
        for episode in group.in_account("trained")
        for version in episode.kept
        if group.trained_at is not None and episode.loss_from is not None and version >= episode.loss_from
    }


def test_a_higher_bound_grants_at_once_and_a_lower_one_grants_nothing_until_fewer_are_outstanding() -> None:
    replay = replay_of(staleness=0, per_batch=2)
    assert fill(replay) == 2
    assert replay.configure(rules(2, per_batch=2)) == 0
    assert fill(replay) == 4
    replay.configure(rules(2, per_batch=1))  # three may be outstanding
    assert replay.leases.outstanding() == [6]
    for group in range(4):
        play(replay, replay.leases._lease(replay.table.groups[group]), {replay.version: 3})
        step(replay)
        replay.mark_served(replay.version)
        assert fill(replay) == (1 if group == 3 else 0)


def test_from_four_to_none_leaves_no_old_token_in_the_next_batch() -> None:
    replay = replay_of(staleness=4, per_batch=1)
    leases = [lease_of(replay) for _ in range(5)]
    play(replay, leases[0])
    step(replay)
    replay.mark_served(1)
    for lease in leases[1:]:
        play(replay, lease, {0: 3})
    assert replay.configure(rules(0)) == 1
    assert replay.take(1) is None  # all that is there is of version 0
    assert {state(replay, group) for group in range(1, 5)} == {"discarded"}
    assert fill(replay) == 1
    play(replay, replay.leases._lease(replay.table.groups[5]))
    step(replay)
    assert trained_lags(replay) == {0}


def test_a_batch_that_is_taken_keeps_its_bound() -> None:
    replay = replay_of(staleness=1, per_batch=1)
    old, new = lease_of(replay), lease_of(replay)
    play(replay, old)
    step(replay)
    replay.mark_served(1)
    play(replay, new, {0: 2, 1: 1})
    assert replay.take(1) is not None
    assert replay.configure(rules(0)) == 2
    table = replay.table
    again = Replay(replay.admission, replay.config, table.counters.copy(), table.groups.values())  # it restarted
    for one in (replay, again):
        assert one.taken_under.max_staleness == 1
    replay.commit(1)
    assert trained_lags(replay) == {0, 1}
    assert replay.taken_under.max_staleness == 0
    assert replay.table.counters.taken is None


def test_a_group_that_has_enough_members_now_is_complete() -> None:
    replay = replay_of(group_size=3)
    lease = lease_of(replay)
    for member in (0, 1):
        replay.leases.deliver(lease.episode(member), FINISHED, {0: 1}, {0: 1})
    assert state(replay) == "leased"
    replay.configure(rules(1, members=2))
    assert state(replay) == "ready"


@given(
    changes=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 3), st.sampled_from(["withhold", "wait", "drop"])), max_size=12
    ),
    slow=st.integers(0, 2),
)
def test_no_sequence_of_changes_stops_a_run(changes: list[tuple[int, int, OnDeadline]], slow: int) -> None:
    """After each change the learner steps again, whatever runs; `slow` groups are delivered late and get old."""
    replay = replay_of(staleness=2, per_batch=2)
    late = []
    for staleness, per_batch, policy in [*changes, (0, 1, "wait"), (4, 3, "withhold")]:
        replay.configure(rules(staleness, per_batch, policy=policy))
        for _ in range(4):
            while (lease := replay.leases.grant("a", 0.0)) is not None:
                late.append(lease)
            if replay.take(replay.version) is not None:
                break
            for lease in late[slow:] if policy != "wait" and len(late) > slow + per_batch else late:
                play(replay, lease, {lease.version: 1, replay.version: 1})
                late = [other for other in late if other is not lease]
        step(replay)
        replay.mark_served(replay.version)
        newest = replay.table.trained_in(above=replay.version - 1)
        oldest = [e.loss_from for g in newest for e in g.in_account("trained") if e.loss_from is not None]
        assert oldest
        assert min(oldest) >= replay.version - 1 - staleness
        assert replay.table.ledgers.gap() == ""


@contextlib.asynccontextmanager
async def serving(path: Path, address: str, staleness: int, per_batch: int) -> AsyncIterator[None]:
    """A service that is cut off at the end."""
    config, ready = (
        Buffer(max_staleness=staleness, groups_per_batch=per_batch, group_size=2),
        asyncio.Event(),
    )
    task = asyncio.create_task(buffer_service(config, path, address).serve(ready.set))
    await asyncio.wait_for(ready.wait(), SOON)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def play_one(worker: BufferClient) -> None:
    lease = await worker.lease()
    for member in lease.members:
        name, version = lease.episode(member), lease.version
        sent = trajectory(name, version=version)
        await worker.deliver(name, {version: sum(s.end - s.start for s in sent.version_spans)}, FINISHED, (sent,))


async def test_the_request_is_durable_and_only_the_supervisors(tmp_path: Path, address: str) -> None:
    path = tmp_path / "buffer.sqlite"
    async with (
        serving(path, address, staleness=1, per_batch=1),
        BufferClient(address, "learner-0") as learner,
        BufferClient(address, "worker-0") as worker,
        BufferClient(address, SUPERVISOR) as supervisor,
    ):
        mark_served(learner, await learner.recover(0))
        with pytest.raises(StateError, match="learner-0 is not the supervisor"):
            await learner.configure(9, rules(5))
        await play_one(worker)
        taken = await learner.take_plan(0, SOON)
        assert taken.oldest_version == 0
        assert await supervisor.configure(2, rules(0, per_batch=2)) == 1
        assert await supervisor.configure(2, rules(0, per_batch=2)) == 1  # a reply was lost
        assert await supervisor.configure(1, rules(3, per_batch=3)) == 1  # an older attempt that comes late
    with contextlib.closing(Store(path)) as store:
        assert store.load()[0].taken == Admission(1, 1)
    async with (
        serving(path, address, staleness=0, per_batch=2),
        BufferClient(address, "learner-0") as learner,
        BufferClient(address, "worker-0") as worker,
    ):
        mark_served(learner, 0)
        await learner.commit(0)
        mark_served(learner, 1)
        for _ in range(2):
            await play_one(worker)
        await learner.take_plan(1, SOON)
        await learner.commit(1)
    found = query(path.parent, "SELECT version, groups, max_staleness, groups_per_batch FROM commits")
    assert found == [(1, 1, 1, 1), (2, 2, 0, 2)]
