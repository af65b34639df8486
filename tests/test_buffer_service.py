"""The buffer's process over real sockets and a real file: leases, batches, refusals, silence, death and restart."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from slipstream.buffer import client as client_module
from slipstream.buffer import messages as m
from slipstream.buffer import wire
from slipstream.buffer.client import BufferClient
from slipstream.buffer.ledger import Ledger
from slipstream.buffer.messages import Batch, Lease
from slipstream.buffer.service import BufferService
from slipstream.buffer.store import Store, ledger_of
from slipstream.buffer.trajectory import FINISHED, Outcome, Trajectory
from slipstream.configs.schema import Buffer
from slipstream.errors import DeadlineExceeded, StateError, StoreError
from slipstream.tests.episodes import SAMPLED, trajectory

SOON = 20.0
"""Longer than anything here takes; a test that waits for it has found a hang."""

PATIENT = Buffer(max_staleness=1, groups_per_batch=1, group_size=2, lease_s=60.0)
"""No lease expires within a test."""


@pytest.fixture
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "buffer.sqlite"


@pytest.fixture(autouse=True)
def _resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RESEND_S", 0.1)


@contextlib.asynccontextmanager
async def serving(path: Path, address: str, config: Buffer = PATIENT) -> AsyncIterator[asyncio.Task[None]]:
    """A service in this process; it is cut off at the end, as by a kill between two rounds."""
    ready = asyncio.Event()
    task = asyncio.create_task(BufferService(config, path, address).serve(ready.set))
    await asyncio.wait([task, asyncio.ensure_future(ready.wait())], timeout=SOON, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StoreError):
            await task


def episodes(lease: Lease) -> list[str]:
    return [f"{lease.group_id}.{lease.attempt}.{member}" for member in lease.members]


async def play(client: BufferClient, lease: Lease) -> None:
    for episode in episodes(lease):
        await client.progress({episode: 1}, 2.0, 0.5)
        await client.deliver(episode, SAMPLED, FINISHED, (trajectory(episode, version=lease.version),))


async def work(client: BufferClient, delivered: Callable[[], None] = lambda: None) -> None:
    await client.hello()
    while True:
        await play(client, await client.lease())
        delivered()


async def learn(client: BufferClient, steps: int) -> list[Batch]:
    version = await client.recover(0)
    await client.served(version)
    batches = []
    for _ in range(steps):
        batches.append(await client.take(version, SOON))
        await client.commit(version)
        version += 1
        await client.served(version)
    return batches


def trained_ids(batches: list[Batch]) -> list[str]:
    return [t.id for batch in batches for group in batch.groups for t in group]


# --- the ordinary course ---------------------------------------------------------------------------------------------


async def test_several_workers_feed_one_learner(path: Path, address: str) -> None:
    config = Buffer(max_staleness=2, groups_per_batch=2, group_size=3, lease_s=60.0)
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
            await player.goodbye()  # nothing of theirs is on its way any more
        assert [batch.version for batch in batches] == list(range(6))
        assert [batch.oldest_version for batch in batches] == [0, 0, 0, 1, 2, 3]
        ids = trained_ids(batches)
        assert len(ids) == len(set(ids)) == 6 * 2 * 3
        for batch in batches:
            assert all(s.version >= batch.oldest_version for g in batch.groups for t in g for s in t.version_spans)
            assert all([t.member for t in group] == [0, 1, 2] for group in batch.groups)
            assert batch.stats.ledger.closes
        stats = await learner.stats()
        assert stats.version == 6
        assert stats.ledger.closes
        assert stats.ledger.trained + stats.ledger.withheld == len(ids) * SAMPLED
        assert stats.slot_s == 4 * stats.idle_slot_s > 0
        assert ledger_of(path) == stats.ledger


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
        await first.served(0)
        await play(worker, await worker.lease())
        ready = await early
        await play(worker, await worker.lease())
        for rank in (second, first, second):
            again = await rank.take(0, SOON)
            assert trained_ids([again]) == trained_ids([ready])
        await first.commit(0)
        await first.commit(0)  # a repeated request changes nothing
        assert (await first.stats()).version == 1
        with pytest.raises(StateError, match="refused Take of rank-1: a batch was asked for version 0"):
            await second.take(0, SOON)


async def test_fresh_shows_what_waits_at_a_version_and_leaves_it_there(path: Path, address: str) -> None:
    async with (
        serving(path, address),
        BufferClient(address, "learner") as learner,
        BufferClient(address, "worker") as worker,
        asyncio.timeout(SOON),
    ):
        await learner.recover(0)
        await learner.served(0)
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
        await client.served(0)
        (a, b) = episodes(await client.lease())
        await client.deliver(a, 2 * SAMPLED, FINISHED, (trajectory(a, 1), trajectory(a, 0)))
        await client.deliver(b, SAMPLED, FINISHED, (trajectory(b),))
        assert trained_ids([await client.take(0, SOON)]) == [f"{a}.0", f"{a}.1", f"{b}.0"]


# --- workers come and go ---------------------------------------------------------------------------------------------


async def test_a_silent_worker_loses_its_lease_to_one_that_waits(path: Path, address: str) -> None:
    config = msgspec.structs.replace(PATIENT, max_staleness=0, lease_s=0.4)
    async with serving(path, address, config), BufferClient(address, "b") as patient, asyncio.timeout(SOON):
        await patient.served(0)
        async with BufferClient(address, "a") as silent:
            lost = await silent.lease()
            await silent.progress({episodes(lost)[0]: 2}, 0.0, 0.0)
            again = await patient.lease()
            assert (again.group_id, again.attempt, again.members) == (lost.group_id, 1, lost.members)
            await silent.deliver(episodes(lost)[0], SAMPLED, FINISHED, (trajectory(episodes(lost)[0]),))  # too late
        await play(patient, again)
        assert trained_ids([await patient.take(0, SOON)]) == ["0.1.0.0", "0.1.1.0"]
        stats = await patient.stats()
        assert stats.ledger == Ledger(generated=9, ready=6, discarded={"worker_lost": 3})


async def test_progress_keeps_a_lease_longer_than_its_deadline(path: Path, address: str) -> None:
    config = msgspec.structs.replace(PATIENT, lease_s=0.4)
    async with serving(path, address, config), BufferClient(address, "a") as client, asyncio.timeout(SOON):
        await client.served(0)
        lease = await client.lease()
        end = asyncio.get_running_loop().time() + 1.2
        while asyncio.get_running_loop().time() < end:
            await client.progress(dict.fromkeys(episodes(lease), 1), 0.0, 0.0)
        await play(client, lease)
        assert (await client.stats()).ledger == Ledger(generated=6, ready=6)


async def test_a_new_process_of_a_worker_frees_the_groups_and_wishes_of_the_old(path: Path, address: str) -> None:
    async with serving(path, address), asyncio.timeout(SOON):
        async with BufferClient(address, "a") as old:
            await old.hello()
            await old.served(0)
            leases = [await old.lease(), await old.lease()]
            await old.hello()  # a repeated request changes nothing
            assert (await old.stats()).leased_groups == 2
            wish = asyncio.create_task(old.lease())
            await old.stats()  # the wish is there: requests of one client keep their order
            wish.cancel()
        async with BufferClient(address, "a") as new:
            await new.hello()
            assert (await new.stats()).leased_groups == 0
            again = [await new.lease(), await new.lease()]
            assert [(lease.group_id, lease.attempt) for lease in again] == [(0, 1), (1, 1)]
            assert [lease.members for lease in again] == [lease.members for lease in leases]
            await play(new, again[0])
            await new.take(0, SOON)
            await new.commit(0)
            await new.served(1)
            assert (await new.lease()).group_id == 2  # not granted to the dead one


async def test_goodbye_gives_groups_back(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "b") as other, asyncio.timeout(SOON):
        await other.served(0)
        async with BufferClient(address, "a") as leaving:
            (first, _) = episodes(await leaving.lease())
            await leaving.progress({first: 5}, 1.0, 0.0)
            await leaving.goodbye()
        assert (await other.lease()).attempt == 1
        assert (await other.stats()).ledger == Ledger(generated=5, discarded={"worker_stopped": 5})


async def test_leases_asked_for_at_once_are_all_granted(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "a") as client, asyncio.timeout(SOON):
        wishes = [asyncio.create_task(client.lease()) for _ in range(2)]
        await client.served(0)
        assert sorted(lease.group_id for lease in await asyncio.gather(*wishes)) == [0, 1]


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
    reply = wire.decode(m.ReplyEnvelope, await dealer.recv_multipart())
    assert reply.number == number
    return reply.message


async def test_a_repeated_wish_gets_the_same_lease_also_after_a_restart(path: Path, address: str) -> None:
    wish = m.WantLease("a")
    async with asyncio.timeout(SOON):
        async with serving(path, address), raw(address, b"a/1") as dealer:
            assert await ask(dealer, 1, m.Served(0)) == m.Done()
            lease = await ask(dealer, 2, wish)
            assert isinstance(lease, m.Granted)
            assert await ask(dealer, 2, wish) == lease
        async with serving(path, address), raw(address, b"a/1") as dealer:
            assert await ask(dealer, 2, wish) == lease
            other = await ask(dealer, 3, wish)
            assert isinstance(other, m.Granted)
            assert other.lease.group_id == 1


# --- what is refused ---------------------------------------------------------------------------------------------------


async def test_forged_deliveries_are_refused_and_change_nothing(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "w") as client, asyncio.timeout(SOON):
        await client.served(0)
        await client.lease()
        good = trajectory("0.0.0")
        change = msgspec.structs.replace
        forged: list[tuple[str, int, tuple[Trajectory, ...], str]] = [
            ("5.0.0", 3, (trajectory("5.0.0"),), "never leased"),
            ("0.7.0", 3, (trajectory("0.7.0"),), "never leased"),
            ("0.0.2", 3, (trajectory("0.0.2"),), "never leased"),
            ("9" * 5000, 0, (), "never leased"),
            ("nonsense", 3, (good,), "came with episode 'nonsense'"),
            ("0.0.0", 3, (trajectory("0.0.1"),), "came with episode '0.0.0'"),
            ("0.0.0", 3, (change(good, group_id=1),), "group 1, member 0, branch 0 came with episode '0.0.0'"),
            ("0.0.0", 3, (change(good, member=1),), "group 0, member 1"),
            ("0.0.0", 3, (change(good, branch=1),), "branch 1"),
            ("0.0.0", 6, (good, good), "the same branch twice"),
            ("0.0.0", 4, (good,), "4 tokens were generated, 3 are in its trajectories"),
            ("0.0.0", 3, (), "3 tokens were generated, 0 are in its trajectories"),
            ("0.0.0", 3, (trajectory("0.0.0", version=1),), "tokens of version 1, the buffer is at version 0"),
            ("0.0.0", 3, (change(good, reward=float("nan")),), "finite"),
            ("0.0.0", 3, (change(good, version_spans=()),), "cover exactly"),
        ]
        for episode, generated, trajectories, says in forged:
            with pytest.raises(StateError, match=says):
                await client.deliver(episode, generated, FINISHED, trajectories)
        assert (await client.stats()).ledger == Ledger()
        await client.deliver("0.0.0", 3, FINISHED, (good,))
        await client.deliver("0.0.0", 3, FINISHED, (good,))  # a repeated request changes nothing
        await client.deliver("0.0.1", 0, Outcome("failed", "tool"), ())
        assert (await client.stats()).ledger == Ledger(generated=3, discarded={"too_few_members": 3})


async def test_a_learner_out_of_step_is_refused(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "learner") as client, asyncio.timeout(SOON):
        for wrong, says in (
            (client.commit(0), "without a batch"),
            (client.take(3, SOON), "asked for version 3"),
            (client.served(1), "cannot be served"),
            (client.recover(2), "another run's"),
            (client.checkpointed(1), "a checkpoint of version 1"),
        ):
            with pytest.raises(StateError, match=says):
                await wrong
        await client.served(0)
        await play(client, await client.lease())
        await client.take(0, SOON)
        await client.commit(0)
        await client.checkpointed(1)
        with pytest.raises(StateError, match="weights of version 0 cannot be resumed from"):
            await client.recover(0)
        assert (await client.stats()).ledger == Ledger(generated=6, trained=6)


async def test_hostile_frames_are_dropped_while_others_are_served(
    path: Path, address: str, caplog: pytest.LogCaptureFixture
) -> None:
    rubbish = [
        [b""],
        [b"", b"", b""],
        [b"hello"],
        [wire.FORMAT],
        [wire.FORMAT + b"\xc1" * 20],
        [wire.FORMAT + b"\xdd\xff\xff\xff\xff"],
        [wire.FORMAT + b"\x92\x01\x82\xa4type\xa9WantStats\xa1x" + b"\x91" * 200_000],
        [*wire.encode(m.Envelope(1, m.WantStats())), b"one frame too many"],
        wire.encode(m.ReplyEnvelope(1, m.Done())),
        wire.encode(m.Envelope(1, m.Progress("w", {"0.0.0": 1 << 60}, 0.0, 0.0))),
    ]
    caplog.set_level(logging.WARNING)
    async with serving(path, address) as service, raw(address, b"stranger") as dealer, asyncio.timeout(SOON):
        async with BufferClient(address, "w") as client:
            await client.served(0)
            for number, frames in enumerate(rubbish):
                await dealer.send_multipart(frames)
                assert isinstance(await ask(dealer, number, m.WantStats()), m.StatsReply)
            await play(client, await client.lease())
            assert (await client.stats()).ledger == Ledger(generated=6, ready=6)
        assert not service.done()
    assert sum("that is not ours" in record.message for record in caplog.records) == len(rubbish)


def any_request(rng: random.Random, now: int) -> m.Request:
    """A well-formed request that nobody in his right mind would send; `now` is the buffer's version."""
    episode = rng.choice(
        [f"{rng.randint(0, 9)}.{rng.randint(0, 1)}.{rng.randint(0, 2)}", "", "0", "\x00", "\u0663.0.0"]
    )
    worker, version = rng.choice(["a", "b", "", "\U0001f600"]), max(0, now + rng.choice([-2, -1, 0, 0, 0, 1]))
    tokens = rng.choice([0, SAMPLED, 1 << 40])
    outcome = rng.choice([FINISHED, Outcome("failed", "tool"), Outcome("failed")])
    kind = rng.choice(m.Request.__args__)
    if kind is m.Deliver:
        valid = episode.isascii() and episode.count(".") == 2
        trajectories = (trajectory(episode, rng.randint(0, 1), version),) * rng.randint(0, 2) if valid else ()
        return m.Deliver(worker, episode, tokens, outcome, trajectories)
    if kind is m.Progress:
        return m.Progress(worker, {episode: tokens}, 1.0, 0.5)
    if kind is m.Hello:
        return m.Hello(worker, rng.choice("xy"))
    if kind in (m.WantLease, m.Goodbye):
        return kind(worker)
    if kind is m.WantFresh:
        return m.WantFresh(version, rng.choice([-1, 0, 1, 1 << 40]))
    return m.WantStats() if kind is m.WantStats else kind(version)


