"""`slipstream bench buffer`: the buffer under load: its service, producers and a learner, each a process of its own, over the
client that workers use.

    producers ──hello, lease, progress, deliver──> service (SQLite, a file of its own) <──take, commit, served── learner

Invariants:
- A trajectory counts once it was durable, handed to the learner in a batch, and committed.
- Trajectories are made before the clock runs; a producer gives them the ids of its leases and sends them, and no more.
- All jobs of a round end at `Round.until`, which all processes read from the same clock (`time.monotonic`).
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from ..buffer.client import BufferClient
from ..buffer.messages import Lease
from ..buffer.service import BufferService
from ..buffer.trajectory import FINISHED
from ..common import gc as heap
from ..common.process import set_parent_death_signal
from ..configs.schema import Buffer
from ..errors import DeadlineExceeded, with_deadline
from ..launch.launchers.local import free_ports
from ..monitor.timeline import TimelineWriter
from ..rpc.pubsub import StatePublisher
from ..rpc.security import KeyPair, PeerTable, make_pair
from ..weightsync.fleet import Fleet, ReplicaInfo, following_fleet
from .buffer_trajectories import sampled, stamped

BUFFER = Buffer(max_staleness=3, group_size=8)
"""Leases are not what is short: workers may be four batches ahead."""

MOST_WORKERS = 64
"""Producers that a round has keys for."""

CONCURRENCY = 256
"""Episodes that a producer has under way at most."""

PROGRESS_S = 0.5
"""Between a producer's reports, as the worker has it."""

BATCH_TOKENS, MIN_GROUPS, MAX_GROUPS = 1 << 21, 8, 64
"""Tokens of a batch, about, and within which numbers of groups."""

CHECKPOINT_EVERY = 8
"""Batches between checkpoints."""

START_S = 0.3
"""For all processes of a round to hear of it."""

WARM_S = 0.7
"""Connections are made, the first batch fills."""

LONGER = 5
"""Rounds until one carries something, each twice as long as the one before."""

GRACE_S = 30.0
"""How long a job may take to end after the round is over."""

T = TypeVar("T")
Job = Callable[..., T]


class Round(msgspec.Struct, frozen=True):
    """What the processes of one round need to know.

    Attributes:
        address: where the service, or the receiver of a floor, listens.
        fleet: where the learner publishes the version that the fleet serves, as the supervisor does.
        path: the database.
        tokens: of each trajectory.
        groups: in a batch, of `BUFFER.group_size` trajectories each.
        counts_from, until: the part that is measured, in seconds of `time.monotonic`.
        keep: `buffer.keep`.
        recorded: the service writes its series beside the database.
        keys: the key pair of each role, as in a run.
    """

    address: str
    fleet: str
    path: Path
    tokens: int
    groups: int
    counts_from: float
    until: float
    keep: str = BUFFER.keep
    recorded: bool = False
    keys: dict[str, KeyPair] = {}

    def client(self, name: str) -> BufferClient:
        return BufferClient(f"{self.address}#{self.keys['buffer'].public}", name, pair=self.keys[name])


class Took(msgspec.Struct, frozen=True):
    """What went through in `seconds`: `trajectories`, how many of them were in each transaction on average, and how many `cores`
    the processes kept busy meanwhile, all their threads, by what they are."""

    trajectories: int
    seconds: float
    per_transaction: float = 0.0
    cores: dict[str, float] = {}

    @property
    def rate(self) -> float:
        """Trajectories per second."""
        return self.trajectories / self.seconds


class Count:
    """Trajectories from `counts_from` on, counted in lots by the process `who`; the lot during which that moment passes is not
    counted."""

    def __init__(self, counts_from: float, who: str) -> None:
        self._counts_from, self._who = counts_from, who
        self._began = self._last = self._cpu_s = 0.0
        self._trajectories = 0

    def add(self, trajectories: int) -> None:
        """So many more are there now."""
        self._last = time.monotonic()
        if self._began:
            self._trajectories += trajectories
        elif self._last >= self._counts_from:
            self._began, self._cpu_s = self._last, time.process_time()

    def took(self) -> Took:
        """Call it as the counting ends."""
        cores = (time.process_time() - self._cpu_s) / max(time.monotonic() - self._began, 1e-9)
        return Took(self._trajectories, max(self._last - self._began, 1e-9), cores={self._who: cores})


