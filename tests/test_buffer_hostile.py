"""The buffer among peers that mean it no good: it serves the others, takes nothing from these, and says how much it turned away."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import zmq
import zmq.asyncio
from slipstream.buffer import client as client_module
from slipstream.buffer import messages as m
from slipstream.buffer.admission import LiveRules
from slipstream.buffer.client import BufferClient, R
from slipstream.buffer.encoded import EncodedTrajectory
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.messages import BatchPlan
from slipstream.buffer.trajectory import FINISHED, Outcome, Trajectory
from slipstream.errors import StateError
from slipstream.rpc import wire
from slipstream.rpc.server import NO_REQUEST
from slipstream.rpc.wire import RpcRefusal
from slipstream.tests import hostile
from slipstream.tests.episodes import SAMPLED, trajectory
from slipstream.tests.fleets import mark_served, publishing_fleet
from slipstream.tests.hostile import KINDS, PAST, Frames, frames_of

FRAMES = int(os.environ.get("SLIPSTREAM_HOSTILE_MESSAGES", "3000"))
"""Hostile messages; `SLIPSTREAM_HOSTILE_MESSAGES=100000` is the real thing."""

SOON = 60.0
AT_ONCE = 100
LAST = (1 << 63) - 1
GROWTH = 96 << 20
"""Bytes that the service may grow by under attack."""

PROCESS = """
import asyncio, sys
from pathlib import Path
from slipstream.buffer.service import BufferService
from slipstream.configs.schema import Buffer
from slipstream.tests.fleets import serve_following

config = Buffer(max_staleness=8, groups_per_batch=2, group_size=2)
service = BufferService(config, Path(sys.argv[1]), sys.argv[2])
asyncio.run(serve_following(service, sys.argv[2], lambda: print("ready", flush=True)))
"""


@pytest.fixture(autouse=True)
def _resend_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "RESEND_S", 0.5)


@contextlib.asynccontextmanager
async def service(path: Path, address: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A buffer in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROCESS, str(path), address, stdout=asyncio.subprocess.PIPE, cwd=path.parent
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    try:
        async with publishing_fleet(address):
            yield process
        assert process.returncode is None, "the service has ended"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Overheard(BufferClient):
    """A third party captures its requests, too."""

    def __init__(self, address: str, name: str, captured: collections.deque[Frames]) -> None:
        super().__init__(address, name)
        self._captured = captured

    async def _request(
        self,
        request: m.Request,
        reply_type: type[R],
        deadline_s: float | None = None,
        waits_for: str = "",
        to: str = "",
    ) -> R:
        if not isinstance(request, m.RequestStats):  # that one anybody may ask
            self._captured.append(frames_of(m.Envelope(1 + len(self._captured), request)))
        return await super()._request(request, reply_type, deadline_s, waits_for, to)


async def work(client: BufferClient) -> None:
    await client.register()
    while True:
        lease = await client.lease()
        for member in lease.members:
            episode, sampled = lease.episode(member), {lease.version: SAMPLED}
            await client.progress({episode: {lease.version: 1}}, 2.0, 0.5)
            await client.deliver(episode, sampled, FINISHED, (trajectory(episode, version=lease.version),))


async def learn(client: BufferClient, batches: list[BatchPlan[Trajectory]], until: asyncio.Event) -> None:
    version = await client.recover(0)
    mark_served(client, version)
    while not until.is_set():
        batches.append(await client.take(version, SOON))
        await client.commit(version)
        version += 1
        mark_served(client, version)
        await client.checkpointed(version)


class Mallory:
    """A peer that says anything. `refused` counts the answers that it did not want, `malformed` those that its words were no
    request, `past` those that they came too late to change anything; every other is in `accepted`."""

    def __init__(self, context: zmq.asyncio.Context, address: str, connection: bytes = b"mallory/1") -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, connection)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.refused = 0
        self.malformed = 0
        self.past = 0
        self.accepted: list[m.Reply] = []

    async def send(self, frames: Frames) -> None:
        await self.socket.send_multipart(frames)

    async def stats(self) -> m.Stats:
        """The buffer's, after all that was sent before."""
        await self.send(frames_of(m.Envelope(LAST, m.RequestStats())))
        while True:
            for envelope in wire.decode(list[m.ReplyEnvelope], await self.socket.recv_multipart()):
                match reply := envelope.message:
                    case m.Stats() as stats if envelope.number == LAST:
                        return stats
                    case RpcRefusal(reason) if reason.startswith(NO_REQUEST):
                        self.malformed += 1
                    case RpcRefusal():
                        self.refused += 1
                    case m.Ack() | m.CancelledEpisodes() if envelope.number == PAST:
                        self.past += 1
                    case _:
                        self.accepted.append(reply)


