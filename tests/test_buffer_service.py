"""The buffer's process over real sockets and a real file: leases, batches, refusals, silence, death and restart."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from slipstream.buffer import client as client_module
from slipstream.buffer import messages as m
from slipstream.buffer import service as service_module
from slipstream.buffer.client import BufferClient
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.messages import BatchPlan, Lease
from slipstream.buffer.segments import segments_path
from slipstream.buffer.service import LEASE_S
from slipstream.buffer.store import Store
from slipstream.buffer.trajectory import FINISHED, Outcome, Trajectory
from slipstream.common.tasks import EXIT_JOIN_S
from slipstream.configs import load
from slipstream.configs.schema import Buffer
from slipstream.errors import DeadlineExceeded, StateError, StoreError
from slipstream.rpc import wire
from slipstream.tests.episodes import SAMPLED, row_of, trajectory
from slipstream.tests.fleets import buffer_service, mark_served, publishing_fleet
from slipstream.tests.stores import segments, sql

SOON = 60.0
"""Longer than anything here takes; a test that waits for it has found a hang."""

PATIENT = Buffer(max_staleness=1, groups_per_batch=1, group_size=2)
"""No lease expires within a test."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "buffer.sqlite"


@pytest.fixture(autouse=True)
def _resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RESEND_S", 0.1)


