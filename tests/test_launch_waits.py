"""Every wait has an owner: while it lasts it can be told, when it is old it is told, and none is without an end."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
from rich.console import Console
from slipstream.common.waits import Wait, current_waits
from slipstream.configs import Config, load
from slipstream.errors import DeadlineExceeded, RoleDied, StoreError, TrackedWait, with_deadline
from slipstream.launch.launchers.local import LocalLauncher, ProcessHandle
from slipstream.launch.run_context import Addresses, RunContext
from slipstream.launch.run_lock import run_lock
from slipstream.launch.supervisor import heartbeat as heartbeat_module
from slipstream.launch.supervisor.control import ControlServer
from slipstream.launch.supervisor.health import (
    OLD_S,
    STALL_FACTOR,
    STALL_S,
    HealthMonitor,
    RoleWait,
    WaitWatchdog,
    by_age,
)
from slipstream.launch.supervisor.heartbeat import Heartbeat, HeartbeatSender, RoleSignal
from slipstream.launch.supervisor.processes import ProcessManager, RoleProcess
from slipstream.monitor.log import logged_to
from slipstream.monitor.terminal import LineView, open_view
from slipstream.rpc import wire
from slipstream.rpc.pubsub import StatePublisher
from slipstream.rpc.server import RpcServer
from slipstream.rpc.wire import RpcMessage
from slipstream.tests.runs import bare_replicas, slipstream
from slipstream.weightsync.fleet import Fleet, ReplicaReport

ROOT = Path(__file__).parent.parent
WAIT_S = 120.0


# --- the waits of one process -------------------------------------------------------------------------------------


async def forever(who: str, waits_for: str, seconds: float = 60.0) -> None:
    await with_deadline(seconds, asyncio.Event().wait(), who=who, waits_for=waits_for, hint="nothing")


async def test_a_wait_is_told_while_it_lasts_and_not_after() -> None:
    assert current_waits() == ()
    task = asyncio.create_task(forever("a", "b", 7.0))
    await asyncio.sleep(0)
    (wait,) = current_waits()
    assert (wait.who, wait.waits_for, wait.deadline_s, wait.alike) == ("a", "b", 7.0, 1)
    assert 0.0 <= wait.age_s < WAIT_S
    task.cancel()
    await asyncio.wait({task})
    assert current_waits() == ()
    with pytest.raises(DeadlineExceeded, match=r"a waited 0\.001 s for b; nothing"):
        await forever("a", "b", 0.001)
    assert current_waits() == ()

    async def broken() -> None:
        assert len(current_waits()) == 1
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await with_deadline(1.0, broken(), who="a", waits_for="b", hint="")
    assert await with_deadline(1.0, asyncio.sleep(0, "done"), who="a", waits_for="b", hint="") == "done"
    assert current_waits() == ()


async def test_of_many_waits_the_oldest_of_each_kind_is_told() -> None:
    with TrackedWait("worker-0", "a lease"):
        tasks = [asyncio.create_task(forever(f"episode {i}.0.{i % 8}", f"version {i}")) for i in range(5000)]
        await asyncio.sleep(0)
        lease, episode = current_waits()
        assert (lease.who, lease.deadline_s) == ("worker-0", None)
        assert (episode.who, episode.waits_for, episode.alike) == ("episode 0.0.0", "version 0", 5000)
        young = msgspec.structs.replace(episode, age_s=1.2)
        assert str(young) == "episode 0.0.0 has waited 1 of 60 s for version 0 (and 4999 like it)"
        tasks[0].cancel()
        await asyncio.wait({tasks[0]})
        assert current_waits()[1].who == "episode 1.0.1"
        assert [wait.who for wait in current_waits(1)] == ["worker-0"]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert current_waits() == ()


def test_threads_may_wait_and_look_at_the_same_time() -> None:
    stop, failed = threading.Event(), list[BaseException]()

    def wait(number: int) -> None:
        try:
            while not stop.is_set():
                with TrackedWait(f"thread {number}", "its turn"):
                    current_waits()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(2000):
        assert len(current_waits()) <= 1
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert not failed
    assert current_waits() == ()


# --- what is remarkable -------------------------------------------------------------------------------------------


def row(
    age: float, deadline: float | None, role: str = "worker-0", who: str = "episode 3", what: str = "tokens"
) -> RoleWait:
    return RoleWait(role, Wait(who, what, age, deadline), 0.0)


def test_an_old_wait_is_told_once() -> None:
    dog = WaitWatchdog()
    assert dog.check([row(OLD_S - 1, 60.0), row(119.0, 240.0), row(9999.0, None)], 0.0) == []
    assert dog.check([row(121.0, 240.0)], 1.0) == ["worker-0: episode 3 has waited 121 of 240 s for tokens already"]
    assert dog.check([row(130.0, 240.0, who="episode 4")], 2.0) == []  # of the same kind
    assert len(dog.check([row(130.0, 240.0), row(130.0, 240.0, role="worker-1")], 3.0)) == 1
    assert dog.check([row(5.0, 240.0)], 4.0) == []  # it is over
    assert len(dog.check([row(150.0, 240.0)], 5.0)) == 1


def test_a_run_without_steps_is_told_of_once_with_its_oldest_waits() -> None:
    dog, waits = (
        WaitWatchdog(),
        [row(5.0, 60.0), row(80.0, None, "learner-0", "learner-0", "the buffer's answer to Take")],
    )
    assert dog.check(waits, 1e6) == []  # no step is due before there were some
    for now in (100.0, 110.0, 130.0):
        dog.stepped(now)
    assert STALL_FACTOR * 20 > STALL_S
    assert dog.check(waits, 130.0 + STALL_FACTOR * 20) == []
    (line,) = dog.check(waits, 131.0 + STALL_FACTOR * 20)
    assert line == (
        "no step for 101 s, the slowest before took 20 s; learner-0: learner-0 has waited 80 s for the buffer's answer to Take; "
        "worker-0: episode 3 has waited 5 of 60 s for tokens"
    )
    assert dog.check(waits, 1e4) == []
    dog.stepped(1e4)
    assert dog.check(waits, 1e4 + 5.0) == []
    assert len(dog.check(waits, 1e4 + STALL_FACTOR * 41)) == 1  # the step that hung counts for twice the slowest, 40 s
    dog.stepped(2e4)
    dog.pause()
    assert dog.check(waits, 1e6) == []


def test_the_oldest_comes_first() -> None:
    assert [r.wait.age_s for r in by_age([row(1.0, None), row(9.0, None), row(5.0, 6.0)])] == [9.0, 5.0, 1.0]


# --- the heart ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def supervised(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HeartbeatSender, zmq.Socket]]:
    """Heartbeats ten times as fast as usual, and the socket that receives them."""
    monkeypatch.setattr(heartbeat_module, "BEAT_S", 0.2)
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    try:
        with HeartbeatSender(f"tcp://127.0.0.1:{port}", "worker-0") as heart:
            yield heart, socket
    finally:
        socket.close(linger=0)
        context.term()


def receive_heartbeat(socket: zmq.Socket, *, stuck: bool = False) -> Heartbeat:
    """The next heartbeat of an event loop that turns, or is stuck."""
    deadline = time.monotonic() + WAIT_S
    while True:
        request = wire.decode(RpcMessage[RoleSignal], socket.recv_multipart()[1:])
        assert request.number == wire.ONE_WAY
        if isinstance(request.message, Heartbeat) and bool(request.message.stuck_at) is stuck:
            return request.message
        assert time.monotonic() < deadline, f"no heartbeat for {WAIT_S:g} s"


def test_a_beat_carries_the_oldest_waits_however_much_else_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with supervised(monkeypatch) as (heart, socket):
        over = threading.Event()

        def chatter() -> None:
            while not over.wait(0.01):
                heart.send_message("hello")

        talker = threading.Thread(target=chatter)
        talker.start()
        try:
            with TrackedWait("worker-0", "a lease"):
                while not (found := receive_heartbeat(socket)).waits:
                    pass
        finally:
            over.set()
            talker.join(WAIT_S)
        assert [(w.who, w.waits_for) for w in found.waits] == [("worker-0", "a lease")]
        while receive_heartbeat(socket).waits:
            pass


def test_a_heartbeat_repeats_what_a_lost_message_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with supervised(monkeypatch) as (heart, socket):
        served = (ReplicaReport("engine-0", 0, 3),)
        heart.ready()
        heart.report_replica(*served, {"engine-0": served[0]})
        while not receive_heartbeat(socket).replicas:
            pass  # what was said at once is lost
        for _ in range(2):
            beat = receive_heartbeat(socket)
            assert (beat.state, beat.replicas) == ("ready", served)
        heart.done()
        while receive_heartbeat(socket).state != "done":
            pass
        assert (receive_heartbeat(socket).state, receive_heartbeat(socket).replicas) == ("done", served)


def test_of_replicas_only_what_changed_is_sent_at_once_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "GATHER_S", 2.0)  # in which this thread gets its turns
    with supervised(monkeypatch) as (heart, socket):
        known = {f"engine-{i}": ReplicaReport(f"engine-{i}", 0, 2) for i in range(1000)}
        for name in ("engine-0", "engine-1", "engine-0"):
            known[name] = ReplicaReport(name, 0, 3)
            heart.report_replica(known[name], known)
        while len((first := receive_heartbeat(socket)).replicas) in (0, len(known)):
            pass  # heartbeats, with none before there was any
        assert first.replicas == (known["engine-0"], known["engine-1"])
        assert receive_heartbeat(socket).replicas == tuple(known.values())
        heart.report_replica(ReplicaReport("engine-7", 0, 4), known)
        heart.__exit__()
        while len((last := receive_heartbeat(socket)).replicas) != 1:
            pass
        assert last.replicas[0].version == 4  # what is not sent yet goes with the end


IMPORTED = """
import asyncio, sys, threading

