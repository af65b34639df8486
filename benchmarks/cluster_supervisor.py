"""`bench cluster`: the supervisor's own parts with many simulated roles: fleet, heartbeats, probes, what it publishes.

this process: one guarded connection for each worker, a learner that reports pushes ──> the supervisor's parts, alone in a process
              one subscriber to the fleet for each worker                          <──
one more process answers the supervisor's probes for all replicas
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop
import zmq
import zmq.asyncio

from ..buffer.messages import Ack
from ..common.waits import Wait
from ..configs import Config
from ..errors import with_deadline
from ..launch.launchers.local import Launcher, Placement
from ..launch.supervisor.health import HealthMonitor
from ..launch.supervisor.heartbeat import Heartbeat, HeartbeatSender
from ..launch.supervisor.processes import ProcessManager, RoleProcess
from ..launch.supervisor.push_targets import PushTargets
from ..launch.supervisor.replicas import ReplicaManager
from ..launch.supervisor.sockets import SupervisorSockets
from ..monitor.terminal import View
from ..rpc.client import RpcClient
from ..rpc.pubsub import StateSubscriber
from ..rpc.security import FILE, VARIABLE, KeyPair, configure_client, make_pair, split_address
from ..weightsync.fleet import Fleet, following_fleet
from .cluster_processes import MeasuredProcess, growth, measured, shared_context
from .cluster_publisher import make_publisher
from .cluster_replicas import client_of, serve_replicas
from .result import Result

SIZES = (10, 100, 1000)
"""Workers, and as many replicas."""

BEATS_PER_S = 500.0
"""Of 1,000 workers every two seconds; of fewer as many, so that there are enough to measure."""

BEATS_S = QUIET_S = 10.0
"""Multiples of the five seconds between two probes: all servers are probed at the same time."""

STEPS = 2
ANSWER_S = 0.0005
"""Between two replicas of a cohort whose canaries arrive at the learner: it takes as long to read one."""

COHORTS = 4
FOLLOWED = 16
"""Subscribers that are waited for; the others only receive."""

WAITS = tuple(Wait(who, "a lease from the buffer", 1.0, None, 3) for who in ("worker", "the router of a worker"))
STEP_S = 300.0


class SimulatedProcess:
    """A process that lives until it is ended."""

    pid, lost = 0, False

    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return 0

    async def terminate(self) -> None:
        self._ended.set()

    kill = terminate


class SimulatedLauncher:
    """Starts processes that do nothing; of a `Launcher` nothing else is called here."""

    host = "127.0.0.1"

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> SimulatedProcess:
        return SimulatedProcess()


def supervise(size: int, keys: dict[str, KeyPair], servers: str, folder: Path, ready: Connection) -> None:
    """The supervisor's parts, with `size` workers and replicas, until the process is killed."""
    uvloop.run(_supervise(size, keys, servers, folder, ready))


async def _supervise(size: int, keys: dict[str, KeyPair], servers: str, folder: Path, ready: Connection) -> None:
    config, view, launcher = Config(), View(), cast(Launcher, SimulatedLauncher())
    sockets = SupervisorSockets(launcher.host, config, lambda name, certificate: None)
    sockets.access.table.update({role: pair.public for role, pair in keys.items()})
    processes = ProcessManager(config, folder, launcher, view)
    replicas = ReplicaManager(
        processes,
        launcher,
        sockets.fleet.publish,
        view,
        environment=lambda name, placement: {},
        make_engine=client_of,
        probe_path="/any/health",
        gpus=0,
        pushed=True,
    )
    health = HealthMonitor(processes, replicas, config.launch.heartbeat_s, view)
    async with asyncio.TaskGroup() as tasks:

        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            return tasks.create_task(work)

        for service in (*sockets.services(), health.listen(sockets.signals), health.watch()):
            spawn(service)
        for name in ("learner-0", *(f"worker-{i}" for i in range(size))):
            processes.roles[name] = role = RoleProcess(name)
            await processes.start(role)
        host, port = servers.split(":")
        names = replicas.names(size)
        await replicas.begin(dict.fromkeys(names, Placement(host, int(port))), spawn)
        for name in names:
            await processes.roles[name].ready.wait()
        ready.send((sockets.signals.address, sockets.fleet.address))


async def supervisor(folder: Path, sizes: Sequence[int] = SIZES) -> Result:
    """CPU of the supervisor: for a heartbeat, for a step whose weights all replicas take, and for a second without either."""
    costs: dict[str, list[tuple[int, float]]] = {"beat": [], "step": [], "quiet": []}
    async with measured(serve_replicas) as servers:
        for size in sizes:
            keys = {role: make_pair() for role in ("learner-0", *(f"worker-{i}" for i in range(size)))}
            scratch = folder / str(size)
            scratch.mkdir()
            async with measured(supervise, size, keys, *servers.addresses, scratch) as process:
                signals, fleet = process.addresses
                async with following_many(fleet, keys, size) as followers:
                    with own_keys(scratch, keys["learner-0"]):
                        step = await _step_s(process, signals, fleet, followers, scratch)
                    quiet = await _quiet_s(process)
                    beat = await _beat_s(process, signals, keys, size, quiet)
            costs["quiet"].append((size, 1e3 * quiet))
            costs["beat"].append((size, 1e6 * beat))
            costs["step"].append((size, 1e3 * step))
    each = "worker and replica"
    rows = (
        growth("a heartbeat of a worker", "us", each, costs["beat"]),
        growth("a second of probes and watching", "ms", each, costs["quiet"]),
        growth("a step whose weights all replicas take", "ms", each, costs["step"]),
    )
    title = "CPU of the supervisor by workers, and as many replicas"
    return Result(title, f"at {sizes[-1]:,}", f"at {sizes[0]:,}", rows)