class Rounds:
    """Hands out rounds, each with a port and an empty folder that is gone after it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "round"

    async def run(self, tokens: int, seconds: float, measure: Callable[[Round], Awaitable[T]]) -> T:
        """What `measure` counts in a round that is warm for `seconds`."""
        self._folder.mkdir()
        counts_from = time.monotonic() + START_S + WARM_S
        groups = groups_of(tokens)
        address, fleet = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
        roles = ("buffer", "learner-0", *(f"worker-{i}" for i in range(MOST_WORKERS)))
        path, until, keys = self._folder / "buffer.sqlite", counts_from + seconds, {role: make_pair() for role in roles}
        this = Round(address, fleet, path, tokens, groups, counts_from, until, keys=keys)
        try:
            return await measure(this)
        finally:
            shutil.rmtree(self._folder)

    async def count(self, tokens: int, seconds: float, measure: Callable[[Round], Awaitable[Took]]) -> Took:
        """As `run`, of a round that carries something: where not even two lots come within `seconds`, as of Ray on a slow machine,
        another round is twice as long. Raises DeadlineExceeded where `LONGER` rounds carry nothing."""
        for _ in range(LONGER):
            took = await self.run(tokens, seconds, measure)
            if took.trajectories:
                return took
            seconds *= 2
        raise DeadlineExceeded("the benchmark", "a second lot of trajectories", seconds / 2, "is the machine busy?")


class Crew:
    """Processes that stay for all rounds, so that imports are paid once. An async context manager."""

    def __init__(self, producers: int) -> None:
        def pool(size: int) -> ProcessPoolExecutor:
            spawn = multiprocessing.get_context("spawn")
            return ProcessPoolExecutor(size, mp_context=spawn, initializer=set_parent_death_signal)

        self._pools = [pool(1) for _ in range(producers + 2)]

    async def __aenter__(self) -> Crew:
        self.buffer_pid, *_ = await asyncio.gather(*(self._run(pool, GRACE_S, os.getpid) for pool in self._pools))
        return self

    async def __aexit__(self, *exception: object) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def in_buffer(self, seconds: float, job: Job[T], *arguments: object) -> Awaitable[T]:
        """The result of a job in the buffer's process, which takes at most about `seconds`."""
        return self._run(self._pools[0], seconds, job, *arguments)

    def in_learner(self, seconds: float, job: Job[T], *arguments: object) -> Awaitable[T]:
        return self._run(self._pools[1], seconds, job, *arguments)

    async def in_producers(self, count: int, seconds: float, job: Job[T], *arguments: object) -> list[T]:
        """Results of `count` processes; each is also told its number."""
        pools = self._pools[2 : 2 + count]
        return await asyncio.gather(*(self._run(p, seconds, job, *arguments, n) for n, p in enumerate(pools)))

    async def _run(self, pool: ProcessPoolExecutor, seconds: float, job: Job[T], *arguments: object) -> T:
        done = asyncio.get_running_loop().run_in_executor(pool, job, *arguments)
        name = getattr(job, "__name__", "job")
        return await with_deadline(
            seconds + GRACE_S, done, who="the benchmark", waits_for=name, hint="is the machine busy?"
        )


async def through_the_buffer(crew: Crew, this: Round, producers: int) -> Took:
    """Send trajectories through the service for a round."""
    seconds = this.until - time.monotonic()
    took, served, produced = await asyncio.gather(
        crew.in_learner(seconds, learn, this),
        crew.in_buffer(seconds, serve, this),
        crew.in_producers(producers, seconds, produce, this),
    )
    sent = {"producers": sum(one.cores["producers"] for one in produced)}
    return msgspec.structs.replace(
        took, per_transaction=served.per_transaction, cores={**served.cores, **sent, **took.cores}
    )