class Clock:
    """`time` of the service, in which `later` seconds more have passed: a lease ends when the test says so."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.later = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.later


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("service", "request_handler"):
        monkeypatch.setattr(f"slipstream.buffer.{module}.time", clock)
    return clock


@contextlib.asynccontextmanager
async def serving(
    path: Path,
    address: str,
    config: Buffer = PATIENT,
    *,
    shares: tuple[float, ...] = (1.0,),
    retries: Mapping[str, int] | None = None,
    greedy: bool = False,
) -> AsyncIterator[asyncio.Task[None]]:
    """A service in this process; it is cut off at the end, as by a kill between two rounds."""
    ready = asyncio.Event()
    service = buffer_service(config, path, address, shares=shares, retries=retries, greedy=greedy)
    task = asyncio.create_task(service.serve(ready.set))
    await asyncio.wait([task, asyncio.ensure_future(ready.wait())], timeout=SOON, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StoreError):
            await task


def episodes(lease: Lease) -> list[str]:
    return [lease.episode(member) for member in lease.members]


async def play(client: BufferClient, lease: Lease) -> None:
    for episode in episodes(lease):
        await client.progress({episode: {lease.version: 1}}, 2.0, 0.5)
        await client.deliver(episode, {lease.version: SAMPLED}, FINISHED, (trajectory(episode, version=lease.version),))


async def work(client: BufferClient, delivered: Callable[[], None] = lambda: None) -> None:
    await client.register()
    while True:
        await play(client, await client.lease())
        delivered()


async def learn(client: BufferClient, steps: int) -> list[BatchPlan[Trajectory]]:
    version = await client.recover(0)
    mark_served(client, version)
    batches = []
    for _ in range(steps):
        batches.append(await client.take(version, SOON))
        await client.commit(version)
        version += 1
        mark_served(client, version)
    return batches


def trained_ids(batches: list[BatchPlan[Trajectory]]) -> list[str]:
    return [t.id for batch in batches for group in batch.groups for t in group]


# --- the ordinary course ---------------------------------------------------------------------------------------------


async def test_several_workers_feed_one_learner(path: Path, address: str) -> None:
    config = Buffer(max_staleness=2, groups_per_batch=2, group_size=3)
    async with serving(path, address, config), contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        learner = await enter(BufferClient(address, "learner"))
        players = [await enter(BufferClient(address, f"worker-{i}")) for i in range(3)]
        async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(work(player)) for player in players]
            batches = await learn(learner, 6)
            for task in working:
                task.cancel()
        for player in players:
            await player.deregister()  # nothing of theirs is on its way any more
        assert [batch.version for batch in batches] == list(range(6))
        assert [batch.oldest_version for batch in batches] == [0, 0, 0, 1, 2, 3]
        ids = trained_ids(batches)
        assert len(ids) == len(set(ids)) == 6 * 2 * 3
        for batch in batches:
            assert all(s.version >= batch.oldest_version for g in batch.groups for t in g for s in t.version_spans)
            assert all([t.member for t in group] == [0, 1, 2] for group in batch.groups)
            assert batch.stats.ledger.balances
        stats = await learner.stats()
        assert stats.version == 6
        assert stats.ledger.balances
        assert stats.ledger.trained + sum(stats.ledger.withheld.values()) == len(ids) * SAMPLED
        assert stats.slot_s == 4 * stats.idle_slot_s > 0
        assert ledger_report(path).total == stats.ledger


async def test_a_rank_reads_the_rows_that_it_trains_on_from_the_file(path: Path, address: str) -> None:
    async with (
        BufferClient(address, "rank-0") as first,
        BufferClient(address, "rank-1") as second,
        BufferClient(address, "worker") as worker,
        asyncio.timeout(SOON),
    ):
        async with serving(path, address):
            mark_served(first, await first.recover(0))
            await play(worker, await worker.lease())
            plan = await first.take_plan(0, SOON)
            assert [(row.id, len(row), row.sampled) for row in plan.groups[0]] == [
                ("0.0.0.0", 1 + SAMPLED, SAMPLED),
                ("0.0.1.0", 1 + SAMPLED, SAMPLED),
            ]
            one, other = plan.groups[0]
            assert (await second.take_plan(0, SOON)).groups == plan.groups
            (row,) = await second.read_rows([other])
        again = await second.read_rows([other, one])  # no process of the buffer is asked
        assert [each.id for each in again] == ["0.0.1.0", "0.0.0.0"]
        assert again[0].token_ids.tolist() == row.token_ids.tolist() == list(range(1 + SAMPLED))
        async with serving(path, address):  # a restart of the buffer changes nothing
            assert (await first.take_plan(0, SOON)).groups == plan.groups
            assert [each.id for each in await first.read_rows([one, other])] == ["0.0.0.0", "0.0.1.0"]


async def test_bytes_that_a_host_sees_late_are_waited_for_and_those_that_never_come_are_named(
    path: Path, address: str
) -> None:
    async with (
        serving(path, address),
        BufferClient(address, "rank-0") as rank,
        BufferClient(address, "worker") as worker,
        asyncio.timeout(SOON),
    ):
        mark_served(rank, await rank.recover(0))
        await play(worker, await worker.lease())
        rows = (await rank.take_plan(0, SOON)).groups[0]
        (segment,) = segments_path(path).iterdir()
        hidden = segment.rename(path.with_name("hidden"))  # as a network file system that does not show it yet
        reading = asyncio.create_task(rank.read_rows(rows))
        assert await waits(reading)
        whole = hidden.read_bytes()
        for shown in (whole[:40], whole[:40] + bytes(len(whole) - 40)):  # a part of it, and its size before its content
            segment.write_bytes(shown)
            assert await waits(reading)
        hidden.rename(segment)
        assert [row.id for row in await reading] == ["0.0.0.0", "0.0.1.0"]
        folder = re.escape(str(segments_path(path)))
        hint = "at byte 36; does every host see the same folder"
        found: dict[str, Callable[[], object]] = {
            "has 0 of 36 bytes": segment.unlink,
            r"cannot be read \(.*Is a directory.*\)": segment.mkdir,
            "is damaged: it holds other bytes than were delivered": lambda: segment.write_bytes(whole[:40] + bytes(32)),
        }
        for what, change in found.items():
            if segment.is_dir():
                segment.rmdir()
            change()
            named = rf"rank-0 waited 0.3 s for the arrays of its batch; trajectory 0\.0\.1\.0: {folder} {what} {hint}"
            with pytest.raises(DeadlineExceeded, match=named):
                await rank.read_rows(rows[1:], 0.3)
        with pytest.raises(StateError, match=r"trajectory 5\.0\.0\.0 is of no batch"):
            await rank.read_rows([row_of(trajectory("5.0.0"))])
        with pytest.raises(StateError, match="worker has taken no batch"):
            await worker.read_rows(rows)


async def test_two_ranks_get_the_same_batch_until_it_is_committed(path: Path, address: str) -> None:
    async with (
        serving(path, address),
        BufferClient(address, "rank-0") as first,
        BufferClient(address, "rank-1") as second,
        BufferClient(address, "worker") as worker,
        asyncio.timeout(SOON),
    ):
        await first.recover(0)
        early = asyncio.create_task(first.take(0, SOON))
        mark_served(first, 0)
        await play(worker, await worker.lease())
        ready = await early
        await play(worker, await worker.lease())
        for rank in (second, first, second):
            again = await rank.take(0, SOON)
            assert trained_ids([again]) == trained_ids([ready])
        await first.commit(0)
        await first.commit(0)  # a repeated request changes nothing
        assert (await first.stats()).version == 1
        with pytest.raises(StateError, match="refused TakeBatch of rank-1: a batch was asked for version 0"):
            await second.take(0, SOON)


async def test_fresh_shows_what_waits_at_a_version_and_leaves_it_there(path: Path, address: str) -> None:
    async with (
        serving(path, address),
        BufferClient(address, "learner") as learner,
        BufferClient(address, "worker") as worker,
        asyncio.timeout(SOON),
    ):
        await learner.recover(0)
        mark_served(learner, 0)
        await play(worker, await worker.lease())
        shown = await learner.fresh(0, 10)
        assert len(shown) == len(await learner.fresh(0, 10)) > 1
        assert len(await learner.fresh(0, 1)) == 1
        assert await learner.fresh(1, 10) == ()
        batch = await learner.take(0, SOON)
        assert set(trained_ids([batch])) == {t.id for t in shown}
        assert await learner.fresh(0, 10) == ()


async def test_all_branches_of_an_episode_are_kept(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "w") as client, asyncio.timeout(SOON):
        mark_served(client, 0)
        (a, b) = episodes(await client.lease())
        await client.deliver(a, {0: 2 * SAMPLED}, FINISHED, (trajectory(a, 1), trajectory(a, 0)))
        await client.deliver(b, {0: SAMPLED}, FINISHED, (trajectory(b),))
        assert trained_ids([await client.take(0, SOON)]) == [f"{a}.0", f"{a}.1", f"{b}.0"]


# --- groups that are not whole ---------------------------------------------------------------------------------------

SOME = Buffer(max_staleness=1, groups_per_batch=1, group_size=4, min_members=2)
"""A group is complete with two of four."""


async def deliver(client: BufferClient, lease: Lease, *members: int, sampled: int = SAMPLED) -> None:
    for member in members:
        branch = trajectory(lease.episode(member), version=lease.version)
        await client.deliver(lease.episode(member), {lease.version: sampled}, FINISHED, (branch,))


async def test_late_members_are_in_the_batch_by_name_and_stragglers_are_told_to_stop(path: Path, address: str) -> None:
    async with serving(path, address, SOME), BufferClient(address, "w") as client, asyncio.timeout(SOON):
        mark_served(client, 0)
        lease = await client.lease()
        running = {lease.episode(3): {0: 2}}
        await deliver(client, lease, 1, 2)
        await deliver(client, lease, 0, sampled=SAMPLED + 1)  # a token that is in no trajectory
        assert await client.progress(running, 0.0, 0.0) == ()
        batch = await client.take(0, SOON)
        assert trained_ids([batch]) == ["0.0.0.0", "0.0.1.0", "0.0.2.0"]
        assert batch.withheld == {"0.0.0": "late"}
        assert await client.progress(running, 0.0, 0.0) == (lease.episode(3),)
        await deliver(client, lease, 3)  # it was on its way
        assert trained_ids([await client.take(0, SOON)]) == trained_ids([batch])
        await client.commit(0)
        ledger = (await client.stats()).ledger
        assert ledger == Ledger(generated=13, trained=6, withheld={"late": 3}, discarded={"unused": 1, "straggler": 3})
        assert ledger_report(path).total == ledger


async def test_progress_names_the_episodes_that_nobody_waits_for(path: Path, address: str, clock: Clock) -> None:
    async with (
        serving(path, address),
        BufferClient(address, "a") as slow,
        BufferClient(address, "b") as other,
        asyncio.timeout(SOON),
    ):
        mark_served(other, 0)
        lost = await slow.lease()
        await other.lease()
        clock.later = LEASE_S + 1
        again = await other.lease()
        assert again.group_id == lost.group_id
        kept = await slow.lease()
        counts = {key: {0: 1} for key in [*episodes(lost), *episodes(kept)]}
        assert set(await slow.progress(counts, 0.0, 0.0)) == set(episodes(lost))
        with pytest.raises(StateError, match=f"{again.episode(0)} is leased to b, not to a"):
            await slow.progress({again.episode(0): {0: 1}}, 0.0, 0.0)
        with pytest.raises(StateError, match="leased to b, not to a"):
            await deliver(slow, again, 0)
        with pytest.raises(StateError, match="never leased"):
            await slow.progress({"7.0.0": {0: 1}}, 0.0, 0.0)
        await deliver(other, again, 0, 1)


async def test_a_failed_member_is_granted_again_while_its_budget_lasts(path: Path, address: str) -> None:
    async with (
        serving(path, address, retries={"engine": 1}),
        BufferClient(address, "w") as client,
        asyncio.timeout(SOON),
    ):
        mark_served(client, 0)
        lease = await client.lease()
        await client.deliver(lease.episode(0), {0: 1}, Outcome("failed", "engine", "x" * 10_000), ())
        await deliver(client, lease, 1)
        again = await client.lease()
        assert (again.group_id, again.attempt, again.members) == (0, 1, (0,))
        await deliver(client, again, 0)
        assert trained_ids([await client.take(0, SOON)]) == ["0.1.0.0", "0.0.1.0"]
        assert (await client.stats()).ledger == Ledger(generated=7, ready=6, discarded={"failed_engine": 1})


async def test_a_failure_that_comes_with_its_trajectory_is_kept(path: Path, address: str) -> None:
    failed = Outcome("failed", "tool", "it fell over")
    async with serving(path, address), BufferClient(address, "w") as client, asyncio.timeout(SOON):
        mark_served(client, 0)
        lease = await client.lease()
        punished = msgspec.structs.replace(trajectory(lease.episode(0)), reward=-1.0, outcome=failed)
        await client.deliver(lease.episode(0), {0: SAMPLED}, failed, (punished,))
        await deliver(client, lease, 1)
        batch = await client.take(0, SOON)
        assert [(t.reward, t.outcome.kind) for t in batch.groups[0]] == [(-1.0, "failed"), (1.0, "finished")]
        await client.commit(0)
        assert (await client.stats()).ledger == Ledger(generated=6, trained=6)


async def test_a_buffer_of_other_environments_is_refused_by_name(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "w") as client, asyncio.timeout(SOON):
        mark_served(client, 0)
        await client.stats()
    with pytest.raises(StateError, match="of a run with 1 environments, this one has 2"):
        buffer_service(PATIENT, path, address, shares=(1.0, 1.0))


async def test_leases_name_the_environment_and_its_task(path: Path, address: str) -> None:
    async with serving(path, address, shares=(1.0, 1.0)), BufferClient(address, "w") as client, asyncio.timeout(SOON):
        mark_served(client, 0)
        assert sorted((lease.env, lease.task) for lease in [await client.lease(), await client.lease()]) == [
            (0, 0),
            (1, 0),
        ]


# --- a slow learner --------------------------------------------------------------------------------------------------


async def test_workers_wait_while_nobody_takes_a_batch(
    path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission ends the leases; lease requests that are repeated add nothing, and what waits is in the file."""
    config = Buffer(max_staleness=3, groups_per_batch=8, group_size=2)
    long = 250_000  # tokens of an episode, 2 MB: the four that are on their way at once are little beside what waits
    small = "from slipstream.buffer import service as s\ns.ROUND_BYTES = 4 << 20\n"
    process = await start_process(path, address, config, small + PROCESS)
    monkeypatch.setattr(client_module, "RESEND_S", SOON)  # what is on its way is not sent again to a disk that is slow
    try:
        async with asyncio.timeout(3 * SOON), publishing_fleet(address), contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(BufferClient(address, f"worker-{i}")) for i in range(4)]
            learner = await stack.enter_async_context(BufferClient(address, "learner"))
            mark_served(learner, await learner.recover(0))
            granted = 0

            async def fill(client: BufferClient) -> None:
                nonlocal granted
                await client.register()
                while True:
                    lease = await client.lease()
                    granted += 1
                    for episode in episodes(lease):
                        branch = trajectory(episode, sampled=long)
                        await client.deliver(episode, {0: long}, FINISHED, (branch,))

            before = psutil.Process(process.pid).memory_info().rss
            filling = [asyncio.create_task(fill(client)) for client in clients]
            while (await learner.stats()).ready_groups < 32:
                assert not any(task.done() for task in filling)
            monkeypatch.setattr(client_module, "RESEND_S", 0.05)
            one_more = await stack.enter_async_context(BufferClient(address, "worker-4"))
            asking = asyncio.create_task(one_more.lease())
            assert await waits(asking)  # six times as long as it takes to ask again
            assert granted == 32
            assert (await learner.stats()).ledger == Ledger(generated=64 * long, ready=64 * long)
            grown = psutil.Process(process.pid).memory_info().rss - before
            assert grown < 64 * 9 * long / 2  # of what is in the file
            await learner.take(0, SOON)
            await learner.commit(0)
            mark_served(learner, 1)
            await asking
            while granted < 39:
                await learner.stats()
            for task in filling:
                task.cancel()
            await asyncio.wait(filling)
    finally:
        process.kill()
        await process.wait()