async def test_hostile_messages_change_nothing_and_keep_nobody_from_work(tmp_path: Path, address: str) -> None:
    path, rng = tmp_path / "buffer.sqlite", random.Random(0)
    captured: collections.deque[Frames] = collections.deque(maxlen=500)
    batches: list[BatchPlan[Trajectory]] = []
    over = asyncio.Event()
    context = zmq.asyncio.Context()
    async with service(path, address) as process, contextlib.AsyncExitStack() as stack:
        learner = await stack.enter_async_context(Overheard(address, "learner-0", captured))
        workers = [await stack.enter_async_context(Overheard(address, f"worker-{i}", captured)) for i in range(2)]
        holder = await stack.enter_async_context(Overheard(address, "worker-2", captured))
        mallory = Mallory(context, address)
        async with asyncio.timeout(SOON + FRAMES / 100), asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(work(worker)) for worker in workers]
            learning = tasks.create_task(learn(learner, batches, over))
            while len(batches) < 5:
                await mallory.stats()
            held = await holder.lease()  # its episodes run all the time, so that forged requests can name them
            running = {held.episode(member): {held.version: 1} for member in held.members}
            before = psutil.Process(process.pid).memory_info().rss
            sent = 0
            while sent < FRAMES:
                for number in range(AT_ONCE):
                    if number % 10 == 0:
                        assert await holder.progress(running, 1.0, 0.0) == ()
                    await mallory.send(KINDS[sent % len(KINDS)](rng, captured))
                    sent += 1
                stats = await mallory.stats()
                assert stats.ledger.balances
                assert mallory.accepted == []
                assert stats.dropped + mallory.refused + mallory.past == sent  # every one is counted or answered
            grown = psutil.Process(process.pid).memory_info().rss - before
            steps = len(batches)
            while len(batches) < steps + 3:
                await mallory.stats()
            for episode in running:
                branch = trajectory(episode, version=held.version)
                await holder.deliver(episode, {held.version: SAMPLED}, FINISHED, (branch,))
            over.set()
            await learning
            for task in working:
                task.cancel()
        for worker in workers:
            await worker.deregister()
        stats = await learner.stats()
        assert grown < GROWTH
        assert stats.dropped > FRAMES / 3
        assert mallory.refused > FRAMES / 10
        assert 0 < mallory.malformed < stats.dropped
        trained = [t.id for batch in batches for group in batch.groups for t in group]
        assert len(trained) == len(set(trained)) == len(batches) * 2 * 2
        assert stats.version == len(batches)
        assert set(stats.ledger.discarded) <= {
            "worker_stopped",
            "stale",
        }  # no lease was lost, no word of Mallory's counted
        assert stats.ledger.trained + sum(stats.ledger.withheld.values()) == len(trained) * SAMPLED
        mallory.socket.close()
        context.term()
        reported = (
            f"{sent} messages: {stats.dropped} dropped, {mallory.refused} refused, {mallory.past} of what is over; "
            f"{len(batches)} steps, {grown >> 20} MiB more"
        )
        logging.getLogger(__name__).warning(reported)
    accounts = ledger_report(path)
    assert accounts.balances
    assert accounts.total == stats.ledger


async def test_a_frame_above_the_limit_costs_the_connection_alone(tmp_path: Path, address: str) -> None:
    context = zmq.asyncio.Context()
    async with (
        service(tmp_path / "buffer.sqlite", address) as process,
        BufferClient(address, "w") as client,
        asyncio.timeout(SOON),
    ):
        before = psutil.Process(process.pid).memory_info().rss
        for number in range(20):
            mallory = Mallory(context, address, f"mallory/{number}".encode())
            mallory.socket.setsockopt(zmq.LINGER, 1000)
            await mallory.send([wire.FORMAT, bytes(wire.FRAME_LIMIT + 1)])
            mallory.socket.close()
            await client.stats()
        context.term()
        assert psutil.Process(process.pid).memory_info().rss - before < GROWTH
        mark_served(client, 0)
        assert (await client.lease()).group_id == 0


async def test_whoever_takes_a_workers_name_takes_its_leases_and_no_more(tmp_path: Path, address: str) -> None:
    """Names are no proof; but the one that is no longer the worker is reported, and what it had delivered stays."""
    context = zmq.asyncio.Context()
    async with service(tmp_path / "buffer.sqlite", address), BufferClient(address, "worker-0") as client:
        async with asyncio.timeout(SOON):
            await client.register()
            mark_served(client, 0)
            lease = await client.lease()
            first, second = (lease.episode(member) for member in lease.members)
            await client.deliver(first, {0: SAMPLED}, FINISHED, (trajectory(first),))
            forger = Mallory(context, address, b"worker-0/forged")
            await forger.send(frames_of(m.Envelope(1, m.ReportProgress("worker-0", {second: {0: 1 << 40}}, 0.0, 0.0))))
            assert (await forger.stats()).ledger.generated == SAMPLED
            assert forger.refused == 1  # not the newest process of that name
            await forger.send(frames_of(m.Envelope(2, m.Register("worker-0", "forged"))))
            assert (await forger.stats()).leased_groups == 0
            with pytest.raises(StateError, match="worker-0 is another process now"):
                await client.deliver(second, {0: SAMPLED}, FINISHED, (trajectory(second),))
            stats = await client.stats()
            assert stats.ledger.ready == stats.ledger.generated == SAMPLED
            forger.socket.close()
            context.term()