def groups_of(tokens: int) -> int:
    """Groups in a batch."""
    return max(MIN_GROUPS, min(MAX_GROUPS, BATCH_TOKENS // tokens // BUFFER.group_size))


# --- in the processes -----------------------------------------------------------------------------------------------


def serve(this: Round) -> Took:
    """The service, until the round is over or SIGTERM; what it stored."""
    heap.freeze_startup_objects()  # as all roles do
    return uvloop.run(_serve(this))


def produce(this: Round, number: int) -> Took:
    """Deliver until the round is over; what was acknowledged."""
    heap.freeze_startup_objects()
    return uvloop.run(_produce(this, number))


def learn(this: Round) -> Took:
    """Take and commit until the round is over."""
    heap.freeze_startup_objects()
    return uvloop.run(take_batches(this, lambda taken: None))


class _Service(BufferService):
    """Counts its transactions that hold trajectories."""

    transactions = stored = 0
    count: Count

    def _pending_write(self) -> Callable[[], bool] | None:
        arrived = len(self._handler.pending.trajectories)
        self.transactions += bool(arrived)
        self.stored += arrived
        self.count.add(arrived)
        return super()._pending_write()


async def _serve(this: Round) -> Took:
    config = msgspec.structs.replace(BUFFER, groups_per_batch=this.groups, keep=this.keep)
    peers = PeerTable({role: pair.public for role, pair in this.keys.items()})
    service = _Service(config, this.path, this.address, peers=peers, pair=this.keys["buffer"])
    service.count = Count(this.counts_from, "service")
    loop = asyncio.get_running_loop()
    loop.call_later(max(0.0, this.until - time.monotonic()), service.stop)
    loop.add_signal_handler(signal.SIGTERM, service.stop)
    with TimelineWriter(this.path.parent if this.recorded else None, "buffer", service.gauges):
        async with following_fleet(this.fleet, lambda fleet: service.mark_served(fleet.version)):
            await service.serve()
    per_transaction = service.stored / max(1, service.transactions)
    return msgspec.structs.replace(service.count.took(), per_transaction=per_transaction)


async def _produce(this: Round, number: int) -> Took:
    delivered = Count(this.counts_from, "producers")
    running: dict[str, dict[int, int]] = {}
    room = CONCURRENCY // BUFFER.group_size
    freed = asyncio.Event()

    async def report() -> None:
        while True:
            await client.progress(dict(running), 0.0, 0.0)
            await asyncio.sleep(PROGRESS_S)

    async def group(lease: Lease) -> None:
        nonlocal room
        await asyncio.gather(*(episode(lease, member) for member in lease.members))
        room += 1
        freed.set()

    async def episode(lease: Lease, member: int) -> None:
        trajectory = stamped(this.tokens, lease, member)
        running[trajectory.episode] = generated = {lease.version: sampled(this.tokens)}
        await client.deliver(trajectory.episode, generated, FINISHED, (trajectory,))
        del running[trajectory.episode]
        delivered.add(1)

    stamped(this.tokens, Lease(0, 0, (0,), 0, 0), 0)  # made before the first lease
    async with this.client(f"worker-{number}") as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(this.until - time.monotonic()), asyncio.TaskGroup() as tasks:
                await client.register()
                tasks.create_task(report())
                while True:
                    while not room:
                        freed.clear()
                        await freed.wait()
                    for lease in await client.leases(room):
                        room -= 1
                        tasks.create_task(group(lease))
    return delivered.took()


@contextlib.asynccontextmanager
async def publishing_fleet(address: str) -> AsyncIterator[Callable[[int], None]]:
    """Publishes a fleet of one replica at `address`; call the function with the version that it serves."""
    publisher = StatePublisher(address, Fleet())
    serving = asyncio.create_task(publisher.serve())

    def served(version: int) -> None:
        replica = ReplicaInfo("engine-0", "", 0, "serving", version, answers=True)
        publisher.publish(Fleet(publisher.state.revision + 1, (replica,)))

    try:
        yield served
    finally:
        serving.cancel()
        await publisher.close()


async def take_batches(this: Round, on_batch: Callable[[int], None]) -> Took:
    """What a learner does, without learning; `on_batch` is told how many trajectories there were so far."""
    count, taken = Count(this.counts_from, "learner"), 0
    async with this.client("learner-0") as client, publishing_fleet(this.fleet) as served:

        async def commit(version: int) -> None:
            await client.commit(version)
            served(version + 1)

        served(await client.recover(0))
        with contextlib.suppress(DeadlineExceeded):
            batch = await client.take(0, this.until - time.monotonic())
            while (left := this.until - time.monotonic()) > 0:
                arrived = sum(len(group) for group in batch.groups)
                version = batch.version + 1
                checkpointed = client.checkpointed(version - version % CHECKPOINT_EVERY)
                # They are sent in this order.
                _, _, batch = await asyncio.gather(commit(batch.version), checkpointed, client.take(version, left))
                taken += arrived
                count.add(arrived)
                on_batch(taken)
    return count.took()
