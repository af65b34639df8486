"""`bench cluster`: the buffer with many simulated workers, alone in its process; workers and learner are in this one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import uvloop

from ..buffer.client import BufferClient
from ..buffer.messages import Lease
from ..buffer.schema import process_names
from ..buffer.service import BufferService
from ..buffer.trajectory import FINISHED
from ..launch.launchers.local import free_ports
from ..rpc.security import KeyPair, PeerTable, make_pair
from ..weightsync.fleet import following_fleet
from .buffer_traffic import BUFFER, publishing_fleet
from .buffer_trajectories import sampled, stamped
from .cluster_processes import MeasuredProcess, growth, measured, shared_context
from .result import Result

SIZES = (10, 32, 100, 316, 1000)
"""Workers."""

TOKENS = 1 << 10
"""Of a trajectory."""

GROUPS = 16
"""In a batch; four batches may be outstanding, so that of 1,000 workers most wait for a lease."""

TRAFFIC_S, REPORTS_S = 6.0, 4.0
REPORTS_PER_S = 500.0


def serve_buffer(path: Path, keys: dict[str, KeyPair], fleet: str, shard: int, shards: int, ready: Connection) -> None:
    """Process `shard` of the buffer, until it is killed. Each shard has a part of `GROUPS` of a batch."""
    uvloop.run(_serve(path, keys, fleet, shard, shards, ready))


async def _serve(path: Path, keys: dict[str, KeyPair], fleet: str, shard: int, shards: int, ready: Connection) -> None:
    config = msgspec.structs.replace(BUFFER, groups_per_batch=GROUPS * shards, shards=shards)
    name = process_names(shards)[shard]
    peers = PeerTable({role: pair.public for role, pair in keys.items()})
    (port,) = free_ports(1)
    address = f"tcp://127.0.0.1:{port}"
    service = BufferService(config, path, address, peers=peers, pair=keys[name], shard=shard)
    async with following_fleet(fleet, lambda fleet: service.mark_served(fleet.version)):
        await service.serve(lambda: ready.send((f"{address}#{keys[name].public}",)))


async def buffer(folder: Path, sizes: Sequence[int] = SIZES) -> Result:
    """CPU of the buffer while most workers wait for leases: for a trajectory from its lease to its commit, and for a report."""
    trajectories, reports = list[tuple[int, float]](), list[tuple[int, float]]()
    for size in sizes:
        roles = ("buffer", "learner-0", *(f"worker-{i}" for i in range(size)))
        keys = {role: make_pair() for role in roles}
        (port,) = free_ports(1)
        fleet = f"tcp://127.0.0.1:{port}"
        async with (
            measured(serve_buffer, folder / f"{size}.sqlite", keys, fleet, 0, 1) as process,
            contextlib.AsyncExitStack() as stack,
        ):
            context = shared_context()
            stack.callback(context.term)
            (address,) = process.addresses
            clients = [
                await stack.enter_async_context(BufferClient(address, name, pair=keys[name], context=context))
                for name in roles[1:]
            ]
            learner, *workers = clients
            trajectories.append((size, 1e6 * await _trajectory_s(process, fleet, learner, workers)))
            reports.append((size, 1e6 * await _report_s(process, workers)))
    rows = (
        growth("a trajectory", "us", "worker", trajectories, f"{TOKENS:,} tokens"),
        growth("a report of a worker that waits for a lease", "us", "worker", reports),
    )
    return Result("CPU of the buffer by workers", f"at {sizes[-1]:,}", f"at {sizes[0]:,}", rows)


async def _trajectory_s(
    process: MeasuredProcess, fleet: str, learner: BufferClient, workers: Sequence[BufferClient]
) -> float:
    """Seconds of CPU for one trajectory."""
    async with traffic(fleet, learner, workers) as done:
        await asyncio.sleep(TRAFFIC_S / 3)  # every worker waits for its lease
        before, first = process.cpu_s(), done.trajectories
        await asyncio.sleep(TRAFFIC_S)
        return (process.cpu_s() - before) / max(1, done.trajectories - first)


class Traffic(msgspec.Struct):
    """What the buffer has done so far."""

    trajectories: int = 0
    steps: int = 0


@contextlib.asynccontextmanager
async def traffic(fleet: str, learner: BufferClient, workers: Sequence[BufferClient]) -> AsyncIterator[Traffic]:
    """Workers that deliver as fast as they get leases, and a learner that takes and commits."""
    done = Traffic()

    async def episode(client: BufferClient, lease: Lease, member: int) -> None:
        one = stamped(TOKENS, lease, member)
        await client.deliver(lease.episode(member), {lease.version: sampled(TOKENS)}, FINISHED, (one,))
        done.trajectories += 1

    async def play(client: BufferClient) -> None:
        while True:
            lease = await client.lease()
            await asyncio.gather(*(episode(client, lease, member) for member in lease.members))

    async with publishing_fleet(fleet) as served:
        served(await learner.recover(0))
        await asyncio.gather(*(client.register() for client in workers))

        async def learn() -> None:
            for version in itertools.count():
                await learner.take(version, 60.0)
                await learner.commit(version)
                served(version + 1)
                done.steps += 1

        tasks = [asyncio.create_task(learn()), *(asyncio.create_task(play(client)) for client in workers)]
        try:
            yield done
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
    for error in ended:
        if not isinstance(error, asyncio.CancelledError):
            assert isinstance(error, BaseException)
            raise error


async def _report_s(process: MeasuredProcess, workers: Sequence[BufferClient]) -> float:
    """Seconds of CPU for one report, while every worker waits for a lease: no batch is trained any more."""
    waiting = [asyncio.create_task(_lease_all(client)) for client in workers]
    try:
        await asyncio.sleep(REPORTS_S / 2)
        began, before, sent, replies = time.monotonic(), process.cpu_s(), 0, set[asyncio.Task[tuple[str, ...]]]()
        while (elapsed := time.monotonic() - began) < REPORTS_S or not sent:
            while sent < REPORTS_PER_S * elapsed:
                replies.add(asyncio.create_task(workers[sent % len(workers)].progress({}, 1.0, 0.0)))
                sent += 1
            await asyncio.sleep(0.01)
        await asyncio.gather(*replies)
        return (process.cpu_s() - before) / sent
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _lease_all(client: BufferClient) -> None:
    while True:
        await client.lease()