async def test_no_order_of_requests_ends_the_service_or_opens_the_ledger(path: Path, address: str) -> None:
    async def persist(client: BufferClient) -> None:
        while True:
            with contextlib.suppress(StateError):  # somebody else reported about its episodes
                await work(client)

    rng, version = random.Random(0), 0
    config = msgspec.structs.replace(PATIENT, max_staleness=3, lease_s=0.4)
    async with (
        serving(path, address, config) as service,
        raw(address, b"mad") as dealer,
        BufferClient(address, "w") as worker,
        BufferClient(address, "looker") as looker,
        asyncio.timeout(SOON),
    ):
        working = asyncio.create_task(persist(worker))
        for number in range(1500):
            await dealer.send_multipart(wire.encode(m.Envelope(number, any_request(rng, version))))
            if number % 5 == 0:
                stats = await looker.stats()
                version = stats.version
                assert stats.ledger.closes
        working.cancel()
        await worker.goodbye()
        assert version > 1
        assert not service.done()
        stats = await looker.stats()
        assert stats.ledger.closes
        while await dealer.poll(0):
            wire.decode(m.ReplyEnvelope, await dealer.recv_multipart())
    assert ledger_of(path).closes


# --- deadlines ---------------------------------------------------------------------------------------------------------


async def test_waits_end_with_a_named_deadline(path: Path, address: str) -> None:
    async with serving(path, address), BufferClient(address, "learner") as client:
        with pytest.raises(DeadlineExceeded, match=r"learner waited 0.2 s for the buffer's answer to Take") as caught:
            await client.take(0, 0.2)
        assert address in str(caught.value)
        await client.served(0)
        assert (await client.stats()).ready_groups == 0
    async with BufferClient(address, "w", deadline_s=0.2) as client:
        with pytest.raises(DeadlineExceeded, match="answer to Hello"):
            await client.hello()