# --- workers come and go ---------------------------------------------------------------------------------------------


async def test_a_silent_worker_loses_its_lease_to_one_that_waits(path: Path, address: str, clock: Clock) -> None:
    config = msgspec.structs.replace(PATIENT, max_staleness=0)
    async with serving(path, address, config), BufferClient(address, "b") as patient, asyncio.timeout(SOON):
        mark_served(patient, 0)
        async with BufferClient(address, "a") as silent:
            lost = await silent.lease()
            await silent.progress({episodes(lost)[0]: {0: 2}}, 0.0, 0.0)
            waiting = asyncio.create_task(patient.lease())
            assert await waits(waiting)
            clock.later = LEASE_S + 1
            again = await waiting
            assert (again.group_id, again.attempt, again.members) == (lost.group_id, 1, lost.members)
            await silent.deliver(
                episodes(lost)[0], {0: SAMPLED}, FINISHED, (trajectory(episodes(lost)[0]),)
            )  # too late
        await play(patient, again)
        assert trained_ids([await patient.take(0, SOON)]) == ["0.1.0.0", "0.1.1.0"]
        stats = await patient.stats()
        assert stats.ledger == Ledger(generated=9, ready=6, discarded={"worker_lost": 3})


async def test_progress_keeps_a_lease_longer_than_its_deadline(path: Path, address: str, clock: Clock) -> None:
    async with serving(path, address), BufferClient(address, "a") as client, asyncio.timeout(SOON):
        mark_served(client, 0)
        lease = await client.lease()
        for _ in range(4):
            clock.later += LEASE_S / 2
            await client.progress({key: {0: 1} for key in episodes(lease)}, 0.0, 0.0)
        await play(client, lease)
        assert (await client.stats()).ledger == Ledger(generated=6, ready=6)


