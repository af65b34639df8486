"""Replicas as the supervisor keeps them: real processes and sockets, with a small HTTP server where an engine would be."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
import pytest
from aiohttp import web
from rich.console import Console
from slipstream.configs import Config, load
from slipstream.errors import ConfigError, DeadlineExceeded, RequestRefused, RoleDied, first_cause
from slipstream.launch.launchers.local import LocalLauncher, Placement, ProcessHandle
from slipstream.launch.run_lock import run_lock
from slipstream.launch.supervisor import control
from slipstream.launch.supervisor.control import (
    AddReplicas,
    CommandAccepted,
    ControlServer,
    GetStatus,
    RemoveReplica,
    Reply,
    RunStatus,
    read_control_address,
    send_command,
)
from slipstream.launch.supervisor.processes import ProcessManager, RoleProcess
from slipstream.launch.supervisor.replicas import MAX_MISSED_PUSHES, Spawn
from slipstream.launch.supervisor.supervisor import Supervisor
from slipstream.monitor.terminal import LineView
from slipstream.rollout.engines.http_client import HttpClient, is_healthy
from slipstream.rpc import security as curve
from slipstream.rpc.client import RpcClient
from slipstream.rpc.pubsub import StatePublisher, StateSubscriber
from slipstream.rpc.security import write_pair
from slipstream.tests.runs import bare_replicas, slipstream
from slipstream.weightsync.fleet import FalseReplies, Fleet, ReplicaInfo, ReplicaReport

WAIT_S = 240.0

SERVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer()

    def do_POST(self):
        print(self.path, flush=True)  # first: the test may end this process as soon as it has the answer
        self.answer()

    def answer(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass

host, port = sys.argv[1].split(":")
http.server.HTTPServer((host, int(port)), Handler).serve_forever()
"""


WRONG = "engine-8"
"""A replica that finds its config to be wrong."""

NOWHERE = "engine-9"
"""A replica whose place is lost before its process starts."""


class SmallServers(LocalLauncher):
    """Starts `SERVER` where an engine is to be started."""

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        if role == NOWHERE:
            raise RoleDied(f"the place of {role} is lost")
        listen = command[command.index("--listen") + 1]
        code = "raise SystemExit(2)" if role == WRONG else SERVER
        return await super().start(role, [sys.executable, "-S", "-c", code, listen], environment)


class Stage:
    """Replicas with all that they need, but neither learner nor workers."""

    def __init__(self, config: Config, folder: Path) -> None:
        self.folder = folder
        self.console = Console(file=(folder / "events").open("w"), width=1000)
        view = LineView(config, self.console)
        launcher = SmallServers(folder, 0)
        self.processes = ProcessManager(config, folder, launcher, view)
        self.fleets = StatePublisher("tcp://127.0.0.1:*", Fleet())
        self.launcher = launcher
        self.view = view
        self.replicas = bare_replicas(self.processes, launcher, self.fleets, view)

    def events(self) -> str:
        self.console.file.flush()
        return (self.folder / "events").read_text()


@contextlib.asynccontextmanager
async def stage(folder: Path, count: int, *overrides: str) -> AsyncIterator[tuple[Stage, StateSubscriber[Fleet]]]:
    """`count` replicas that answer, and a follower of their fleet."""
    config = load("quickstart", [f"run.dir={folder}", *overrides])
    (folder / "config.yaml").write_text("")
    there = Stage(config, folder)
    replicas = there.replicas
    try:
        with run_lock(folder):
            async with (
                asyncio.timeout(WAIT_S),
                StateSubscriber(there.fleets.address, Fleet()) as feed,
                asyncio.TaskGroup() as tasks,
            ):
                kept: list[asyncio.Task[None]] = []

                def keep(work) -> asyncio.Task[None]:
                    kept.append(tasks.create_task(work))
                    return kept[-1]

                keep(there.fleets.serve())
                keep(ControlServer(folder, replicas, there.fleets.address).serve())
                names = replicas.names(count)
                await replicas.begin(await there.launcher.place(dict.fromkeys(names, 0)), keep)
                await feed.until(lambda fleet: len(fleet.replicas) == count and all(s.answers for s in fleet.replicas))
                yield there, feed
                for task in kept:
                    task.cancel()
    finally:
        await there.launcher.close()
        await there.fleets.close()