class Watch:
    def find_spec(self, name, path, target=None):
        if name == "transformers":
            sys.meta_path.remove(self)
            alone = threading.current_thread() is threading.main_thread() and asyncio._get_running_loop() is None
            print("before the event loop" if alone else "beside the event loop", flush=True)

sys.meta_path.insert(0, Watch())
from slipstream.launch.supervisor.entrypoints import run_role
run_role("worker-0")
"""


@pytest.mark.full
def test_a_worker_imports_transformers_before_its_event_loop_is_followed(tmp_path: Path) -> None:
    """On a busy host that takes longer than a role may be silent."""
    addresses = Addresses(*(f"ipc://{tmp_path}/{name}" for name in ("supervisor", "fleet", "buffer")), "127.0.0.1")
    context = RunContext(load("quickstart"), addresses, str(tmp_path), "gloo", str(tmp_path), pushed=True)
    environment = os.environ | context.environment("worker-0")
    with subprocess.Popen(
        [sys.executable, "-c", IMPORTED], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "before the event loop\n"
        finally:
            worker.kill()


def code_of_a_user(ended: threading.Event) -> None:
    ended.wait(WAIT_S)


def test_an_event_loop_that_does_not_turn_is_no_life_and_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    with supervised(monkeypatch) as (heart, socket):

        async def role() -> None:
            follows = asyncio.create_task(heart.follow_loop())
            await asyncio.sleep(0.3)
            with TrackedWait("episode 7", "step"):
                code_of_a_user(ended)
            await asyncio.sleep(0.5)
            follows.cancel()

        thread = threading.Thread(target=asyncio.run, args=(role(),))
        thread.start()
        while "code_of_a_user" not in (stuck := receive_heartbeat(socket, stuck=True)).stuck_at:
            pass  # a thread that got no turn for a while
        assert f"{Path(__file__).name}:" in stuck.stuck_at
        assert stuck.waits[0].who == "episode 7"
        ended.set()
        assert receive_heartbeat(socket).waits == ()
        thread.join(WAIT_S)


# --- the supervisor -----------------------------------------------------------------------------------------------

ROLE = """
import asyncio, sys, time
from slipstream.errors import with_deadline
from slipstream.launch.supervisor.heartbeat import HeartbeatSender