async def test_a_new_process_of_a_worker_frees_the_groups_and_lease_requests_of_the_old(
    path: Path, address: str
) -> None:
    async with serving(path, address), asyncio.timeout(SOON):
        async with BufferClient(address, "a") as old:
            await old.register()
            mark_served(old, 0)
            leases = [await old.lease(), await old.lease()]
            await old.register()  # a repeated request changes nothing
            assert (await old.stats()).leased_groups == 2
            lease_request = asyncio.create_task(old.lease())
            await old.stats()  # the lease request is there: requests of one client keep their order
            lease_request.cancel()
        async with BufferClient(address, "a") as new:
            await new.register()
            assert (await new.stats()).leased_groups == 0
            again = [await new.lease(), await new.lease()]
            assert [(lease.group_id, lease.attempt) for lease in again] == [(0, 1), (1, 1)]
            assert [lease.members for lease in again] == [lease.members for lease in leases]
            await play(new, again[0])
            await new.recover(0)
            await new.take(0, SOON)
            await new.commit(0)
            mark_served(new, 1)
            assert (await new.lease()).group_id == 2  # not granted to the dead one


async def test_goodbye_gives_groups_back(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "b") as other, asyncio.timeout(SOON):
        mark_served(other, 0)
        async with BufferClient(address, "a") as leaving:
            (first, _) = episodes(await leaving.lease())
            await leaving.progress({first: {0: 5}}, 1.0, 0.0)
            await leaving.deregister()
        assert (await other.lease()).attempt == 1
        assert (await other.stats()).ledger == Ledger(generated=5, discarded={"worker_stopped": 5})