def replica_info(fleet: Fleet, name: str) -> ReplicaInfo:
    found = fleet.replica(name)
    assert found is not None
    return found


async def test_a_process_that_ends_is_in_the_fleet_before_it_is_started_again(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as (there, feed):
        there.replicas.update(ReplicaReport("engine-0", 0, 4))
        assert replica_info(await feed.until(lambda f: f.replicas[0].state == "serving"), "engine-0").version == 4
        (row,) = there.replicas.listed()
        assert row.pid is not None
        assert row.state == "serving"
        there.replicas.update(ReplicaReport("engine-0", 0, 4, asleep=True))
        assert there.replicas.listed()[0].state == "asleep"
        os.kill(row.pid, signal.SIGKILL)
        dead = replica_info(await feed.until(lambda f: f.replicas[0].incarnation == 1), "engine-0")
        assert (dead.state, dead.version, dead.answers) == ("starting", None, False)
        await feed.until(lambda f: f.replicas[0].answers)
        assert there.replicas.listed()[0].pid != row.pid
        there.replicas.update(ReplicaReport("engine-0", 0, 9))  # of the process that is dead
        assert replica_info(there.replicas.fleet, "engine-0").state == "starting"
        there.replicas.update(ReplicaReport("engine-0", 1, 5))
        there.replicas.update(ReplicaReport("engine-0", 1, None, 1, "it was late"))
        assert (
            replica_info(await feed.until(lambda f: f.revision >= there.replicas.fleet.revision), "engine-0").version
            is None
        )
        assert "! engine-0 was left out of a push: it was late" in there.events()


async def test_commands_over_the_control_channel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(tmp_path, 1) as (there, feed):
        there.replicas.update(ReplicaReport("engine-0", 0, 0))
        where = read_control_address(tmp_path)
        with pytest.raises(ConfigError, match="engine-0 is the last serving replica"):
            await send_command(where, RemoveReplica("engine-0"), CommandAccepted)
        accepted = await send_command(where, AddReplicas(2), CommandAccepted)
        assert accepted.names == ("engine-1", "engine-2")
        fleet = await feed.until(lambda f: f.revision >= accepted.revision and all(s.answers for s in f.replicas))
        assert len({s.url for s in fleet.replicas}) == 3
        with pytest.raises(ConfigError, match="engine-0 is the last serving replica"):
            await send_command(where, RemoveReplica("engine-0"), CommandAccepted)  # the others have no weights yet
        there.replicas.update(ReplicaReport("engine-2", 0, 0))
        before = {row.name: row for row in (await send_command(where, GetStatus(), RunStatus)).replicas}
        assert [row.state for row in before.values()] == ["serving", "starting", "serving"]
        await send_command(where, RemoveReplica("engine-0"), CommandAccepted)
        await feed.until(lambda f: f.replica("engine-0") is None)
        pid = before["engine-0"].pid
        assert pid is not None
        assert not psutil.pid_exists(pid)
        assert "/pause?mode=abort" in (tmp_path / "engine-0.log").read_text()  # its requests came back first
        assert set(there.processes.roles) == {"engine-1", "engine-2"}
        assert (await send_command(where, AddReplicas(1), CommandAccepted)).names == ("engine-3",)
        write_pair(tmp_path)
        thief = msgspec.structs.replace(where, folder=str(tmp_path))
        monkeypatch.setattr(control, "REPLY_S", 3.0)
        with pytest.raises(DeadlineExceeded, match="waited 3 s for the supervisor"):
            await send_command(thief, AddReplicas(1), CommandAccepted)
        assert set(there.processes.roles) == {"engine-1", "engine-2", "engine-3"}
        for private in (where.folder, f"{where.folder}/curve.json"):
            assert os.stat(private).st_mode & 0o77 == 0
        assert where.pair.secret not in (tmp_path / "control.json").read_text()
    assert not (tmp_path / "control.json").exists()
    with pytest.raises(ConfigError, match="holds no key pair"):
        curve.read_pair.__wrapped__(where.folder)


async def test_one_that_dies_while_it_leaves_is_not_started_again(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as (there, feed):
        there.replicas.update(ReplicaReport("engine-0", 0, 0))
        there.replicas.update(ReplicaReport("engine-1", 0, 0))
        process = there.processes.roles["engine-0"].process
        assert process is not None
        await there.replicas.remove("engine-0")
        await process.kill()
        await feed.until(lambda f: f.replica("engine-0") is None)
        assert "restart" not in there.events()
        assert "! engine-0 removed" in there.events()


async def spend_restarts(there: Stage, feed: StateSubscriber[Fleet], name: str) -> None:
    """Kill `name` twice; it may be started again once."""
    for incarnation in (0, 1):
        await feed.until(
            lambda f, n=incarnation: replica_info(f, name).incarnation == n and replica_info(f, name).answers
        )
        process = there.processes.roles[name].process
        assert process is not None
        await process.kill()


async def test_restarts_are_spent_one_leaves_and_the_last_ends_it_all(tmp_path: Path) -> None:
    async def run() -> None:
        async with stage(tmp_path, 2, "launch.restarts=1") as (there, feed):
            await spend_restarts(there, feed, "engine-1")
            await feed.until(lambda f: f.replica("engine-1") is None)
            assert "! engine-1 ended with SIGKILL; restart 1 of 1" in there.events()
            assert "given up after 1 restarts" in there.events()
            assert "the run goes on with engine-0" in there.events()
            await spend_restarts(there, feed, "engine-0")
            await asyncio.Event().wait()  # until the error ends it

    with pytest.raises(BaseExceptionGroup) as ended:
        await run()
    error = first_cause(ended.value)
    assert isinstance(error, RoleDied)
    assert "engine-0 ended with SIGKILL; given up after 1 restarts" in str(error)


async def test_one_that_weights_do_not_reach_is_started_again(tmp_path: Path) -> None:
    """Its API answers, but nothing shows whether a process behind it computes."""
    async with stage(tmp_path, 1, "launch.restarts=1") as (there, feed):
        for missed in range(1, MAX_MISSED_PUSHES):
            there.replicas.update(ReplicaReport("engine-0", 0, None, missed, "it was late"))
        there.replicas.update(ReplicaReport("engine-0", 1, None, MAX_MISSED_PUSHES, "of a process to come"))
        before = there.replicas.listed()[0].pid
        for _ in range(3):  # every heartbeat repeats it
            there.replicas.update(ReplicaReport("engine-0", 0, None, MAX_MISSED_PUSHES, "it was late again"))
        await feed.until(lambda f: replica_info(f, "engine-0").incarnation == 1 and replica_info(f, "engine-0").answers)
        assert there.replicas.listed()[0].pid != before
        why = f"ended with SIGKILL: {MAX_MISSED_PUSHES} pushes in a row did not reach it, the last: it was late again"
        assert f"! engine-0 {why}; restart 1 of 1" in there.events()
        for missed in range(1, MAX_MISSED_PUSHES):
            there.replicas.update(ReplicaReport("engine-0", 1, None, missed, "it was late"))
        assert there.processes.roles["engine-0"].restarts == 1


def lies(count: int, level: float, incarnation: int = 0, name: str = "engine-0") -> FalseReplies:
    return FalseReplies(name, incarnation, count, level, "it sampled token id 70000")


async def test_one_that_goes_on_lying_is_started_again_and_leaves_when_its_restarts_are_spent(tmp_path: Path) -> None:
    async with stage(tmp_path, 2, "launch.restarts=1") as (there, feed):
        replicas = there.replicas
        there.processes.roles |= {name: RoleProcess(name) for name in ("worker-0", "worker-1", "evaluator")}
        for name in ("engine-0", "engine-1"):
            replicas.update(ReplicaReport(name, 0, 4))
        before = replicas.listed()[0].pid
        for _ in range(3):  # every heartbeat repeats it
            replicas.suspect("worker-0", [lies(4, 2.5), lies(1, 1.0, name="engine-9")])
            replicas.suspect("worker-1", [lies(3, 2.0), lies(9, 9.0, incarnation=1)])
        assert replica_info(replicas.fleet, "engine-0").state == "serving"
        assert replicas.distrusted == ""
        for _ in range(3):
            replicas.suspect("evaluator", [lies(1, 0.5)])
            replicas.update(ReplicaReport("engine-0", 0, 5))  # the learner knows nothing of it
            assert replica_info(replicas.fleet, "engine-0").state == "starting"
        await feed.until(lambda f: replica_info(f, "engine-0").incarnation == 1 and replica_info(f, "engine-0").answers)
        assert replicas.listed()[0].pid != before
        why = "it goes on giving false replies, 8 so far; one of the last: it sampled token id 70000"
        assert f"! engine-0 ended with SIGKILL: {why}; restart 1 of 1" in there.events()
        replicas.suspect("worker-1", [])
        assert replicas.distrusted == f"engine-0: {why}"
        assert [(row.false_replies, row.distrusted) for row in replicas.listed()] == [(17, why), (0, "")]
        replicas.update(ReplicaReport("engine-0", 1, 5))
        assert replica_info(replicas.fleet, "engine-0").state == "serving"
        assert replicas.distrusted == ""
        replicas.suspect("worker-0", [lies(5, 5.0, incarnation=1)])
        await feed.until(lambda f: f.replica("engine-0") is None)
        assert replicas.distrusted.startswith("engine-0 has left the fleet: it goes on giving false replies, 5 so far")
        assert "given up after 1 restarts" in there.events()
        assert replica_info(replicas.fleet, "engine-1").state == "serving"


async def test_what_a_worker_saw_that_left_the_run_ends_no_replica(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as (there, _):
        replicas, roles = there.replicas, there.processes.roles
        roles |= {name: RoleProcess(name) for name in ("worker-0", "worker-1", "evaluator")}
        replicas.suspect("evaluator", [lies(4, 4.0)])
        roles["evaluator"].exit_status = 0
        replicas.suspect("worker-0", [lies(4, 4.0)])
        del roles["worker-0"]
        replicas.suspect("worker-1", [lies(4, 4.0)])
        assert replicas.distrusted == ""
        assert replicas.listed()[0].false_replies == 12
        assert roles["engine-0"].error == ""


async def test_one_is_removed_just_when_its_restarts_are_spent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(tmp_path, 2, "launch.restarts=0") as (there, feed):
        member = there.processes.roles["engine-0"]
        ended, removing = member.on_end, list[asyncio.Task[None]]()

        def remove_it() -> None:
            ended()
            removing.append(asyncio.create_task(there.replicas.remove("engine-0")))

        member.on_end = remove_it
        assert member.process is not None
        await member.process.kill()
        await feed.until(lambda f: f.replica("engine-0") is None)
        retiring = [task for task in asyncio.all_tasks() if "_retire" in repr(task.get_coro())]
        await asyncio.gather(*removing, *retiring)
        assert "engine-0 did not abort its requests" in caplog.text
        assert set(there.processes.roles) == {"engine-1"}
        assert "the run goes on with engine-1" in there.events()
        assert (await send_command(read_control_address(tmp_path), AddReplicas(1), CommandAccepted)).names == (
            "engine-2",
        )


async def test_one_that_left_is_not_probed_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stage(tmp_path, 2, "launch.heartbeat_s=6") as (there, feed):
        called, probed = list[str](), there.processes.roles["engine-0"].probe
        assert probed is not None

        async def well(client: HttpClient, path: str) -> bool | None:
            called.append(client.url)
            return await is_healthy(client, path)

        monkeypatch.setattr("slipstream.launch.supervisor.processes.is_healthy", well)
        while probed[0] not in called:  # noqa: ASYNC110 - the next probe sets nothing that could be awaited
            await asyncio.sleep(0.05)
        await there.replicas.remove("engine-0")
        await feed.until(lambda f: f.replica("engine-0") is None)
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "probe engine-0"]
        assert set(there.processes.roles) == {"engine-1"}


async def test_a_server_is_probed_over_one_connection_until_a_probe_fails() -> None:
    peers, status = list[object](), 200

    async def health(request: web.Request) -> web.Response:
        peers.append(request.transport and request.transport.get_extra_info("peername"))
        return web.Response(status=status)

    app = web.Application()
    app.add_routes([web.get("/health", health)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0]
    client = HttpClient("engine-0", f"http://{host}:{port}", 10.0)
    try:
        assert [await is_healthy(client, "/health") for _ in range(3)] == [True] * 3
        status = 503
        assert await is_healthy(client, "/health") is False
        status = 200
        assert [await is_healthy(client, "/health") for _ in range(2)] == [True] * 2
        assert len(set(peers[:4])) == len(set(peers[4:])) == 1
        assert peers[3] != peers[4]
        await runner.cleanup()
        assert await is_healthy(client, "/health") is None
    finally:
        await client.close()
        await runner.cleanup()


@pytest.mark.parametrize("name", [WRONG, NOWHERE])
async def test_a_newcomer_that_cannot_live_does_not_end_the_run(name: str, tmp_path: Path) -> None:
    async with stage(tmp_path, 1, "launch.restarts=0") as (there, feed):
        there.replicas.update(ReplicaReport("engine-0", 0, 0))
        there.replicas.names(int(name.partition("-")[2]) - 1)
        where = read_control_address(tmp_path)
        if name == WRONG:
            accepted = await send_command(where, AddReplicas(1), CommandAccepted)
            await feed.until(lambda f: f.revision >= accepted.revision and len(f.replicas) == 1)
            assert "engine-8 ended with exit status 2; the run goes on with engine-0" in there.events()
        else:
            with pytest.raises(ConfigError, match="the place of engine-9 is lost"):
                await send_command(where, AddReplicas(2), CommandAccepted)
        assert [row.name for row in (await send_command(where, GetStatus(), RunStatus)).replicas] == ["engine-0"]
        assert set(there.processes.roles) == {"engine-0"}


async def test_who_only_reads_does_not_wait_for_a_replica_that_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path, 1) as (there, _):
        where, place, asked, room = (
            read_control_address(tmp_path),
            there.launcher.place,
            asyncio.Event(),
            asyncio.Event(),
        )

        async def placed_later(roles: Mapping[str, int]) -> dict[str, Placement]:
            asked.set()
            await room.wait()
            return await place(roles)

        monkeypatch.setattr(there.launcher, "place", placed_later)
        adding = asyncio.create_task(send_command(where, AddReplicas(1), CommandAccepted))
        await asked.wait()
        shown = await asyncio.to_thread(slipstream, "waits", str(tmp_path), "--json")
        assert isinstance(json.loads(shown.stdout), list)
        many = await asyncio.gather(*(send_command(where, GetStatus(), RunStatus) for _ in range(8)))
        assert [[row.name for row in status.replicas] for status in many] == [["engine-0"]] * 8
        client = RpcClient(where.address, "a client", "the supervisor", Reply, pair=where.pair)
        try:
            monkeypatch.setattr(control, "TURN_S", 0.2)
            with pytest.raises(
                RequestRefused, match=r"RemoveReplica waited 0\.2 s for the commands before it; nothing"
            ):
                await client.send(RemoveReplica("engine-7"), CommandAccepted)
            monkeypatch.setattr(control, "TURN_S", WAIT_S)
            monkeypatch.setattr(control, "MOST_WAITING", 1)
            second, third = (client.send(AddReplicas(count), CommandAccepted) for count in (2, 3))
            with pytest.raises(RequestRefused, match="1 commands wait for their turn already"):
                await third
            assert not adding.done()
            assert not second.done()
            room.set()
            assert [(await one).names for one in (adding, second)] == [("engine-1",), ("engine-2", "engine-3")]
        finally:
            client.close()


HOLDER = """
import time
from slipstream.common.owned_folders import SHARED_MEMORY, WEIGHTS, OwnedFolder
print(OwnedFolder(SHARED_MEMORY, WEIGHTS).path, flush=True)
time.sleep(600)
"""


async def test_a_supervisor_keeps_no_finished_work_and_leaves_no_shared_memory(tmp_path: Path) -> None:
    config = load("quickstart", [f"run.dir={tmp_path}", "weightsync.transport=shared"])
    view = LineView(config, Console(file=(tmp_path / "events").open("w")))
    supervisor = Supervisor(config, tmp_path, SmallServers(tmp_path, 0), view, gpus={}, backend="gloo")
    folders: list[Path] = []

    async def nothing() -> None: ...

    async def plan(spawn: Spawn) -> None:
        task = spawn(nothing())
        await task
        kept = weakref.ref(task)
        del task
        await asyncio.sleep(0)
        gc.collect()
        assert kept() is None
        learner = await asyncio.create_subprocess_exec(sys.executable, "-c", HOLDER, stdout=subprocess.PIPE)
        assert learner.stdout is not None
        folders.append(Path((await learner.stdout.readline()).decode().strip()))
        learner.kill()
        await learner.wait()
        assert folders[0].is_dir()

    async with asyncio.timeout(WAIT_S):
        await supervisor._run(["engine-0"], plan)
    assert not folders[0].exists()