def step_of_a_user():
    time.sleep(600)

async def role(heart):
    follows = asyncio.create_task(heart.follow_loop())
    heart.ready()
    if sys.argv[2] == "stuck":
        await asyncio.sleep(0.1)
        step_of_a_user()
    await with_deadline(500.0, asyncio.Event().wait(), who="episode 3.0.1", waits_for="a completion", hint="")

with HeartbeatSender(sys.argv[1], "worker-0") as heart:
    asyncio.run(role(heart))
"""


class Roles(LocalLauncher):
    """Starts `ROLE` for every role, to beat at `address`; `does` is `wait` or `stuck`."""

    address, does = "", "wait"

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        return await super().start(role, [sys.executable, "-c", ROLE, self.address, self.does], environment)


class Stage:
    """A supervisor's parts around one worker."""

    def __init__(self, folder: Path, config: Config, server: RpcServer[RoleSignal]) -> None:
        self.console = Console(file=io.StringIO(), width=1000)
        view = LineView(config, self.console)
        launcher = Roles(folder, 0)
        launcher.address = server.address
        self.fleets = StatePublisher("tcp://127.0.0.1:*", Fleet())
        self.launcher = launcher
        self.processes = ProcessManager(config, folder, launcher, view)
        replicas = bare_replicas(self.processes, launcher, self.fleets, view)
        self.health = HealthMonitor(self.processes, replicas, config.launch.heartbeat_s, view)
        self.control = ControlServer(folder, replicas, self.fleets.address, self.health.waits)
        self.worker = self.processes.roles["worker-0"] = RoleProcess("worker-0")

    def events(self) -> str:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue()