def any_request(rng: random.Random, now: int) -> tuple[str, m.Request]:
    """A well-formed request that no correct client would send, and its sender; `now` is the buffer's version."""
    episode = f"{rng.randint(0, 9)}.{rng.randint(0, 1)}.{rng.randint(0, 2)}"
    worker, version = rng.choice("ab"), max(0, now + rng.choice([-2, -1, 0, 0, 0, 1]))
    counts = {version: rng.choice([0, 1, SAMPLED, 1 << 40])}
    outcome = rng.choice([FINISHED, Outcome("failed", "tool"), Outcome("failed")])
    kind = rng.choice(m.Request.__args__)
    if kind is m.DeliverEpisode:
        trajectories = (EncodedTrajectory.of(trajectory(episode, rng.randint(0, 1), version)),) * rng.randint(0, 2)
        return worker, m.DeliverEpisode(worker, episode, counts, outcome, trajectories)
    if kind is m.ReportProgress:
        return worker, m.ReportProgress(worker, {episode: counts}, 1.0, 0.5)
    if kind is m.Register:
        return worker, m.Register(worker, "1")
    if kind in (m.RequestLease, m.Deregister):
        return worker, kind(worker)
    if kind is m.RequestFresh:
        return "learner", m.RequestFresh(version, rng.choice([0, 1, 1 << 16]))
    if kind is m.FetchImages:
        return "learner", m.FetchImages((f"{rng.randint(0, 9):064x}.png",) * rng.randint(0, 2))
    if kind is m.DiscardBatch:
        groups = tuple(rng.randint(0, 9) for _ in range(rng.randint(0, 2)))
        return "learner", m.DiscardBatch(version, groups, "critic_warmup")
    if kind is m.SetAside:
        return "learner", m.SetAside(version, (rng.randint(0, 9),), "it says so")
    if kind is m.StepFailed:
        return "learner", m.StepFailed(version, "it says so")
    if kind is m.Configure:
        return "learner", m.Configure(1 << 40, LiveRules(0, 1, 2, "drop"))
    return "learner", m.RequestStats() if kind is m.RequestStats else kind(version)


GIVEN = {
    m.Ack,
    m.LeaseReply,
    m.CancelledEpisodes,
    m.RecoverReply,
    m.GroupsSetAside,
    m.BatchPlan,
    m.ImagesReply,
    m.TrajectoriesReply,
    m.Stats,
}
"""Every kind of reply that is no refusal and that these senders may get."""


async def test_no_order_of_requests_ends_the_service_or_opens_the_ledger(tmp_path: Path, address: str) -> None:
    """Workers and a learner that are who they say they are, and say anything, beside a worker that works."""

    async def persist(client: BufferClient) -> None:
        while True:
            with contextlib.suppress(StateError):  # the learner took back the version that it sampled
                await work(client)

    path, rng, version = tmp_path / "buffer.sqlite", random.Random(0), 0
    context = zmq.asyncio.Context()
    async with (
        service(path, address),
        BufferClient(address, "worker-0") as worker,
        BufferClient(address, "observer") as observer,
        asyncio.timeout(3 * SOON),
    ):
        fuzzers = {name: Mallory(context, address, f"{name}/1".encode()) for name in ("a", "b", "learner")}
        working = asyncio.create_task(persist(worker))
        seen = set[type]()
        for number in itertools.count():
            name, request = any_request(rng, version)
            await fuzzers[name].send(frames_of(m.Envelope(number, request)))
            if number % 5 == 0:
                for one in fuzzers.values():
                    await one.stats()
                stats = await observer.stats()
                version = stats.version
                mark_served(observer, version)
                assert stats.ledger.balances
                assert stats.dropped == 0
                seen = {type(reply) for one in fuzzers.values() for reply in one.accepted}
                if number >= 1500 and seen >= GIVEN:  # which of them are given how often is decided by who is faster
                    break
        working.cancel()
        await worker.deregister()
        assert seen == GIVEN
        assert version > 1
        stats = await observer.stats()
        for one in fuzzers.values():
            one.socket.close()
        context.term()
    assert ledger_report(path).balances
    assert ledger_report(path).total == stats.ledger


def test_every_kind_of_hostile_message_is_made() -> None:
    captured = [
        frames_of(
            m.Envelope(
                1, m.DeliverEpisode("w", "0.0.0", {0: 3}, FINISHED, (EncodedTrajectory.of(trajectory("0.0.0")),))
            )
        )
    ]
    for kind in KINDS:
        assert len({tuple(kind(random.Random(seed), captured)) for seed in range(20)}) > (kind is not hostile.replayed)