async def test_leases_asked_for_at_once_are_all_granted(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "a") as client, asyncio.timeout(SOON):
        lease_requests = [asyncio.create_task(client.lease()) for _ in range(2)]
        mark_served(client, 0)
        assert sorted(lease.group_id for lease in await asyncio.gather(*lease_requests)) == [0, 1]


@contextlib.asynccontextmanager
async def raw(address: str, identity: bytes) -> AsyncIterator[zmq.asyncio.Socket]:
    """A client without manners."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, identity)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.connect(address)
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()


async def ask(dealer: zmq.asyncio.Socket, number: int, request: m.Request) -> m.Reply:
    await dealer.send_multipart(wire.encode(m.Envelope(number, request)))
    (reply,) = wire.decode(list[m.ReplyEnvelope], await dealer.recv_multipart())
    assert reply.number == number
    return reply.message


async def test_a_repeated_lease_request_gets_the_same_lease_also_after_a_restart(path: Path, address: str) -> None:
    lease_request = m.RequestLease("a")
    async with asyncio.timeout(SOON):
        async with serving(path, address), raw(address, b"a/1") as dealer:
            mark_served(address, 0)
            lease = await ask(dealer, 2, lease_request)
            assert isinstance(lease, m.LeaseReply)
            assert await ask(dealer, 2, lease_request) == lease
        async with serving(path, address), raw(address, b"a/1") as dealer:
            assert await ask(dealer, 2, lease_request) == lease
            other = await ask(dealer, 3, lease_request)
            assert isinstance(other, m.LeaseReply)
            assert other.leases[0].group_id == 1


# --- what is refused ---------------------------------------------------------------------------------------------------


async def test_forged_deliveries_are_refused_and_change_nothing(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "w") as client, asyncio.timeout(SOON):
        mark_served(client, 0)
        await client.lease()
        good = trajectory("0.0.0")
        change = msgspec.structs.replace
        forged: list[tuple[str, dict[int, int], tuple[Trajectory, ...], str]] = [
            ("5.0.0", {0: 3}, (trajectory("5.0.0"),), "never leased"),
            ("0.7.0", {0: 3}, (trajectory("0.7.0"),), "never leased"),
            ("0.0.2", {0: 3}, (trajectory("0.0.2"),), "never leased"),
            ("9" * 60, {}, (), "never leased"),
            ("nonsense", {0: 3}, (good,), "came with episode 'nonsense'"),
            ("0.0.0", {0: 3}, (trajectory("0.0.1"),), "came with episode '0.0.0'"),
            ("0.0.0", {0: 3}, (change(good, group_id=1),), "group 1, member 0, branch 0 came with episode '0.0.0'"),
            ("0.0.0", {0: 3}, (change(good, member=1),), "group 0, member 1"),
            ("0.0.0", {0: 3}, (change(good, branch=1),), "branch 1"),
            ("0.0.0", {0: 6}, (good, good), "the same branch twice"),
            ("0.0.0", {0: 2}, (good,), "2 tokens of version 0 were generated, 3 are in its trajectories"),
            ("0.0.0", {1: 3}, (trajectory("0.0.0", version=1),), "tokens of version 1, the buffer is at version 0"),
            ("0.0.0", {0: 3}, (change(good, reward=float("nan")),), "finite"),
            ("0.0.0", {0: 3}, (change(good, version_spans=()),), "cover exactly"),
            ("0.0.0", {0: 3}, (change(good, task_id="x" * 1001),), "1000 characters"),
        ]
        for episode, generated, trajectories, says in forged:
            with pytest.raises(StateError, match=says):
                await client.deliver(episode, generated, FINISHED, trajectories)
        assert (await client.stats()).ledger == Ledger()
        await client.deliver("0.0.0", {0: 3}, FINISHED, (good,))
        await client.deliver("0.0.0", {0: 3}, FINISHED, (good,))  # a repeated request changes nothing
        await client.deliver("0.0.1", {}, Outcome("failed", "tool"), ())
        assert (await client.stats()).ledger == Ledger(generated=3, discarded={"too_few_members": 3})


async def test_a_learner_out_of_step_is_refused(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "learner") as client, asyncio.timeout(SOON):
        for wrong, says in (
            (client.commit(0), "without a batch"),
            (client.take(3, SOON), "asked for version 3"),
            (client.recover(2), "another run's"),
            (client.checkpointed(1), "a checkpoint of version 1"),
        ):
            with pytest.raises(StateError, match=says):
                await wrong
        mark_served(client, 0)
        await play(client, await client.lease())
        await client.take(0, SOON)
        await client.commit(0)
        await client.checkpointed(1)
        with pytest.raises(StateError, match="weights of version 0 cannot be resumed from"):
            await client.recover(0)
        assert (await client.stats()).ledger == Ledger(generated=6, trained=6)


async def waits(lease_request: asyncio.Task[Lease]) -> bool:
    await asyncio.wait({lease_request}, timeout=0.3)
    return not lease_request.done()


async def test_nothing_is_leased_at_a_version_that_no_replica_serves(path: Path, address: str) -> None:
    async with asyncio.timeout(SOON), BufferClient(address, "w") as client:
        async with serving(path, address):
            lease_request = asyncio.create_task(client.lease())
            assert await waits(lease_request)  # the fleet is not known
            mark_served(client, 1)
            assert await waits(lease_request)  # the buffer knows no such version
            mark_served(client, 0)
            await play(client, await lease_request)
            mark_served(client, None)
            lease_request = asyncio.create_task(client.lease())
            assert await waits(lease_request)  # all replicas are lost
            mark_served(client, 0)
            assert (await lease_request).group_id == 1
            mark_served(client, None)
        async with serving(path, address):
            lease_request = asyncio.create_task(client.lease())
            assert await waits(lease_request)  # what was served before the restart does not count
            await client.take(0, SOON)
            await client.commit(0)
            mark_served(client, 1)
            assert (await lease_request).version == 1


async def test_a_late_subscriber_learns_the_version_and_a_new_supervisor_starts_from_nothing(
    path: Path, address: str
) -> None:
    async with asyncio.timeout(SOON), BufferClient(address, "w") as client:
        async with publishing_fleet(address):
            mark_served(client, 0)
            for _ in range(2):  # the second process subscribes after the last change
                process = await start_process(path, address)
                assert (await client.lease()).version == 0
                process.kill()
                await process.wait()
        async with publishing_fleet(address):
            process = await start_process(path, address)
            try:
                lease_request = asyncio.create_task(client.lease())
                assert await waits(lease_request)
                mark_served(client, 0)
                assert (await lease_request).version == 0
            finally:
                process.kill()
                await process.wait()


async def test_a_process_that_was_replaced_is_refused(path: Path, address: str) -> None:
    async with (
        serving(path, address),
        BufferClient(address, "worker-0") as old,
        BufferClient(address, "worker-0") as new,
        BufferClient(address, "learner-0") as stuck,
        BufferClient(address, "learner-0") as learner,
        BufferClient(address, "worker-1") as other,
        asyncio.timeout(SOON),
    ):
        mark_served(stuck, await stuck.recover(0))
        await old.register()
        await play(old, await old.lease())
        await new.register()
        for late in (old.lease(), old.progress({}, 0.0, 0.0), old.deregister()):
            with pytest.raises(StateError, match="worker-0 is another process now"):
                await late
        await learner.recover(0)
        await learner.take(0, SOON)
        with pytest.raises(StateError, match="learner-0 is another process now"):
            await stuck.commit(0)
        for wrong in (other.commit(0), other.checkpointed(0), other.recover(0)):
            with pytest.raises(StateError, match="worker-1 is not the learner of this run, learner-0 is"):
                await wrong
        with pytest.raises(StateError, match="worker-1 is no rank of this run's learner"):
            await other.take(0, SOON)
        await learner.commit(0)
        assert (await learner.stats()).ledger == Ledger(generated=6, trained=6)


async def test_requests_that_come_again_late_change_nothing(path: Path, address: str) -> None:
    async with serving(path, address), raw(address, b"learner/1") as dealer, asyncio.timeout(SOON):
        assert await ask(dealer, 1, m.Recover(0)) == m.RecoverReply(0)
        mark_served(address, 0)
        async with BufferClient(address, "w") as client:
            await play(client, await client.lease())
            await play(client, await client.lease())
        for version in range(2):
            assert isinstance(await ask(dealer, 10 + version, m.TakeBatch(version)), m.BatchPlan)
            assert await ask(dealer, 20 + version, m.CommitBatch(version)) == m.Ack()
            mark_served(address, version + 1)
        before = await ask(dealer, 40, m.RequestStats())
        assert await ask(dealer, 1, m.Recover(0)) == m.RecoverReply(0)
        for version in range(2):
            assert await ask(dealer, 20 + version, m.CommitBatch(version)) == m.Ack()
        assert await ask(dealer, 41, m.RequestStats()) == before
        async with BufferClient(address, "v") as client:
            assert (await client.lease()).version == 2


async def test_a_lease_request_has_one_answer_also_when_its_lease_is_lost(
    path: Path, address: str, clock: Clock
) -> None:
    """A worker that was stopped asks again before it reads; another lease would have no worker."""
    async with serving(path, address), raw(address, b"a/1") as dealer, asyncio.timeout(SOON):
        mark_served(address, 0)
        lost = await ask(dealer, 2, m.RequestLease("a"))
        assert isinstance(lost, m.LeaseReply)
        async with BufferClient(address, "b") as other:
            clock.later = LEASE_S + 1
            assert (await other.lease()).attempt == 1
            assert await ask(dealer, 2, m.RequestLease("a")) == lost
            assert await ask(
                dealer, 3, m.ReportProgress("a", {lost.leases[0].episode(0): {}}, 0.0, 0.0)
            ) == m.CancelledEpisodes(("0.0.0",))


# --- deadlines ---------------------------------------------------------------------------------------------------------


async def test_waits_end_with_a_named_deadline(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "learner") as client:
        with pytest.raises(
            DeadlineExceeded, match=r"learner waited 0.2 s for the buffer's answer to TakeBatch"
        ) as caught:
            await client.take(0, 0.2)
        assert address in str(caught.value)
        mark_served(client, 0)
        assert (await client.stats()).ready_groups == 0
    async with BufferClient(address, "w", deadline_s=0.2) as client:
        with pytest.raises(DeadlineExceeded, match="answer to Register"):
            await client.register()


async def test_an_address_in_use_is_an_error_that_names_it(path: Path, address: str, tmp_path: Path) -> None:
    async with serving(path, address):
        with pytest.raises(StoreError, match=f"cannot listen at {address}"):
            await buffer_service(PATIENT, tmp_path / "other.sqlite", address).serve()


async def test_stop_ends_the_service_after_its_round(path: Path, address: str) -> None:
    service = buffer_service(PATIENT, path, address, lease_s=0.4)
    async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
        tasks.create_task(service.serve())
        async with BufferClient(address, "w") as client:
            mark_served(client, 0)
            await client.stats()
        service.stop()
    assert Store(path).load()[0].served == 0


# --- death and restart -------------------------------------------------------------------------------------------------


async def ends_in_a_delivery(
    service: asyncio.Task[None],
    client: BufferClient,
    path: Path,
    *,
    says: str,
    locked: Callable[[], None] = lambda: None,
) -> asyncio.Task[None]:
    """While another process holds the file, a delivery ends the service; the delivery, which is not acknowledged. `locked` is told
    when it is held."""
    mark_served(client, 0)
    (first, _) = episodes(await client.lease())
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as thief:
        thief.execute("BEGIN IMMEDIATE")
        locked()
        delivery = asyncio.create_task(client.deliver(first, {0: SAMPLED}, FINISHED, (trajectory(first),)))
        with pytest.raises(StoreError, match=says):
            await service
        assert not delivery.done()
    return delivery


async def test_a_failed_write_ends_the_service_and_nothing_is_acknowledged(
    path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.schema.BUSY_S", 0.05)
    async with BufferClient(address, "w") as client, asyncio.timeout(SOON):
        async with serving(path, address) as service:
            delivery = await ends_in_a_delivery(service, client, path, says="locked")
        async with serving(path, address):
            await delivery
            assert (await client.stats()).ledger == Ledger(generated=3, ready=3)


async def test_a_disk_that_hangs_is_named_and_nothing_is_acknowledged(
    path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that another process holds keeps the write as a disk would; SQLite would wait for it much longer. Clients wait longer
    than the service: another one may start before they give up."""
    assert load("quickstart").reply_s > service_module.STORE_S + EXIT_JOIN_S + 10
    assert load("quickstart", ["launch.heartbeat_s=100"]).reply_s > 100

    def hangs() -> None:
        monkeypatch.setattr("slipstream.buffer.service.STORE_S", 0.3)

    async with BufferClient(address, "w") as client, asyncio.timeout(SOON):
        async with serving(path, address) as service:
            says = r"the disk of .* has not taken a round in 0\.3 s"
            delivery = await ends_in_a_delivery(service, client, path, says=says, locked=hangs)
        delivery.cancel()


