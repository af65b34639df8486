"""A buffer of several processes does what one does: over real sockets and files, while any of them and the learner die anywhere.

Invariants:
- Every group is trained on once, by the ledger and by the commits that still count, however often what was restarted.
- A version that was made is made of parts of all shards, under one bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from slipstream.buffer import client as client_module
from slipstream.buffer import messages as m
from slipstream.buffer.admission import LiveRules
from slipstream.buffer.client import BufferClient
from slipstream.buffer.history import read_groups, read_times
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.messages import BatchPlan, Lease
from slipstream.buffer.run_stores import connect_run, shard_path
from slipstream.buffer.service import BufferService
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import Trajectory
from slipstream.configs import load
from slipstream.configs.schema import Buffer
from slipstream.errors import ConfigError, RequestRefused, StateError
from slipstream.tests.episodes import SAMPLED
from slipstream.tests.fleets import mark_served
from slipstream.tests.shards import RunningBuffer, play

SOON = 60.0  # longer than anything here takes
TWO = Buffer(max_staleness=1, groups_per_batch=3, group_size=2, shards=2)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RESEND_S", 0.1)
    monkeypatch.setattr(client_module, "LEASE_S", 0.05)


@contextlib.asynccontextmanager
async def working(buffer: RunningBuffer, *names: str, room: int = 2) -> AsyncIterator[list[Lease]]:
    """Workers that play what they are leased; the leases."""
    leases = list[Lease]()

    async def work(name: str) -> None:
        async with buffer.client(name) as client:
            await client.register()
            while True:
                granted = await client.leases(room)
                assert len(granted) <= room
                leases.extend(granted)
                await asyncio.gather(*(play(client, lease) for lease in granted))

    tasks = [asyncio.create_task(work(name)) for name in names]
    try:
        yield leases
        assert not [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def learn(client: BufferClient, version: int, steps: int) -> list[BatchPlan[Trajectory]]:
    batches = list[BatchPlan[Trajectory]]()
    for _ in range(steps):
        batches.append(await client.take(version, SOON))
        await client.commit(version)
        version += 1
        mark_served(client, version)
    return batches


def groups_of(batch: BatchPlan[Any]) -> list[int]:
    return [group[0].group_id for group in batch.groups]


def check_accounts(buffer: RunningBuffer, trained: int) -> None:
    """Every group in a version that counts is in it once, and `trained` are in all; the ledgers balance."""
    report = ledger_report(buffer.path)
    assert report.balances
    assert report.total.trained + sum(report.total.withheld.values()) == SAMPLED * 2 * trained
    counted = dict(buffer.sql("SELECT version, groups FROM commits WHERE NOT rolled_back"))
    found = dict(buffer.sql("SELECT trained_at, count(*) FROM groups WHERE trained_at IS NOT NULL GROUP BY 1"))
    assert counted == found
    assert sum(found.values()) == trained


# --- the ordinary course ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shards", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
)
async def test_a_batch_has_a_part_of_every_shard(tmp_path: Path, shards: int) -> None:
    config = Buffer(max_staleness=2, groups_per_batch=5, group_size=2, shards=shards)
    async with RunningBuffer(tmp_path, config) as buffer, buffer.client("learner-0") as learner:
        async with asyncio.timeout(SOON), working(buffer, "worker-0", "worker-1", "worker-2") as leases:
            version = await learner.recover(0)
            mark_served(learner, version)
            batches = await learn(learner, version, 6)
            stats = await learner.stats()
        assert [len(batch.groups) for batch in batches] == [5] * 6
        trained = [group for batch in batches for group in groups_of(batch)]
        assert len(set(trained)) == len(trained) == 30
        for batch in batches:
            assert groups_of(batch) == sorted(groups_of(batch))
            assert {group % shards for group in groups_of(batch)} == set(range(shards))
            assert all(len(one.token_ids) == SAMPLED + 1 for group in batch.groups for one in group)
        assert stats.version == 6
        assert stats.ledger.balances
        assert stats.ledger.trained == 30 * 2 * SAMPLED
        assert stats.slot_s > 0
        assert len({lease.task for lease in leases}) == len({lease.group_id for lease in leases}) == len(leases)
        check_accounts(buffer, 30)
        granted = {group for rows in buffer.by_shard("SELECT id FROM groups").values() for (group,) in rows}
        assert {lease.group_id for lease in leases} <= granted  # the last replies came too late to be heard
        for shard, rows in enumerate(buffer.by_shard("SELECT id FROM groups").values()):
            assert {group % shards for (group,) in rows} == {shard}
        ended = (
            "SELECT count(DISTINCT group_id) FROM trajectories JOIN groups g ON g.id = group_id WHERE state <> 'leased'"
        )
        assert buffer.sql(ended) == [(len(read_groups(buffer.path, 0, 1000)),)]
        assert set(read_times(buffer.path, 0, trained).complete) == set(range(1, 7))


async def test_without_staleness_nothing_is_in_flight_between_two_versions(tmp_path: Path) -> None:
    config = Buffer(max_staleness=0, groups_per_batch=4, group_size=2, shards=2)
    async with RunningBuffer(tmp_path, config) as buffer, buffer.client("learner-0") as learner:
        async with asyncio.timeout(SOON), working(buffer, "worker-0") as leases:
            mark_served(learner, await learner.recover(0))
            for version in range(3):
                batch = await learner.take(version, SOON)
                assert {lease.version for lease in leases[4 * version :]} == {version}
                assert len(leases) == 4 * (version + 1)
                assert sorted(lease.group_id for lease in leases[4 * version :]) == groups_of(batch)
                await learner.commit(version)
                mark_served(learner, version + 1)
        check_accounts(buffer, 12)


async def test_every_rank_takes_the_same_batch_and_reads_its_rows_from_the_files_of_the_shards(tmp_path: Path) -> None:
    async with (
        RunningBuffer(tmp_path, TWO) as buffer,
        buffer.client("learner-0") as first,
        buffer.client("learner-1") as second,
        asyncio.timeout(SOON),
        working(buffer, "worker-0"),
    ):
        mark_served(first, await first.recover(0))
        plans = await asyncio.gather(first.take_plan(0, SOON), second.take_plan(0, SOON))
        assert plans[0].groups == plans[1].groups
        rows = [row for group in reversed(plans[1].groups) for row in group]
        for number in (1, 2):
            await buffer.restart(number)  # the batch is of the file then
        read = await second.read_rows(rows)
        assert [one.id for one in read] == [row.id for row in rows]
        assert {row.group_id % 2 for row in rows} == {0, 1}
        assert (await second.take_plan(0, SOON)).groups == plans[0].groups
        fresh = await first.fresh(0, 3)
        assert len(fresh) <= 3
        assert [one.group_id for one in fresh] == sorted((one.group_id for one in fresh), reverse=True)


async def test_a_worker_with_room_for_one_group_finds_the_shard_that_has_one(tmp_path: Path) -> None:
    config = Buffer(max_staleness=0, groups_per_batch=3, group_size=2, shards=3)
    async with (
        RunningBuffer(tmp_path, config) as buffer,
        buffer.client("learner-0") as learner,
        buffer.client("worker-0") as worker,
        asyncio.timeout(SOON),
    ):
        mark_served(learner, await learner.recover(0))
        await worker.register()
        leases = [(await worker.leases(1))[0] for _ in range(3)]
        assert sorted(lease.group_id for lease in leases) == [0, 1, 2]
        waiting = asyncio.create_task(worker.leases(2))
        for lease in leases:
            await play(worker, lease)
        await learner.take(0, SOON)
        await learner.commit(0)
        assert not waiting.done()
        mark_served(learner, 1)
        assert 1 <= len(await waiting) <= 2


async def test_a_group_that_was_asked_for_is_read_without_asking_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "LEASE_S", SOON)
    async with (
        RunningBuffer(tmp_path, TWO) as buffer,
        buffer.client("learner-0") as learner,
        buffer.client("worker-0") as worker,
        asyncio.timeout(SOON),
    ):
        mark_served(buffer.addresses[1], await learner.recover(0))
        await worker.register()
        assert await worker.leases(0) == ()
        first = await worker.leases(2)  # one of each shard, of which the second has none yet
        assert [lease.group_id % 2 for lease in first] == [0]
        assert await worker.leases(0) == ()
        mark_served(buffer.addresses[2], 0)
        await asyncio.wait(worker._asked)
        assert worker.answered
        second = await worker.leases(0)
        assert [lease.group_id % 2 for lease in second] == [1]
        assert not worker.answered


async def test_a_refusal_of_one_shard_does_not_wait_for_the_others(tmp_path: Path) -> None:
    async with (
        RunningBuffer(tmp_path, TWO) as buffer,
        buffer.client("learner-0") as learner,
        BufferClient(buffer.addresses[2], "learner-0") as ahead,
        asyncio.timeout(SOON),
    ):
        mark_served(learner, await learner.recover(0))
        await ahead._request(m.Recover(0, 5), m.RecoverReply)
        with pytest.raises(StateError, match="a batch was asked for version 0, the buffer is at version 5"):
            await learner.take(0, 10 * SOON)  # nobody plays: the other shard has none


async def test_episodes_go_to_their_shard_alone(tmp_path: Path) -> None:
    async with (
        RunningBuffer(tmp_path, TWO) as buffer,
        buffer.client("learner-0") as learner,
        buffer.client("worker-0") as worker,
        asyncio.timeout(SOON),
    ):
        mark_served(learner, await learner.recover(0))
        await worker.register()
        leases = list[Lease]()
        while not (odd := [lease for lease in leases if lease.group_id % 2]):
            leases += await worker.leases(2)
        lease = odd[0]
        with pytest.raises(RequestRefused, match="is of another shard of the buffer"):
            await worker.progress({lease.episode(0): {0: 1}}, 0.0, 0.0, shard=0)
        await worker.deregister(1)
        assert {group % 2 for (group,) in buffer.sql("SELECT id FROM groups WHERE state = 'leased'")} <= {0}
        await worker.deregister()
        lost = "SELECT count(*) FROM episodes WHERE reason = 'worker_stopped'"
        assert buffer.sql(lost)[0][0] >= 2 * len(leases)
        assert buffer.sql("SELECT count(*) FROM groups WHERE state <> 'open'") == [(0,)]


async def test_rules_change_on_all_shards(tmp_path: Path) -> None:
    config = Buffer(max_staleness=2, groups_per_batch=4, group_size=2, shards=2)
    async with (
        RunningBuffer(tmp_path, config) as buffer,
        buffer.client("learner-0") as learner,
        buffer.client("supervisor") as supervisor,
        asyncio.timeout(SOON),
        working(buffer, "worker-0"),
    ):
        mark_served(learner, await learner.recover(0))
        await learn(learner, 0, 2)
        assert await supervisor.configure(2, LiveRules(0, 6, 2, "withhold")) == 2
        batch = await learner.take(2, SOON)
        assert (len(batch.groups), batch.oldest_version) == (6, 2)
        assert await supervisor.configure(3, LiveRules(1, 2, 2, "withhold")) == 3
        await learner.commit(2)
        mark_served(learner, 3)
        assert len((await learn(learner, 3, 1))[0].groups) == 2
        bounds = "SELECT version, groups, max_staleness, groups_per_batch FROM commits"
        assert buffer.sql(bounds) == [(1, 4, 2, 4), (2, 4, 2, 4), (3, 6, 0, 6), (4, 2, 1, 2)]


async def test_the_strictest_bound_of_a_part_holds_for_all(tmp_path: Path) -> None:
    """One shard takes its part, then the bound falls, then the other takes its own."""
    config = Buffer(max_staleness=2, groups_per_batch=2, group_size=2, shards=2)
    async with (
        RunningBuffer(tmp_path, config) as buffer,
        buffer.client("learner-0") as learner,
        buffer.client("supervisor") as supervisor,
        asyncio.timeout(SOON),
    ):
        mark_served(learner, await learner.recover(0))
        async with working(buffer, "worker-0"):
            await learn(learner, 0, 3)  # what is ready now is of versions 0 to 3
            await learner.take_plan(3, SOON)
            await learner.commit(3)
            mark_served(learner, 4)
            async with BufferClient(buffer.addresses[1], "learner-1") as first:
                assert (await first.take_plan(4, SOON)).oldest_version == 2
            await supervisor.configure(2, LiveRules(0, 2, 2, "withhold"))
            batch = await learner.take(4, SOON)
            assert batch.oldest_version == 4
            await learner.commit(4)
        kept = "SELECT min(loss_from) FROM episodes JOIN groups g ON g.id = group_id WHERE trained_at = 5"
        assert buffer.sql(kept) == [(4,)]
        assert ledger_report(buffer.path).balances


async def test_groups_are_discarded_and_set_aside_where_they_are(tmp_path: Path) -> None:
    config = Buffer(max_staleness=2, groups_per_batch=4, group_size=2, shards=2)
    async with (
        RunningBuffer(tmp_path, config) as buffer,
        buffer.client("learner-0") as learner,
        asyncio.timeout(SOON),
        working(buffer, "worker-0"),
    ):
        mark_served(learner, await learner.recover(0))
        first = groups_of(await learner.take_plan(0, SOON))
        await learner.discard_batch(0, first, "program")
        await learner.discard_batch(0, first, "program")
        second = groups_of(await learner.take_plan(0, SOON))
        assert not set(first) & set(second)
        assert await learner.set_aside(0, second[:1], "it is empty") == tuple(second[:1])
        third = groups_of(await learner.take_plan(0, SOON))
        assert set(second) - set(third) == {second[0]}
        assert await learner.step_failed(0, "an IndexError") == ()
        async with buffer.client("learner-0") as again:
            assert await again.recover(0) == 0
            fourth = groups_of(await again.take_plan(0, SOON))
            assert sorted(await again.step_failed(0, "an IndexError")) == [g for g in fourth if g in third]
        stats = await learner.stats()
        assert stats.ledger.discarded["unusable"] == 2 * SAMPLED * (1 + len(set(fourth) & set(third)))
        assert stats.ledger.balances


# --- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "victim", [pytest.param(0, marks=pytest.mark.full), 1, pytest.param(2, marks=pytest.mark.full)]
)
async def test_a_process_that_dies_again_and_again_goes_unnoticed(tmp_path: Path, victim: int) -> None:
    async with RunningBuffer(tmp_path, TWO) as buffer, buffer.client("learner-0") as learner:
        async with asyncio.timeout(SOON), working(buffer, "worker-0", "worker-1"):
            mark_served(learner, await learner.recover(0))
            learning = asyncio.create_task(learn(learner, 0, 12))
            for _ in range(8):
                await asyncio.sleep(0.05)
                await buffer.restart(victim)
            batches = await learning
        trained = [group for batch in batches for group in groups_of(batch)]
        assert len(set(trained)) == len(trained) == 36
        check_accounts(buffer, 36)


class Killed(Exception):
    """The learner died here."""


class MortalClient(BufferClient):
    """Dies at its request number `dies_at`: before it is sent, or when it is answered and nobody hears the answer."""

    dies_at, answered, requests = 0, False, 0

    async def _request(self, *arguments: Any, **options: Any) -> Any:
        self.requests += 1
        dies = self.requests == self.dies_at
        if dies and not self.answered:
            raise Killed
        reply = await super()._request(*arguments, **options)
        if dies:
            raise Killed
        return reply


async def live(learner: MortalClient, saved: list[int], began: list[int]) -> None:
    """A learner's life from the last checkpoint: three steps, a checkpoint after the second."""
    version = await learner.recover(saved[-1])
    began.append(version)
    mark_served(learner, version)
    for step in range(3):
        batch = await learner.take(version, SOON)
        if step == 0:
            await learner.discard_batch(version, groups_of(batch), "program")
            await learner.take(version, SOON)
        await learner.commit(version)
        version += 1
        mark_served(learner, version)
        if step == 1:
            saved.append(version)  # it is on the disk
            await learner.checkpointed(version)


