"""The supervisor, its publishers and the learner's acks among peers that mean them no good; and a whole run."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import io
import os
import random
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq
import zmq.asyncio
from rich.console import Console
from slipstream.buffer import messages as m
from slipstream.common.owned_folders import PRIVATE_VARIABLE
from slipstream.common.waits import Wait
from slipstream.configs import load
from slipstream.errors import ConfigError, RequestRefused
from slipstream.launch.launchers.local import LocalLauncher
from slipstream.launch.run_context import VARIABLE, RunContext
from slipstream.launch.run_lock import run_lock
from slipstream.launch.supervisor.control import (
    AddReplicas,
    ChangeSettings,
    Command,
    CommandAccepted,
    ControlServer,
    GetStatus,
    RemoveReplica,
    Reply,
    RunStatus,
    read_control_address,
    send_command,
)
from slipstream.launch.supervisor.health import HealthMonitor
from slipstream.launch.supervisor.heartbeat import (
    SIGNAL_BYTES,
    Heartbeat,
    HeartbeatSender,
    RoleFailed,
    RoleMessage,
    RoleSignal,
    StepReported,
    StepSummary,
)
from slipstream.launch.supervisor.processes import ProcessManager, RoleProcess
from slipstream.monitor.terminal import TerminalView
from slipstream.rpc import wire
from slipstream.rpc.client import RpcClient, RpcNotifier
from slipstream.rpc.pubsub import StatePublisher, StateSubscriber
from slipstream.rpc.security import KeyPair, configure_client, make_pair, read_pair, split_address
from slipstream.rpc.server import RpcServer
from slipstream.rpc.wire import ONE_WAY, RpcMessage
from slipstream.tests import hostile
from slipstream.tests.hostile import Frames
from slipstream.tests.runs import (
    ENDLESS,
    SMALL,
    Background,
    bare_replicas,
    check_accounts,
    leftovers,
    metrics,
    tiny_policy,
)
from slipstream.weightsync.fleet import FalseReplies, Fleet, ReplicaInfo, ReplicaReport
from slipstream.weightsync.plan import AckCollector, WeightAck, send_ack

MESSAGES = int(os.environ.get("SLIPSTREAM_HOSTILE_MESSAGES", "3000"))
"""To each port; `SLIPSTREAM_HOSTILE_MESSAGES=100000` is the real thing."""

SOON = 60.0 + MESSAGES / 100
GREETING_S = 3.0  # of a busy process, too
KINDS = tuple(kind for kind in hostile.KINDS if kind not in (hostile.forged_ids, hostile.replies))
"""Those that know no message of the buffer."""

SUMMARY = StepSummary(3, 0.5, 0.25, 1, 100.0, 50.0, 70.0, 0.1, 0.2, 4, 2, 1, {"finished": 7, "failed_tool": 1})
SIGNALS: tuple[RoleSignal, ...] = (
    Heartbeat(
        "worker-0",
        (Wait("worker-0", "a lease", 3.0, None), Wait("episode 1.0.0", "a completion", 61.0, 70.0, 9)),
        "ready",
        "loop.py:3 run",
        false_replies=(FalseReplies("engine-0", 0, 1, 0.5, "a log-prob of 0.5"),),
    ),
    Heartbeat("learner-0", state="ready", replicas=(ReplicaReport("engine-0", 0, 3),), checkpoint=2),
    StepReported("learner-0", SUMMARY),
    RoleMessage("worker-0", "an episode failed"),
    RoleFailed("worker-0", "StoreError: gone", expected=True),
)
COMMANDS: tuple[Command, ...] = (GetStatus(), AddReplicas(1), ChangeSettings(("buffer.max_staleness=2",)))


def frames_of(message: object, number: int = ONE_WAY) -> Frames:
    return [bytes(frame) for frame in wire.encode(RpcMessage(number, message))]


def some(rng: random.Random, honest: Sequence[object], number: int) -> Frames:
    captured = [frames_of(message, rng.choice([ONE_WAY, 1 + number])) for message in honest]
    return KINDS[number % len(KINDS)](rng, captured)


class Stage:
    """What the supervisor serves, without processes."""

    def __init__(self, folder: Path) -> None:
        config = load("quickstart", [f"run.dir={folder}"])
        (folder / "config.yaml").write_text("")
        self.console = Console(file=io.StringIO(), width=200, force_terminal=True)
        self.view = TerminalView(config, self.console)
        launcher = LocalLauncher(folder, 0)
        self.processes = ProcessManager(config, folder, launcher, self.view)
        self.fleet: StatePublisher[Fleet] = StatePublisher("tcp://127.0.0.1:*", Fleet())
        replicas = bare_replicas(self.processes, launcher, self.fleet, self.view)
        self.health = HealthMonitor(self.processes, replicas, 1000.0, self.view)
        self.signals: RpcServer[RoleSignal] = RpcServer(
            "tcp://127.0.0.1:*", "the supervisor", RoleSignal, frame_limit=SIGNAL_BYTES
        )
        self.control = ControlServer(folder, replicas, self.fleet.address, self.health.waits)
        for name in ("worker-0", "learner-0"):
            self.processes.roles[name] = RoleProcess(name)

    def drawn(self) -> str:
        """What a terminal shows now. What was written before is left out."""
        assert isinstance(self.console.file, io.StringIO)
        self.console.file = io.StringIO()
        self.console.print(self.view._draw())
        return self.console.file.getvalue()


@contextlib.asynccontextmanager
async def stage(folder: Path) -> AsyncIterator[Stage]:
    there = Stage(folder)
    with run_lock(folder):
        async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
            services = (
                there.fleet.serve(),
                there.control.serve(),
                there.health.listen(there.signals),
                there.health.watch(),
            )
            kept = [tasks.create_task(service) for service in services]
            await until((folder / "control.json").exists)
            try:
                yield there
            finally:
                for task in kept:
                    task.cancel()
    there.signals.close()
    await there.fleet.close()


async def until(condition: Callable[[], bool]) -> None:
    """For what has no event of its own."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