async def test_a_disk_that_hangs_keeps_no_process(path: Path, address: str) -> None:
    """Another process of the buffer can start, although the thread that writes never returns."""
    program = f"""
import threading
from slipstream.buffer import service
from slipstream.buffer.store import Store
from slipstream.common import tasks
service.STORE_S = tasks.EXIT_JOIN_S = 0.3
Store.save = lambda store, batch: threading.Event().wait()
{PROCESS}
"""
    async with publishing_fleet(address), BufferClient(address, "w") as client, asyncio.timeout(SOON):
        process = await start_process(path, address, LIVELY, program)
        mark_served(client, 0)
        lease = asyncio.create_task(client.lease())
        _, said = await process.communicate()
        assert process.returncode == 1
        assert b"has not taken a round in 0.3 s" in said
        lease.cancel()


async def test_a_full_disk_ends_the_service_and_what_was_acknowledged_stays(path: Path, address: str) -> None:
    """The kernel lets no file of the process grow beyond a limit; the next write fails."""
    program = PROCESS.replace(
        "import asyncio,",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\nimport asyncio,",
    )
    config = msgspec.structs.replace(PATIENT, max_staleness=99)
    acknowledged = set()
    async with publishing_fleet(address), BufferClient(address, "w") as client, asyncio.timeout(SOON):
        process = await start_process(path, address, config, program)
        mark_served(client, 0)
        lease, sampled = await client.lease(), 20_000
        delivering = asyncio.create_task(asyncio.sleep(0))
        while process.returncode is None:
            for episode in episodes(lease):
                branch = trajectory(episode, sampled=sampled)
                delivering = asyncio.create_task(client.deliver(episode, {0: sampled}, FINISHED, (branch,)))
                ended = asyncio.create_task(process.wait())
                await asyncio.wait({delivering, ended}, return_when=asyncio.FIRST_COMPLETED)
                if process.returncode is not None:
                    break
                acknowledged.add(f"{episode}.0")
            else:
                lease = await client.lease()
        assert process.stderr is not None
        assert b"StoreError: cannot write the buffer" in await process.stderr.read()
        assert len(acknowledged) > 1
        assert not delivering.done()
        with sqlite3.connect(path) as db:
            assert {row[0] for row in db.execute("SELECT id FROM trajectories")} == acknowledged
        assert ledger_report(path).balances
        process = await start_process(path, address, config)  # there is room again
        try:
            await delivering
            assert len(await client.fresh(0, 1000)) == len(acknowledged) + 1
        finally:
            process.kill()
            await process.wait()