REQUESTS = 48
"""Of a whole life with two shards, at most."""


@pytest.mark.full
@pytest.mark.parametrize("answered", [False, True])
async def test_a_learner_killed_at_any_request_trains_on_nothing_twice(tmp_path: Path, answered: bool) -> None:
    """Each life ends one request later than the one before, and one of the buffer's processes dies with it. The next begins from
    the checkpoint."""
    saved, began, lives = [0], list[int](), 0
    async with RunningBuffer(tmp_path, TWO) as buffer, asyncio.timeout(4 * SOON), working(buffer, "worker-0", room=4):
        for number in range(1, REQUESTS + 1):
            async with buffer.client("learner-0", MortalClient) as learner:
                assert isinstance(learner, MortalClient)
                learner.dies_at, learner.answered = number, answered
                with contextlib.suppress(Killed):
                    await live(learner, saved, began)
                lives += learner.requests >= number
            await buffer.restart(number % 3)
        async with buffer.client("learner-0") as learner:
            version = await learner.recover(saved[-1])
            mark_served(learner, version)
            await learn(learner, version, 2)
            await learner.checkpointed(version + 2)
        assert lives > 20
        assert began == sorted(began)
        kept = buffer.sql("SELECT count(*) FROM commits WHERE NOT rolled_back")[0][0]
        check_accounts(buffer, 3 * kept)
        versions = buffer.by_shard("SELECT json_extract(value, '$.version') FROM counters")
        assert set(map(tuple, versions.values())) == {((version + 2,),)}