class Mallory:
    """A peer that says anything to `address`, with the key `pair` where that is guarded. A frame above the limit costs it the
    connection: then it comes again as another."""

    def __init__(self, address: str, kind: int = zmq.DEALER, pair: KeyPair | None = None) -> None:
        self._address, self._kind, self._pair = address, kind, pair
        self._context = zmq.Context()
        self.socket = self._connected()

    def __enter__(self) -> Mallory:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def try_send(self, frames: Frames) -> bool:
        """False where there is no room; after many of these it connects again."""
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            self._failed += 1
            if self._failed > 100:
                self.socket.close(linger=0)
                self.socket = self._connected()
            return False
        return True

    async def send(self, frames: Frames) -> None:
        await until(lambda: self.try_send(frames))
        await asyncio.sleep(0)

    async def receive(self) -> Frames:
        while True:
            with contextlib.suppress(zmq.Again):
                return self.socket.recv_multipart(zmq.NOBLOCK)
            await asyncio.sleep(0.001)

    def _connected(self) -> zmq.Socket[bytes]:
        self._failed = 0
        made = self._context.socket(self._kind)
        endpoint, key = split_address(self._address)
        if key is not None:
            configure_client(made, key, self._pair)
        made.connect(endpoint)
        return made


async def test_hostile_signals_end_no_supervisor_and_spoil_no_view(tmp_path: Path) -> None:
    rng = random.Random(1)
    async with stage(tmp_path) as there:
        with Mallory(there.signals.address) as mallory:
            for number in range(MESSAGES):
                await mallory.send(some(rng, SIGNALS, number))
                if number % 500 == 0:
                    await asyncio.sleep(0.01)
                    there.drawn()
            await mallory.send(frames_of(StepReported("learner-0", SUMMARY)))
            await mallory.send(frames_of(RoleMessage("worker-0", "the last word")))
            await until(lambda: "the last word" in there.drawn())
        assert there.signals.dropped > MESSAGES / 3
        assert there.health.last_step == SUMMARY
        control = read_control_address(tmp_path)
        assert await send_command(control, GetStatus(), RunStatus)  # its waits are decoded by who asked