async def test_a_damaged_row_ends_the_service_by_its_name_and_the_rest_stays(path: Path, address: str) -> None:
    async with BufferClient(address, "w") as client, asyncio.timeout(SOON):
        async with serving(path, address):
            mark_served(client, 0)
            await play(client, await client.lease())
        ((place,),) = sql(path, "SELECT arrays FROM trajectories WHERE id = '0.0.1.0'")
        assert isinstance(place, int)
        (file,) = segments(path)
        whole = file.read_bytes()
        file.write_bytes(whole[:place] + b"\xff" * 8 + whole[place + 8 :])
        async with serving(path, address) as service:  # which reads what it did not take in itself
            taking = asyncio.create_task(client.take(0, SOON))
            with pytest.raises(StoreError, match=r"damaged at trajectory 0\.0\.1\.0"):
                await service
            assert not taking.done()
        file.write_bytes(whole)
        async with serving(path, address):
            assert trained_ids([await taking]) == ["0.0.0.0", "0.0.1.0"]


@pytest.mark.parametrize("max_staleness", [3, 4])
async def test_a_recovery_survives_a_restart(path: Path, address: str, max_staleness: int) -> None:
    config = msgspec.structs.replace(PATIENT, max_staleness=max_staleness)
    async with BufferClient(address, "learner") as client, asyncio.timeout(SOON):
        async with serving(path, address, config):
            mark_served(client, 0)
            for version in range(3):
                await play(client, await client.lease())
                await client.take(version, SOON)
                await client.commit(version)
            await client.checkpointed(1)
        async with serving(path, address, config):
            assert await client.recover(1) == 4
        async with serving(path, address, config):
            assert await client.recover(1) == 4
            assert (await client.stats()).ledger == Ledger(generated=18, trained=6, ready=12)
            assert (await client.stats()).ready_groups == 2
            mark_served(client, 4)
            if max_staleness == 3:  # tokens of version 0 are past the bound at version 4: accounted for, not trained on
                with pytest.raises(DeadlineExceeded):
                    await client.take(4, 0.2)
                await client.stats()  # what was asked before is stored
                assert ledger_report(path).total == Ledger(generated=18, trained=6, discarded={"stale": 12})
                return
            assert trained_ids([await client.take(4, SOON)]) == ["1.0.0.0", "1.0.1.0"]
            await client.commit(4)
            await play(client, await client.lease())  # of version 4
            with sqlite3.connect(path) as db:
                rows = db.execute("SELECT version, rolled_back FROM commits ORDER BY version").fetchall()
            assert rows == [(1, 0), (2, 1), (3, 1), (5, 0)]
            # At version 5 the last group of version 0 is too old; the new one takes its place.
            assert trained_ids([await client.take(5, SOON)]) == ["3.0.0.0", "3.0.1.0"]
            await client.commit(5)
            assert ledger_report(path).total == Ledger(generated=24, trained=18, discarded={"stale": 6})