@contextlib.asynccontextmanager
async def stage(folder: Path, *overrides: str) -> AsyncIterator[Stage]:
    config = load("quickstart", [f"run.dir={folder}", "launch.restarts=0", *overrides])
    (folder / "config.yaml").write_text("")
    server: RpcServer[RoleSignal] = RpcServer("tcp://127.0.0.1:*", "the supervisor", RoleSignal)
    there = Stage(folder, config, server)
    try:
        with run_lock(folder):
            async with asyncio.timeout(2 * WAIT_S), asyncio.TaskGroup() as tasks:
                health, control = there.health, there.control
                kept = [tasks.create_task(w) for w in (health.listen(server), health.watch(), control.serve())]
                yield there
                for task in kept:
                    task.cancel()
    finally:
        await there.launcher.close()
        await there.fleets.close()
        server.close()


async def reported(there: Stage) -> None:
    """Return when the worker has said what it waits for: with one of its next beats, which set nothing that could be awaited."""
    while not there.worker.waits:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_the_command_shows_who_waits_for_what(tmp_path: Path) -> None:
    async with stage(tmp_path) as there:
        await there.processes.start(there.worker)
        await there.worker.ready.wait()
        await reported(there)
        table = asyncio.create_task(asyncio.to_thread(slipstream, "waits", str(tmp_path), "--json"))
        late = asyncio.create_task(forever("the supervisor", "something"))
        rows = json.loads((await table).stdout)
        late.cancel()
        assert [row["wait"]["age_s"] for row in rows] == sorted((row["wait"]["age_s"] for row in rows), reverse=True)
        found = {row["role"]: row for row in rows}
        assert found["worker-0"]["wait"]["who"] == "episode 3.0.1"
        assert found["worker-0"]["wait"]["waits_for"] == "a completion"
        assert found["worker-0"]["wait"]["deadline_s"] == 500.0
        assert found["worker-0"]["heard_s"] < WAIT_S
        assert found["supervisor"]["wait"]["waits_for"] == "something"
        shown = (await asyncio.to_thread(slipstream, "waits", str(tmp_path))).stdout
        assert "3.0.1" in shown  # a narrow column may break the name
        assert "8 min 20 s" in shown
    ended = await asyncio.to_thread(slipstream, "waits", str(tmp_path), check=False)
    assert ended.returncode == 2
    assert "is not running" in ended.stderr


async def test_who_is_killed_for_silence_is_named_with_its_last_wait(tmp_path: Path) -> None:
    async with stage(tmp_path, "launch.heartbeat_s=6") as there:
        await there.processes.start(there.worker)
        watch = asyncio.create_task(there.processes.watch([there.worker]))
        await there.worker.ready.wait()
        await reported(there)
        assert there.worker.process is not None
        os.kill(there.worker.process.pid, signal.SIGSTOP)
        with pytest.raises(RoleDied) as died:
            await watch
        said = r"silent for ([6-9]|\d\d+) s; episode 3\.0\.1 has waited (\d+) of 500 s for a completion"
        assert died.match(rf"worker-0 ended with SIGKILL: {said}; given up after 0 restarts")
        (line,) = [line for line in there.events().splitlines() if "killed" in line]
        assert line.startswith("! worker-0 is killed: silent for ")
        assert "episode 3.0.1 has waited" in line