# --- what is refused -----------------------------------------------------------------------------------------------------


async def test_a_file_of_another_process_of_the_buffer_is_refused(tmp_path: Path) -> None:
    async with RunningBuffer(tmp_path, TWO) as buffer, buffer.client("learner-0") as learner:
        await learner.recover(0)
    for shard, config in ((2, TWO), (0, Buffer())):
        with pytest.raises(StateError, match=r"process 1 of a buffer with buffer\.shards=2"):
            BufferService(config, tmp_path / "buffer-1.sqlite", "tcp://127.0.0.1:*", shard=shard)


def lose(folder: Path, files: str) -> None:
    for path in folder.glob(files):
        path.unlink()


@pytest.mark.full
async def test_a_shard_that_lost_its_file_is_named(tmp_path: Path) -> None:
    async with RunningBuffer(tmp_path, TWO) as buffer, buffer.client("learner-0") as learner:
        async with asyncio.timeout(SOON), working(buffer, "worker-0"):
            mark_served(learner, await learner.recover(0))
            await learn(learner, 0, 2)
        await buffer.cut(2)
        shutil.rmtree(tmp_path / "buffer-2.arrays")
        lose(tmp_path, "buffer-2.sqlite*")
        await buffer.start(2)
        with pytest.raises(StateError, match="the checkpoint is of version 2, the buffer is at version 0"):
            await learner.recover(2)


def test_a_shard_needs_a_group_of_every_batch(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"buffer.groups_per_batch=2 is less than buffer.shards=3"):
        load("quickstart", ["buffer.groups_per_batch=2", "buffer.shards=3"])
    with pytest.raises(ConfigError, match=r"buffer\.shards"):
        load("quickstart", ["buffer.shards=9"])


def test_a_commit_that_no_shard_has_yet_is_of_no_groups(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    for name in ("buffer", "buffer-1", "buffer-2"):
        Store(tmp_path / f"{name}.sqlite").close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(
            "INSERT INTO commits (version, time, groups, max_staleness, groups_per_batch) VALUES (1, 0.0, 0, 1, 3)"
        )
    with contextlib.closing(connect_run(path, "ro")) as db:
        assert db.execute("SELECT version, groups FROM commits").fetchall() == [(1, 0)]


def test_a_group_is_found_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    assert shard_path(path, 7) == path
    for number in (1, 2, 10):  # by number, not by name
        Store(tmp_path / f"buffer-{number}.sqlite").close()
    assert [shard_path(path, group).stem for group in (0, 1, 2, 3)] == ["buffer-1", "buffer-2", "buffer-10", "buffer-1"]