PROCESS = """
import asyncio, msgspec, sys
from pathlib import Path
from slipstream.buffer.service import BufferService
from slipstream.configs.schema import Buffer
from slipstream.tests.fleets import serve_following

config = msgspec.json.decode(sys.argv[3], type=Buffer)
service = BufferService(config, Path(sys.argv[1]), sys.argv[2], lease_s=600.0)
asyncio.run(serve_following(service, sys.argv[2], lambda: print("ready", flush=True)))
"""


LIVELY = Buffer(max_staleness=5, groups_per_batch=2, group_size=2)


async def start_process(
    path: Path, address: str, config: Buffer = LIVELY, program: str = PROCESS
) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        str(path),
        address,
        msgspec.json.encode(config).decode(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=path.parent,
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def test_a_killed_service_is_not_noticed_and_nothing_is_lost_or_doubled(path: Path, address: str) -> None:
    played = 0
    kill_after = {1: asyncio.Event(), 4: asyncio.Event(), 7: asyncio.Event()}

    def delivered() -> None:
        nonlocal played
        played += 1
        if played in kill_after:
            kill_after[played].set()

    async def killer() -> None:
        nonlocal process
        for event in kill_after.values():
            await event.wait()
            process.kill()
            await process.wait()
            process = await start_process(path, address)

    process = await start_process(path, address)
    try:
        async with (
            asyncio.timeout(4 * SOON),
            publishing_fleet(address),
            BufferClient(address, "learner") as learner,
            BufferClient(address, "holder") as holder,
            BufferClient(address, "a") as a,
            BufferClient(address, "b") as b,
        ):
            mark_served(learner, await learner.recover(0))
            held = await holder.lease()  # lives through every restart
            async with asyncio.TaskGroup() as tasks:
                killing = tasks.create_task(killer())
                working = [tasks.create_task(work(client, delivered)) for client in (a, b)]
                batches = await learn(learner, 5)
                await killing
                await play(holder, held)
                batches.append(await learner.take(5, SOON))
                await learner.commit(5)
                for task in working:
                    task.cancel()
            for client in (a, b):
                await client.deregister()  # nothing of theirs is on its way any more
            ids = trained_ids(batches)
            assert len(ids) == len(set(ids)) == 6 * 2 * 2
            stats = await learner.stats()
            assert stats.version == 6
            assert stats.ledger.balances
            assert stats.ledger.trained + sum(stats.ledger.withheld.values()) == len(ids) * SAMPLED
            assert set(stats.ledger.discarded) <= {"worker_stopped"}  # no lease was lost
            assert ledger_report(path).total == stats.ledger
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
