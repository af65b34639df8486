"""Replicas as the supervisor keeps them: real processes and sockets, with a small HTTP server where an engine would be."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from slipstream.configs import Config, load
from slipstream.errors import ConfigError, RoleDied, first_cause
from slipstream.launch.control import Accepted, Add, Control, Remove, Show, Shown, ask, contact
from slipstream.launch.folder import alone
from slipstream.launch.keeper import Keeper
from slipstream.launch.probe import Probe
from slipstream.launch.processes import LocalLauncher, Process
from slipstream.launch.replicas import LOSSES, Keep
from slipstream.launch.supervisor import Supervisor
from slipstream.launch.vitals import Vitals
from slipstream.monitor.live import LineView
from slipstream.tests.runs import bare_replicas
from slipstream.weightsync.fleet import Fleet, FleetBoard, FleetFeed, Seat

WAIT_S = 30.0

SERVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer()

    def do_POST(self):
        print(self.path, flush=True)  # first: whoever has the answer may end this process
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

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> Process:
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
        self.keeper = Keeper(config, folder, launcher, view)
        self.board = FleetBoard("127.0.0.1")
        self.probe = Probe("/health")
        self.launcher = launcher
        self.view = view
        self.replicas = bare_replicas(self.keeper, launcher, self.board, self.probe, view)

    def events(self) -> str:
        self.console.file.flush()
        return (self.folder / "events").read_text()


@contextlib.asynccontextmanager
async def stage(folder: Path, count: int, *overrides: str) -> AsyncIterator[tuple[Stage, FleetFeed]]:
    """`count` replicas that answer, and a follower of their fleet."""
    config = load("quickstart", [f"run.dir={folder}", *overrides])
    (folder / "config.yaml").write_text("")
    there = Stage(config, folder)
    replicas = there.replicas
    try:
        with alone(folder):
            async with (
                asyncio.timeout(WAIT_S),
                there.probe,
                FleetFeed(there.board.address) as feed,
                asyncio.TaskGroup() as tasks,
            ):
                kept: list[asyncio.Task[None]] = []

                def keep(work) -> asyncio.Task[None]:
                    kept.append(tasks.create_task(work))
                    return kept[-1]

                keep(there.board.serve())
                keep(Control(folder, replicas, there.board.address).serve())
                names = replicas.names(count)
                await replicas.begin(await there.launcher.place(dict.fromkeys(names, 0)), keep)
                await feed.until(lambda fleet: len(fleet.seats) == count and all(s.answers for s in fleet.seats))
                yield there, feed
                for task in kept:
                    task.cancel()
    finally:
        await there.launcher.close()
        await there.board.close()


def seat(fleet: Fleet, name: str) -> Seat:
    found = fleet.seat(name)
    assert found is not None
    return found


async def test_a_process_that_ends_is_in_the_fleet_before_it_is_started_again(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as (there, feed):
        there.replicas.served("engine-0", 4, 0)
        assert seat(await feed.until(lambda f: f.seats[0].state == "serving"), "engine-0").version == 4
        (row,) = there.replicas.listed()
        assert row.pid is not None
        os.kill(row.pid, signal.SIGKILL)
        dead = seat(await feed.until(lambda f: f.seats[0].incarnation == 1), "engine-0")
        assert (dead.state, dead.version, dead.answers) == ("starting", None, False)
        await feed.until(lambda f: f.seats[0].answers)
        assert there.replicas.listed()[0].pid != row.pid
        there.replicas.served("engine-0", 9, 0)  # of the process that is dead
        assert seat(there.replicas.fleet, "engine-0").state == "starting"
        there.replicas.served("engine-0", 5, 1)
        there.replicas.lost("engine-0", 1, "it was late")
        assert seat(await feed.until(lambda f: f.revision >= there.replicas.fleet.revision), "engine-0").version is None
        assert "! engine-0 was left out of a push: it was late" in there.events()


async def test_wishes_over_the_control_channel(tmp_path: Path) -> None:
    async with stage(tmp_path, 1) as (there, feed):
        there.replicas.served("engine-0", 0, 0)
        where = contact(tmp_path)
        with pytest.raises(ConfigError, match="engine-0 is the last serving replica"):
            await ask(where, Remove("engine-0"), Accepted)
        accepted = await ask(where, Add(2), Accepted)
        assert accepted.names == ("engine-1", "engine-2")
        fleet = await feed.until(lambda f: f.revision >= accepted.revision and all(s.answers for s in f.seats))
        assert len({s.url for s in fleet.seats}) == 3
        with pytest.raises(ConfigError, match="engine-0 is the last serving replica"):
            await ask(where, Remove("engine-0"), Accepted)  # the others have no weights yet
        there.replicas.served("engine-2", 0, 0)
        before = {row.name: row for row in (await ask(where, Show(), Shown)).replicas}
        assert [row.state for row in before.values()] == ["serving", "starting", "serving"]
        await ask(where, Remove("engine-0"), Accepted)
        await feed.until(lambda f: f.seat("engine-0") is None)
        pid = before["engine-0"].pid
        assert pid is not None
        assert not psutil.pid_exists(pid)
        assert "/pause?mode=abort" in (tmp_path / "engine-0.log").read_text()  # its requests came back first
        assert set(there.keeper.members) == {"engine-1", "engine-2"}
        assert (await ask(where, Add(1), Accepted)).names == ("engine-3",)
        thief = type(where)(where.pid, where.address, where.fleet, "0" * 32)
        with pytest.raises(ConfigError, match="not this run's key"):
            await ask(thief, Add(1), Accepted)
    assert not (tmp_path / "control.json").exists()


async def test_one_that_dies_while_it_leaves_is_not_started_again(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as (there, feed):
        there.replicas.served("engine-0", 0, 0)
        there.replicas.served("engine-1", 0, 0)
        process = there.keeper.members["engine-0"].process
        assert process is not None
        await there.replicas.remove("engine-0")
        await process.kill()
        await feed.until(lambda f: f.seat("engine-0") is None)
        assert "restart" not in there.events()
        assert "! engine-0 removed" in there.events()


async def spend_restarts(there: Stage, feed: FleetFeed, name: str) -> None:
    """Kill `name` twice; it may be started again once."""
    for incarnation in (0, 1):
        await feed.until(lambda f, n=incarnation: seat(f, name).incarnation == n and seat(f, name).answers)
        process = there.keeper.members[name].process
        assert process is not None
        await process.kill()


async def test_restarts_are_spent_one_leaves_and_the_last_ends_it_all(tmp_path: Path) -> None:
    async def run() -> None:
        async with stage(tmp_path, 2, "launch.restarts=1") as (there, feed):
            await spend_restarts(there, feed, "engine-1")
            await feed.until(lambda f: f.seat("engine-1") is None)
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
    """Its API answers, but nobody knows whether anything behind it does."""
    async with stage(tmp_path, 1, "launch.restarts=1") as (there, feed):
        for _ in range(LOSSES - 1):
            there.replicas.lost("engine-0", 0, "it was late")
        there.replicas.served("engine-0", 1, 0)  # what came before does not count any more
        for _ in range(LOSSES - 1):
            there.replicas.lost("engine-0", 0, "it was late")
        there.replicas.lost("engine-0", 1, "of a process to come")
        before = there.replicas.listed()[0].pid
        there.replicas.lost("engine-0", 0, "it was late again")
        await feed.until(lambda f: seat(f, "engine-0").incarnation == 1 and seat(f, "engine-0").answers)
        assert there.replicas.listed()[0].pid != before
        why = f"ended with SIGKILL: {LOSSES} pushes in a row did not reach it, the last: it was late again"
        assert f"! engine-0 {why}; restart 1 of 1" in there.events()
        for _ in range(LOSSES - 1):
            there.replicas.lost("engine-0", 1, "it was late")
        assert there.keeper.members["engine-0"].restarts == 1


async def test_one_is_removed_just_when_its_restarts_are_spent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with stage(tmp_path, 2, "launch.restarts=0") as (there, feed):
        member = there.keeper.members["engine-0"]
        ended, removing = member.on_end, list[asyncio.Task[None]]()

        def remove_it() -> None:
            ended()
            removing.append(asyncio.create_task(there.replicas.remove("engine-0")))

        member.on_end = remove_it
        assert member.process is not None
        await member.process.kill()
        await feed.until(lambda f: f.seat("engine-0") is None)
        retiring = [task for task in asyncio.all_tasks() if "_retire" in repr(task.get_coro())]
        await asyncio.gather(*removing, *retiring)
        assert "engine-0 did not give its requests back" in caplog.text
        assert set(there.keeper.members) == {"engine-1"}
        assert "the run goes on with engine-1" in there.events()
        assert (await ask(contact(tmp_path), Add(1), Accepted)).names == ("engine-2",)


async def test_one_that_left_since_its_pulse_was_planned(tmp_path: Path) -> None:
    async with stage(tmp_path, 2) as (there, feed):
        vitals = Vitals(there.keeper, there.replicas, 0.4, there.view)
        left = there.replicas.fleet.seats[0]
        member = there.keeper.members[left.name]
        await there.replicas.remove(left.name)
        await feed.until(lambda f: f.seat(left.name) is None)
        called: list[str] = []

        async def well() -> bool:
            called.append(member.name)
            return True

        member.asked = well
        await vitals._ask(member)
        assert not called
        assert set(there.keeper.members) == {"engine-1"}


@pytest.mark.parametrize("name", [WRONG, NOWHERE])
async def test_a_newcomer_that_cannot_live_does_not_end_the_run(name: str, tmp_path: Path) -> None:
    async with stage(tmp_path, 1, "launch.restarts=0") as (there, feed):
        there.replicas.served("engine-0", 0, 0)
        there.replicas.names(int(name.partition("-")[2]) - 1)
        where = contact(tmp_path)
        if name == WRONG:
            accepted = await ask(where, Add(1), Accepted)
            await feed.until(lambda f: f.revision >= accepted.revision and len(f.seats) == 1)
            assert "engine-8 ended with exit status 2; the run goes on with engine-0" in there.events()
        else:
            with pytest.raises(ConfigError, match="the place of engine-9 is lost"):
                await ask(where, Add(2), Accepted)
        assert [row.name for row in (await ask(where, Show(), Shown)).replicas] == ["engine-0"]
        assert set(there.keeper.members) == {"engine-0"}


HOLDER = """
import time
from slipstream.weightsync.files import SharedFolder
print(SharedFolder().path, flush=True)
time.sleep(600)
"""


async def test_a_supervisor_keeps_no_finished_work_and_leaves_no_shared_memory(tmp_path: Path) -> None:
    config = load("quickstart", [f"run.dir={tmp_path}", "weightsync.transport=shared"])
    view = LineView(config, Console(file=(tmp_path / "events").open("w")))
    supervisor = Supervisor(config, tmp_path, SmallServers(tmp_path, 0), view, gpus={}, backend="gloo")
    folders: list[Path] = []

    async def nothing() -> None: ...

    async def plan(keep: Keep) -> None:
        task = keep(nothing())
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
        await supervisor._see_through(["engine-0"], plan)
    assert not folders[0].exists()