ROWS: tuple[object, ...] = (
    [],
    [1, 2],
    {"step": [1]},
    {**msgspec.to_builtins(SUMMARY), "reward_mean": float("nan")},
    {**msgspec.to_builtins(SUMMARY), "reward_mean": float("inf")},
    {**msgspec.to_builtins(SUMMARY), "outcomes": ["failed_tool"]},
    {**msgspec.to_builtins(SUMMARY), "outcomes": {"failed_tool": "many"}},
    {**msgspec.to_builtins(SUMMARY), "staleness_max": -1},
    {**msgspec.to_builtins(SUMMARY), "version": 1 << 40},
)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row)[-40:])
async def test_a_row_of_a_step_that_is_none_is_refused_by_its_name(tmp_path: Path, row: object) -> None:
    """A list in its place once ended a run, in the view."""
    async with stage(tmp_path) as there:
        message = {"type": "StepReported", "role": "learner-0", "summary": row}
        with Mallory(there.signals.address) as mallory:
            await mallory.send([wire.FORMAT + msgspec.msgpack.encode([7, message])])
            (answer,) = wire.decode(list[RpcMessage[wire.RpcRefusal]], await mallory.receive())
        assert answer.number == 7
        assert answer.message.reason.startswith("that is no request: ")
        assert "summary" in answer.message.reason
        assert there.health.last_step is None
        assert there.signals.dropped == 1