async def _quiet_s(process: MeasuredProcess) -> float:
    began, before = time.monotonic(), process.cpu_s()
    await asyncio.sleep(QUIET_S)
    return (process.cpu_s() - before) / (time.monotonic() - began)


async def _beat_s(
    process: MeasuredProcess, signals: str, keys: Mapping[str, KeyPair], workers: int, quiet_s: float
) -> float:
    """Seconds of CPU for one heartbeat."""
    context = shared_context()
    names = [f"worker-{i}" for i in range(workers)]
    clients = [RpcClient(signals, name, "the supervisor", Ack, pair=keys[name], context=context) for name in names]
    try:
        for _ in range(2):  # connections are made
            for name, client in zip(names, clients, strict=True):
                client.notify(Heartbeat(name, WAITS, "ready"))
        await asyncio.sleep(QUIET_S / 4)
        began, before, sent = time.monotonic(), process.cpu_s(), 0
        while (elapsed := time.monotonic() - began) < BEATS_S or not sent:
            while sent < BEATS_PER_S * elapsed:
                number = sent % workers
                clients[number].notify(Heartbeat(names[number], WAITS, "ready"))
                sent += 1
            await asyncio.sleep(0.01)
        return (process.cpu_s() - before - quiet_s * (time.monotonic() - began)) / sent
    finally:
        for client in clients:
            client.close()
        context.term()


async def _step_s(
    process: MeasuredProcess, signals: str, address: str, followers: Sequence[StateSubscriber[Fleet]], folder: Path
) -> float:
    """Seconds of CPU for one step: a push that reaches all replicas, cohort by cohort. That of probes meanwhile is in it."""
    with HeartbeatSender(signals, "learner-0") as sender:
        targets = PushTargets(client_of, sender.report_replica)
        targets.publisher = make_publisher(folder)
        async with following_fleet(address, targets.update) as fleets:
            await targets.joined.wait()
            await _push(targets, 0, fleets, followers)  # from now on all serve
            before = process.cpu_s()
            for version in range(1, STEPS + 1):
                await _push(targets, version, fleets, followers)
            cpu_s = process.cpu_s() - before
        await targets.close()
        targets.publisher.close()
        return cpu_s / STEPS


async def _push(
    targets: PushTargets,
    version: int,
    fleets: StateSubscriber[Fleet],
    followers: Sequence[StateSubscriber[Fleet]],
) -> None:
    """What the learner says while `version` is verified on all replicas; returns when the followers know it."""
    names = [replica.name for replica in fleets.state.replicas]
    size = max(1, len(names) // COHORTS)
    for cohort in (names[i : i + size] for i in range(0, len(names), size)):
        for name in cohort:
            targets.served(name, version)
            await asyncio.sleep(ANSWER_S)

    def arrived(fleet: Fleet) -> bool:
        return all(replica.version == version for replica in fleet.replicas)

    everywhere = asyncio.gather(*(one.until(arrived) for one in (fleets, *followers)))
    waits_for, hint = f"version {version} to be known everywhere", "is the machine busy?"
    await with_deadline(STEP_S, everywhere, who="the benchmark", waits_for=waits_for, hint=hint)


@contextlib.asynccontextmanager
async def following_many(
    address: str, keys: Mapping[str, KeyPair], workers: int
) -> AsyncIterator[list[StateSubscriber[Fleet]]]:
    """One subscriber to the fleet for each worker; those that are read."""
    context = shared_context()
    endpoint, key = split_address(address)
    read = min(FOLLOWED, workers)
    sockets = list[zmq.asyncio.Socket]()
    try:
        for number in range(read, workers):
            socket = context.socket(zmq.SUB)
            socket.setsockopt(zmq.CONFLATE, 1)
            if key is not None:
                configure_client(socket, key, keys[f"worker-{number}"])
            socket.connect(endpoint)
            socket.subscribe(b"")
            sockets.append(socket)
        async with contextlib.AsyncExitStack() as stack:
            subscribers = [StateSubscriber(address, Fleet(), keys[f"worker-{number}"]) for number in range(read)]
            for subscriber in subscribers:
                await stack.enter_async_context(subscriber)
            for subscriber in subscribers:
                await subscriber.changed(0)
            yield subscribers
    finally:
        for socket in sockets:
            socket.close(linger=0)
        context.term()


@contextlib.contextmanager
def own_keys(folder: Path, pair: KeyPair) -> Iterator[None]:
    """This process is the role with the keys `pair` meanwhile."""
    (folder / FILE).write_bytes(msgspec.json.encode(pair))
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