async def test_an_address_in_use_is_an_error_that_names_it(path: Path, address: str, tmp_path: Path) -> None:
    async with serving(path, address):
        with pytest.raises(StoreError, match=f"cannot listen at {address}"):
            await BufferService(PATIENT, tmp_path / "other.sqlite", address).serve()


async def test_stop_ends_the_service_after_its_round(path: Path, address: str) -> None:
    service = BufferService(msgspec.structs.replace(PATIENT, lease_s=0.4), path, address)
    async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
        tasks.create_task(service.serve())
        async with BufferClient(address, "w") as client:
            await client.served(0)
        service.stop()
    assert Store(path).load()[0].served == 0


# --- death and restart -------------------------------------------------------------------------------------------------


async def test_a_failed_write_ends_the_service_and_nothing_is_acknowledged(
    path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.buffer.store.BUSY_S", 0.05)
    async with BufferClient(address, "w") as client, asyncio.timeout(SOON):
        async with serving(path, address) as service:
            await client.served(0)
            (first, _) = episodes(await client.lease())
            thief = sqlite3.connect(path, isolation_level=None)
            thief.execute("BEGIN IMMEDIATE")
            delivery = asyncio.create_task(client.deliver(first, SAMPLED, FINISHED, (trajectory(first),)))
            with pytest.raises(StoreError, match="locked"):
                await service
            assert not delivery.done()
            thief.close()
        async with serving(path, address):
            await delivery
            assert (await client.stats()).ledger == Ledger(generated=3, ready=3)


@pytest.mark.parametrize("max_staleness", [3, 4])
async def test_a_recovery_survives_a_restart(path: Path, address: str, max_staleness: int) -> None:
    config = msgspec.structs.replace(PATIENT, max_staleness=max_staleness)
    async with BufferClient(address, "learner") as client, asyncio.timeout(SOON):
        async with serving(path, address, config):
            await client.served(0)
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
            await client.served(4)
            if max_staleness == 3:  # tokens of version 0 are past the bound at version 4: accounted for, not trained on
                with pytest.raises(DeadlineExceeded):
                    await client.take(4, 0.2)
                assert ledger_of(path) == Ledger(generated=18, trained=6, discarded={"stale": 12})
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
            assert ledger_of(path) == Ledger(generated=24, trained=18, discarded={"stale": 6})


PROCESS = """
import asyncio, sys
from pathlib import Path
from slipstream.buffer.service import BufferService
from slipstream.configs.schema import Buffer

config = Buffer(max_staleness=5, groups_per_batch=2, group_size=2, lease_s=30.0)
service = BufferService(config, Path(sys.argv[1]), sys.argv[2])
asyncio.run(service.serve(lambda: print("ready", flush=True)))
"""


async def start_process(path: Path, address: str) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, str(path), address, stdout=asyncio.subprocess.PIPE, cwd=path.parent
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
            asyncio.timeout(60.0),
            BufferClient(address, "learner") as learner,
            BufferClient(address, "holder") as holder,
            BufferClient(address, "a") as a,
            BufferClient(address, "b") as b,
        ):
            await learner.served(await learner.recover(0))
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
                await client.goodbye()  # nothing of theirs is on its way any more
            ids = trained_ids(batches)
            assert len(ids) == len(set(ids)) == 6 * 2 * 2
            stats = await learner.stats()
            assert stats.version == 6
            assert stats.ledger.closes
            assert stats.ledger.trained + stats.ledger.withheld == len(ids) * SAMPLED
            assert set(stats.ledger.discarded) <= {"worker_stopped"}  # no lease was lost
            assert ledger_of(path) == stats.ledger
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