async def test_what_only_the_learner_knows_counts_from_it_alone(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        worker, learner = there.processes.roles["worker-0"], there.processes.roles["learner-0"]
        forged = Heartbeat("worker-0", (), "done", replicas=(ReplicaReport("engine-0", 0, 9),), checkpoint=9)
        lies = Heartbeat("learner-0", false_replies=(FalseReplies("engine-0", 0, 99, 99.0, "it lies"),))
        with Mallory(there.signals.address) as mallory:
            for signal in (forged, lies, StepReported("worker-0", SUMMARY), RoleMessage("nobody", "x")):
                await mallory.send(frames_of(signal))
            await mallory.send(frames_of(RoleMessage("worker-0", "\x1b[2J is no text")))
            await until(lambda: "is no text" in there.drawn())
            drawn = there.drawn()
            assert "\x1b[2J" not in drawn
            assert "\\x1b[2J is no text" in re.sub(r"\x1b\[[\d;]*m", "", drawn)
            assert worker.ready.is_set()  # it is a sign of life
            assert not worker.done.is_set()
            assert there.health._replicas.suspicion.counts == {}  # only those who ask replicas speak of their replies
            assert (worker.checkpoint, there.health.last_step, there.health.foreign) == (0, None, 1)
            await mallory.send(frames_of(Heartbeat("learner-0", (), "done", checkpoint=9)))
            await learner.done.wait()
            assert learner.checkpoint == 9


async def test_a_flood_of_signals_leaves_the_event_loop_to_others(tmp_path: Path) -> None:
    """Also where they come faster than they are read."""
    async with stage(tmp_path) as there:
        over, beat = threading.Event(), Heartbeat("worker-0", state="ready")

        def flood() -> None:
            with RpcNotifier(there.signals.address, linger_ms=0) as notifier:
                while not over.is_set():
                    notifier.notify(beat)

        threads = [threading.Thread(target=flood) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            await until(lambda: there.signals.received > 2000)
            assert await send_command(read_control_address(tmp_path), GetStatus(), RunStatus)
        finally:
            over.set()
            for thread in threads:
                thread.join()


async def test_hostile_commands_end_no_run_and_change_nothing(tmp_path: Path) -> None:
    rng = random.Random(2)
    async with stage(tmp_path) as there:
        control = read_control_address(tmp_path)
        wrong: list[object] = [RemoveReplica("engine-7"), AddReplicas(0), GetStatus()]
        with Mallory(control.address, pair=control.pair) as mallory:
            for number in range(MESSAGES):
                await mallory.send(some(rng, wrong, number))
        assert (await send_command(control, GetStatus(), RunStatus)).replicas == ()
        for count in (-1, 0, 1001, 1 << 60):
            with pytest.raises(ConfigError, match=f"{count} replicas cannot be added; allowed are 1 to 1000"):
                await send_command(control, AddReplicas(count), CommandAccepted)
        client = RpcClient(control.address, "a stranger", "the supervisor", Reply, pair=control.pair)
        try:
            with pytest.raises(
                RequestRefused, match="the supervisor refused WeightAck of a stranger: that is no request"
            ):
                await client.request(WeightAck("engine-0#1", 0, 3), RunStatus, 30.0)
        finally:
            client.close()
        assert there.fleet.state == Fleet()


async def test_hostile_peers_of_a_publisher_are_heard_by_none(tmp_path: Path) -> None:
    rng = random.Random(3)
    publisher: StatePublisher[Fleet] = StatePublisher("tcp://127.0.0.1:*", Fleet())
    honest = Fleet(1, (ReplicaInfo("engine-0", "http://127.0.0.1:1", 0, "serving", 3, True),))
    async with asyncio.timeout(SOON), asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(publisher.serve())
        async with StateSubscriber(publisher.address, Fleet()) as follower:
            with Mallory(publisher.address, zmq.XSUB) as mallory:
                for number in range(MESSAGES):
                    await mallory.send([frame[:200] for frame in some(rng, [honest], number)][:8])
                await until(lambda: publisher.dropped > 0)
                await mallory.send([bytes(1 << 20)])
            for _ in range(20):  # of no protocol at all
                host, port = publisher.address.removeprefix("tcp://").split(":")
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(rng.randbytes(1000))
            publisher.publish(honest)
            assert await follower.changed(0) == honest
            async with StateSubscriber(publisher.address, Fleet()) as late:
                assert await late.changed(0) == honest
        serving.cancel()
    await publisher.close()


async def test_a_follower_takes_no_state_that_is_none(tmp_path: Path) -> None:
    """A publisher that is not what it should be."""
    rng, context = random.Random(4), zmq.asyncio.Context()
    publisher = context.socket(zmq.XPUB)
    publisher.setsockopt(zmq.LINGER, 0)
    publisher.bind("tcp://127.0.0.1:*")
    address = publisher.getsockopt_string(zmq.LAST_ENDPOINT)
    honest = Fleet(1 << 40, (ReplicaInfo("engine-0", "http://127.0.0.1:1", 0, "serving", 3, True),))
    frame = bytes(wire.encode(honest)[0])
    absurd = [
        {"revision": 1 << 50, "replicas": replicas}
        for replicas in (
            [],
            {},
            [[]],
            [{"name": "engine-0"}],
            [{"name": "engine-0", "url": 3}],
            [{"name": "engine-0", "url": "http://x", "version": -1}],
            [{"name": "engine-0", "url": "http://x", "version": 1 << 31}],
            [{"name": "engine-0", "url": "http://x", "state": "lying"}],
        )[1:]
    ]
    async with asyncio.timeout(SOON), StateSubscriber(address, Fleet()) as follower:
        await publisher.recv()
        for state in absurd:
            await publisher.send(wire.FORMAT + msgspec.msgpack.encode(state))
        for _ in range(MESSAGES // 4):
            cut = bytearray(frame[: rng.randrange(1, len(frame))])
            cut[rng.randrange(len(cut))] ^= rng.randint(1, 255)
            await publisher.send(bytes(cut))
        await publisher.send(frame)
        assert await follower.changed((1 << 40) - 1) == honest
    publisher.close()
    context.term()


async def test_hostile_acks_settle_no_push() -> None:
    rng = random.Random(5)
    acks = AckCollector("127.0.0.1")
    honest = [WeightAck("engine-0#1", 0, 3), WeightAck("engine-0#1", 0, 3, "no room")]
    try:
        async with asyncio.timeout(SOON):
            with acks.expect("engine-0", 3, 1) as expected, Mallory(acks.address) as mallory:
                for number in range(MESSAGES):
                    await mallory.send(some(rng, honest, number))
                done = asyncio.create_task(expected.complete())
                await asyncio.sleep(0)
                assert not done.done()
                await asyncio.to_thread(send_ack, acks.address, WeightAck(expected.receiver, 0, 3))
                await done
    finally:
        acks.close()


async def test_what_a_role_says_is_cut_to_what_the_supervisor_takes(tmp_path: Path) -> None:
    """Else its heartbeats would be dropped, and it would be taken for dead."""
    async with stage(tmp_path) as there:
        long = "x" * 100_000
        with HeartbeatSender(there.signals.address, "worker-0") as heartbeat:
            heartbeat.send_message(long)
            heartbeat.failed(long, expected=True)
            heartbeat.ready()
            worker = there.processes.roles["worker-0"]
            await worker.ready.wait()
        assert set(worker.error) == {"x"}
        assert there.signals.dropped == 0


# --- a whole run ------------------------------------------------------------------------------------------------------


def guarded_addresses(going: Background, run: Path) -> list[tuple[str, int]]:
    """Where processes of the run speak ZeroMQ, each with the public key of its process, and the kind of socket that may connect."""
    roles, supervisor = going.roles(), psutil.Process(going.process.pid)
    context = msgspec.json.decode(roles["worker-0"].environ()[VARIABLE], type=RunContext)
    published = {
        split_address(a)[0] for a in (context.addresses.fleet, context.addresses.settings, context.addresses.peers)
    }
    control = split_address(read_control_address(run).address)
    found = list[tuple[str, int]]()
    for process in [supervisor, *roles.values()]:
        for port in zmq_ports(process):
            endpoint = f"tcp://127.0.0.1:{port}"
            if endpoint == control[0]:
                key = control[1]
            elif process is supervisor:
                key = split_address(context.addresses.supervisor)[1]
            else:
                key = read_pair(process.environ()[PRIVATE_VARIABLE]).public
            found.append((f"{endpoint}#{key}", zmq.XSUB if endpoint in published else zmq.DEALER))
    return found


def zmq_ports(process: psutil.Process) -> list[int]:
    """Ports of 127.0.0.1 at which a process speaks ZeroMQ: it greets whoever connects, within `GREETING_S`."""
    ports = {c.laddr.port for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    with contextlib.ExitStack() as stack:
        strangers, until = dict[int, socket.socket](), time.monotonic() + GREETING_S
        for port in sorted(ports):
            with contextlib.suppress(OSError):
                strangers[port] = stack.enter_context(socket.create_connection(("127.0.0.1", port), GREETING_S))
        return [port for port, stranger in strangers.items() if greets(stranger, until)]


def greets(stranger: socket.socket, until: float) -> bool:
    """Whether ZeroMQ's greeting comes. One that comes late is read after the wait for a port that says nothing."""
    stranger.settimeout(max(0.1, until - time.monotonic()))
    with contextlib.suppress(OSError):
        greeting = stranger.recv(10, socket.MSG_WAITALL)
        return greeting[:1] == b"\xff" and greeting[9:10] == b"\x7f"
    return False


@pytest.mark.full
def test_a_run_trains_on_while_every_port_gets_hostile_messages(tmp_path: Path) -> None:
    policy, run, rng = tiny_policy(tmp_path / "policy"), tmp_path / "run", random.Random(6)
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, ENDLESS)
    engine = ("rollout.engine.kind=transformers", "weightsync.transport=shared")
    said: list[object] = [
        *SIGNALS,
        *COMMANDS,
        WeightAck("engine-0#1", 0, 3),
        m.RequestStats(),
        m.ReportProgress("mallory", {"0.0.0": {0: 3}}, 1.0, 1.0),
        m.CommitBatch(1),
        m.SetAside(1, (0, 1), "they are in the way"),
        m.Recover(0),
    ]
    with Background(*arguments, *engine) as going:
        going.until_step(2)
        addresses = guarded_addresses(going, run)
        assert len(addresses) == 8  # signals, fleet, settings, keys, tokens, commands; buffer; acks
        pair = read_pair(going.roles()["worker-0"].environ()[PRIVATE_VARIABLE])
        sent: collections.Counter[str] = collections.Counter()
        with contextlib.ExitStack() as stack:
            # One that proves a worker's key, and one that proves a key of its own, at each address.
            peers = {
                (address, name): stack.enter_context(Mallory(address, kind, key))
                for address, kind in addresses
                for name, key in (("worker", pair), ("stranger", make_pair()))
            }
            deadline = time.monotonic() + 120.0
            while min(sent[address] for address, _ in addresses) < MESSAGES and time.monotonic() < deadline:
                for (address, name), mallory in peers.items():
                    if mallory.try_send(some(rng, said, sent[address])) and name == "worker":
                        sent[address] += 1
        before = max(row["step"] for row in metrics(run))
        going.until_step(before + 3)
        going.process.send_signal(2)
        output = going.output()
        assert going.process.returncode == 130, output
    assert sum(sent.values()) > 3 * MESSAGES
    assert "restart" not in output
    assert "unusable" not in output
    assert leftovers(run) == []
    assert metrics(run)[-1]["messages_dropped"] > 0
    check_accounts(run)