async def test_time_in_which_the_supervisor_stood_still_is_nobodys_silence(tmp_path: Path) -> None:
    async with stage(tmp_path, "launch.heartbeat_s=6") as there:
        await there.processes.start(there.worker)
        await there.worker.ready.wait()
        assert there.worker.process is not None
        os.kill(there.worker.process.pid, signal.SIGSTOP)  # nothing is heard before it is looked for silent roles
        there.worker.deadline = before = time.monotonic() + 2.0  # they are looked for every 1.5 s
        time.sleep(2.5)  # noqa: ASYNC251  # the event loop stands still, as all of a process does that is stopped
        while there.worker.deadline == before:  # noqa: ASYNC110  # the next look sets nothing that could be awaited
            await asyncio.sleep(0)
        assert there.worker.deadline < float("inf")
        assert "killed" not in there.events()


async def test_who_is_stuck_is_killed_and_it_is_said_where(tmp_path: Path) -> None:
    async with stage(tmp_path, "launch.heartbeat_s=6") as there:
        there.launcher.does = "stuck"
        await there.processes.start(there.worker)
        with pytest.raises(
            RoleDied, match=r"silent for \d+ s, its event loop stuck at .*step_of_a_user; it waited for nothing"
        ):
            await there.processes.watch([there.worker])


def test_an_event_is_in_the_log_of_the_supervisor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=110)
        path = tmp_path / f"logs-{terminal}" / "supervisor.log"
        with logged_to(path, "supervisor"), open_view(load("quickstart"), console) as view:
            view.event("no step for 75 s")
            logging.getLogger("slipstream.launch").warning("dropped a heartbeat")
        logging.getLogger("slipstream.launch").info("the terminal is gone")
        (event, dropped) = path.read_text().splitlines()
        assert event.endswith("INFO    [supervisor] slipstream.monitor.terminal: no step for 75 s")
        assert dropped.endswith("[supervisor] slipstream.launch: dropped a heartbeat")


# --- errors that need no second try -------------------------------------------------------------------------------


def test_a_store_error_is_final_unless_it_may_pass() -> None:
    assert StoreError("the disk is full").final
    assert not StoreError("another process holds the file", final=False).final


# --- no wait without an end ---------------------------------------------------------------------------------------

ROOMS = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"benchmarks", "examples", "tests"}

LIMITED = {
    "subprocess.run",
    "subprocess.check_output",
    "dist.init_process_group",
    "aiohttp.ClientSession",
    "asyncio.wait",
}
"""Calls that wait for ever unless they are given a `timeout`."""

NEVER = {"asyncio.wait_for", "asyncio.timeout", "subprocess.call", "subprocess.check_call", "os.wait", "os.waitpid"}
"""Calls for which there is `errors.with_deadline`, or something to await."""

ALLOWED = {
    ("rpc/client.py", "asyncio.timeout"): "its steps count what it was awake; it raises DeadlineExceeded itself",
    (
        "rollout/loop_watchdog.py",
        "self._thread.join",
    ): "the thread checks every BLOCK_S / CHECKS whether it should stop",
    ("envs/cpu_starvation.py", "self._thread.join"): "the thread checks every TURN_S whether it should stop",
    (
        "rollout/env_guard.py",
        "asyncio.wait",
    ): "its callers have the deadlines, and it heeds them whatever user code does",
    ("buffer/client.py", "asyncio.wait"): "of requests for leases, each of which is a named wait that its caller ends",
    ("agents/session.py", "asyncio.wait"): "of completions that were cancelled; a request has the router's deadline",
    ("agents/gateway/endpoint.py", "asyncio.wait"): "of calls that were cancelled, at the end of an episode",
    ("agents/gateway/server.py", "asyncio.wait"): "for a step of the environment, which has EnvGuard's deadline",
    ("envs/isolation/process.py", "asyncio.timeout"): "ABORT_S, after which the process is killed",
    ("envs/isolation/pool.py", "asyncio.timeout"): "ANSWER_S, after which the process is aborted",
    ("envs/isolation/pool.py", "asyncio.wait"): "the start of a process that was cancelled, which kills it",
    ("envs/sandbox/elsewhere.py", "asyncio.wait"): "the start of a machine, which has START_S",
    ("envs/sandbox/inside/confine.py", "os.waitpid"): "in the sandbox, whose limits the watchdog keeps",
    ("envs/sandbox/inside/guest.py", "os.waitpid"): "WNOHANG",
    ("envs/adapters/inspect/player.py", "os.waitpid"): "of a process that was killed",
    ("envs/adapters/mcp.py", "asyncio.timeout"): "START_S and the tool's limit; raises EnvError or ToolError",
    ("rollout/player.py", "asyncio.timeout"): "the episode's own deadline, an outcome and no error",
    ("rollout/player.py", "asyncio.wait"): "of what was cancelled, within ABORT_S",
    ("rollout/engines/http_client.py", "asyncio.timeout"): "moved with every chunk; it raises DeadlineExceeded itself",
    (
        "rollout/router.py",
        "asyncio.timeout",
    ): "a late load sample is left out; late requests of a removed replica go elsewhere",
    ("rollout/router.py", "asyncio.wait"): "of a probe that was cancelled, within ABORT_S",
    ("rollout/worker.py", "asyncio.timeout"): "a cancel scope; and a late goodbye is not sent, the leases expire",
    (
        "rollout/engines/server/engine_thread.py",
        "asyncio.to_thread self._thread.join",
    ): "the server's end; its launcher kills it",
    ("launch/program/link.py", "asyncio.wait"): "of what was cancelled",
    (
        "launch/program/run.py",
        "asyncio.wait",
    ): "of roles and verbs, which have deadlines of their own; the end has END_S; of what was killed or cancelled",
    ("learner/checkpointing.py", "asyncio.wait"): "of what was cancelled",
    ("learner/replica_updates.py", "asyncio.wait"): "of what was cancelled; a push has push_s",
    ("weightsync/broadcast.py", "asyncio.wait"): "each of them has what is left of push_s",
    ("dashboard/explanation.py", "asyncio.wait"): "of what was cancelled",
    ("rpc/pubsub.py", "asyncio.wait"): "of what was cancelled",
    ("weightsync/publisher.py", "asyncio.wait"): "catch_up has push_s; of what was cancelled",
    ("weightsync/replica.py", "asyncio.wait"): "the callers are within their share of push_s",
    ("weightsync/replica.py", "asyncio.timeout"): "a cancel scope",
    ("dashboard/feed.py", "asyncio.timeout"): "until the next look at the files of the runs, unless the server stops",
    ("dashboard/feed.py", "asyncio.wait"): "of what was cancelled",
    ("envs/isolation/serve.py", "asyncio.wait"): "of an answer that was cancelled",
    ("launch/supervisor/settings.py", "asyncio.wait"): "within WRITE_S, by with_deadline",
    ("common/waits.py", "asyncio.wait"): "of what was cancelled",
    ("common/tasks.py", "asyncio.wait"): "the callers have the deadlines; of what was cancelled",
}
"""(file, call) -> why it may."""


def dotted(node: ast.expr) -> str:
    """`a.b.c` as text, with nothing in front where that is no name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *reversed(parts)])


def endless(source: str) -> Iterator[tuple[int, str]]:
    """(line, call) of the waits in a module that have no deadline, or another than that of `with_deadline`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name, limited = dotted(node.func), any(k.arg in ("timeout", "timeout_s", None) for k in node.keywords)
        bare_join = name.endswith(".join") and not node.args and not limited
        handed = next((dotted(a) for a in node.args if isinstance(a, ast.Attribute) and a.attr == "join"), "")
        if name in NEVER or (name in LIMITED and not limited) or bare_join:
            yield node.lineno, name
        elif handed.endswith("thread.join"):
            yield node.lineno, f"{name} {handed}"


def test_no_wait_in_the_package_is_without_a_deadline_and_a_name() -> None:
    found: dict[tuple[str, str], list[int]] = {}
    top = [path for path in ROOT.glob("*.py") if path.name != "errors.py"]
    for path in [*top, *(p for room in ROOMS for p in (ROOT / room).rglob("*.py"))]:
        for line, call in endless(path.read_text()):
            found.setdefault((str(path.relative_to(ROOT)), call), []).append(line)
    new = {f"{file}:{lines}": call for (file, call), lines in found.items() if (file, call) not in ALLOWED}
    assert not new, f"await through errors.with_deadline, or say in ALLOWED why not: {new}"
    assert set(ALLOWED) <= set(found), "not needed any more"


def test_the_check_sees_a_wait() -> None:
    seen = endless(
        "asyncio.wait({a})\nasyncio.wait({a}, timeout=1)\nthread.join()\n','.join(a)\nthread.join(5)\n"
        "asyncio.to_thread(self._thread.join)\nsubprocess.run(a)\nasyncio.wait_for(a, 1)\nself._event.wait()\n"
    )
    assert [line for line, _ in seen] == [1, 3, 6, 7, 8]
