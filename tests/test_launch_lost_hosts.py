"""Hosts that are lost, as the supervisor sees it: roles move, wait for room, or end the run. The hosts are a launcher's own idea
here; tests/hosted/ has real ones."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from slipstream.configs import load
from slipstream.errors import ConfigError, RoleDied
from slipstream.launch.launchers.local import LocalLauncher, Placement, PlacementLost, ProcessHandle
from slipstream.launch.run_context import RunSettings
from slipstream.launch.supervisor.processes import MOVES, ProcessManager, RoleProcess
from slipstream.launch.supervisor.workers import WorkerManager
from slipstream.monitor.terminal import LineView
from slipstream.rpc.pubsub import StatePublisher
from slipstream.tests.runs import bare_replicas
from slipstream.weightsync.fleet import Fleet

WAIT_S = 60.0

SLEEPS = "import time; time.sleep(600)"


class Process:
    """A process of a host that may be lost."""

    def __init__(self, process: ProcessHandle) -> None:
        self.pid, self._process = process.pid, process
        self.lost = False

    async def wait(self) -> int:
        return await self._process.wait()

    async def terminate(self) -> None:
        await self._process.terminate()

    async def kill(self) -> None:
        await self._process.kill()


class ManyHosts(LocalLauncher):
    """`rooms`: how many roles each host, by its address, has room for. All are this one."""

    def __init__(self, folder: Path, rooms: Mapping[str, int]) -> None:
        super().__init__(folder, 0)
        self.rooms = dict(rooms)
        self.at: dict[str, Placement] = {}
        self.processes: dict[str, Process] = {}
        self.starts: list[tuple[str, str]] = []
        self.room = asyncio.Event()

    def _host(self) -> str | None:
        taken = [placement.host for placement in self.at.values()]
        return next((host for host, room in self.rooms.items() if taken.count(host) < room), None)

    async def place(self, roles: Mapping[str, int]) -> dict[str, Placement]:
        for role in roles:
            if (host := self._host()) is None:
                raise ConfigError(f"no room for {role}")
            self.at[role] = Placement(host, 20_000 + len(self.at))
        return {role: self.at[role] for role in roles}

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        if self.at[role].host not in self.rooms:
            raise PlacementLost(f"the place of {role} at {self.at[role].host} is lost")
        self.starts.append((role, self.at[role].host))
        self.processes[role] = Process(await super().start(role, [sys.executable, "-S", "-c", SLEEPS], environment))
        return self.processes[role]

    async def move(self, role: str) -> Placement:
        lost = self.at.pop(role)
        while (host := self._host()) is None:
            self.at[role] = lost
            self.room.clear()
            try:
                await asyncio.wait_for(self.room.wait(), 0.05)
            except TimeoutError:
                raise PlacementLost(f"the place of {role} at {lost.host} is lost, and there is no other") from None
            del self.at[role]
        self.at[role] = Placement(host, lost.port + 100)
        return self.at[role]

    async def release(self, role: str) -> None:
        await super().release(role)
        self.at.pop(role, None)

    def lose(self, host: str) -> None:
        del self.rooms[host]
        for role, process in self.processes.items():
            if self.at[role].host == host:
                process.lost = True
                os.kill(process.pid, signal.SIGKILL)

    def gain(self, host: str, room: int) -> None:
        self.rooms[host] = room
        self.room.set()


class Stage:
    def __init__(self, folder: Path, rooms: Mapping[str, int], *overrides: str) -> None:
        config = load("quickstart", [f"run.dir={folder}", *overrides])
        (folder / "logs").mkdir()
        self.console = Console(file=io.StringIO(), width=1000)
        self.view = LineView(config, self.console)
        self.launcher = ManyHosts(folder / "logs", rooms)
        self.processes = ProcessManager(config, folder, self.launcher, self.view)
        self.moves: list[tuple[str, str]] = []
        self.processes.moved = self._moved
        self.tasks: list[asyncio.Task[None]] = []

    async def _moved(self, name: str, placement: Placement) -> None:
        self.moves.append((name, placement.host))

    def spawn(self, work) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def add(self, *names: str) -> list[RoleProcess]:
        await self.launcher.place(dict.fromkeys(names, 0))
        for name in names:
            self.processes.roles[name] = RoleProcess(name)
        return [self.processes.roles[name] for name in names]

    async def runs(self, role: RoleProcess, times: int) -> None:
        """Return when processes of `role` were started so often; the newest reports that it works."""
        await self.until(lambda: sum(name == role.name for name, _ in self.launcher.starts) >= times and role.running)
        role.ready.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what a task of the supervisor does, which offers nothing to await."""
        while not condition():
            for task in self.tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    def events(self) -> str:
        assert isinstance(self.console.file, io.StringIO)
        return self.console.file.getvalue()


@contextlib.asynccontextmanager
async def stage(folder: Path, rooms: Mapping[str, int], *overrides: str) -> AsyncIterator[Stage]:
    there = Stage(folder, rooms, *overrides)
    try:
        async with asyncio.timeout(WAIT_S):
            yield there
    finally:
        for task in there.tasks:
            task.cancel()
        await asyncio.gather(*there.tasks, return_exceptions=True)
        await there.launcher.close()


async def test_a_role_moves_with_its_failure_domain_and_counts_no_restart(tmp_path: Path) -> None:
    async with stage(tmp_path, {"a": 1, "b": 2}, "launch.restarts=0") as there:
        ranks = await there.add("learner-0", "learner-1")
        await there.processes.start(*ranks)
        for rank in ranks:
            await there.runs(rank, 1)
        there.spawn(there.processes.watch(ranks))
        there.launcher.lose("a")
        await there.runs(ranks[1], 3)  # once more because the others have to be told where learner-0 is
        await there.runs(ranks[0], 2)
        assert there.moves == [("learner-0", "b")]
        assert there.launcher.starts[-2:] == [("learner-0", "b"), ("learner-1", "b")]
        assert [rank.restarts for rank in ranks] == [0, 0]
        assert "! learner-0 is lost with its host" in there.events()


async def test_a_role_that_did_no_work_yet_counts_a_restart(tmp_path: Path) -> None:
    async with stage(tmp_path, {"a": 1, "b": 1}, "launch.restarts=0") as there:
        (rank,) = await there.add("learner-0")
        await there.processes.start(rank)
        there.launcher.lose("a")
        with pytest.raises(RoleDied, match="learner-0 ended with SIGKILL; given up after 0 restarts"):
            await there.processes.watch([rank])


async def test_a_learner_without_a_place_ends_the_run(tmp_path: Path) -> None:
    async with stage(tmp_path, {"a": 1, "b": 1}) as there:
        ranks = await there.add("learner-0", "learner-1")
        await there.processes.start(*ranks)
        for rank in ranks:
            await there.runs(rank, 1)
        there.launcher.lose("b")
        with pytest.raises(PlacementLost, match="the place of learner-1 at b is lost, and there is no other"):
            await there.processes.watch(ranks)


async def test_a_role_that_loses_place_after_place_is_given_up(tmp_path: Path) -> None:
    async with stage(tmp_path, {"a": 1}) as there:
        (rank,) = await there.add("learner-0")

        async def nowhere(role: str) -> Placement:
            return Placement("nowhere", 1)

        there.launcher.move = nowhere
        there.launcher.lose("a")
        with pytest.raises(PlacementLost, match=f"at a is lost, after it was moved {MOVES} times in a row"):
            await there.processes.start(rank)


def workers_of(there: Stage, heard: list[tuple[str, ...]]) -> WorkerManager:
    async def changed(workers: tuple[str, ...]) -> None:
        heard.append(workers)

    workers = WorkerManager(there.processes, there.launcher, there.view, lambda name, placement: {}, changed)

    async def moved(name: str, placement: Placement) -> None:
        there.moves.append((name, placement.host))
        workers.placements[name] = placement

    there.processes.moved = moved
    return workers


async def test_a_worker_without_a_place_is_missed_until_a_host_comes_back(tmp_path: Path) -> None:
    async with stage(tmp_path, {"a": 1, "b": 1}, "launch.restarts=0") as there:
        workers = workers_of(there, [])
        workers.prepare(await there.launcher.place({"worker-0": 0, "worker-1": 0}))
        await workers.begin(there.spawn)
        for role in there.processes.of_kind("worker"):
            await there.runs(role, 1)
        there.launcher.lose("b")
        lost = there.processes.roles["worker-1"]
        await there.until(lambda: lost.process is None)
        assert [(row.name, row.state) for row in workers.listed()] == [
            ("worker-0", "playing"),
            ("worker-1", "waits for a place"),
        ]
        there.launcher.gain("b", 1)
        await there.runs(lost, 2)
        assert there.moves == [("worker-1", "b")]
        assert workers.listed()[1].host == "b"


async def test_the_last_worker_ends_the_run_by_its_name(tmp_path: Path) -> None:
    async with stage(tmp_path, {"a": 2}) as there:
        workers = workers_of(there, [])
        workers.prepare(await there.launcher.place({"worker-0": 0, "worker-1": 0}))
        await workers.begin(there.spawn)
        for role in there.processes.of_kind("worker"):
            await there.runs(role, 1)
        there.launcher.lose("a")
        done, _ = await asyncio.wait(there.tasks)
        errors = [str(task.exception()) for task in done if task.exception()]
        assert len(errors) == 1
        assert "is lost, and there is no other" in errors[0]
        assert there.events().count("the run goes on with worker-") == 1


async def test_workers_come_and_go(tmp_path: Path) -> None:
    async with stage(tmp_path, {"a": 2}) as there:
        heard: list[tuple[str, ...]] = []
        workers = workers_of(there, heard)
        workers.prepare(await there.launcher.place({"worker-0": 0}))
        with pytest.raises(ConfigError, match="only while the run trains"):
            await workers.add(1)
        await workers.begin(there.spawn)
        with pytest.raises(ConfigError, match="worker-0 is the last worker"):
            await workers.remove("worker-0")
        with pytest.raises(ConfigError, match="engine-0 is no worker of this run; there are worker-0"):
            await workers.remove("engine-0")
        assert await workers.add(1) == ["worker-1"]
        with pytest.raises(ConfigError, match="no room for worker-2"):
            await workers.add(1)
        await workers.remove("worker-0")
        with pytest.raises(ConfigError, match="worker-0 is leaving already"):
            await workers.remove("worker-0")
        await there.until(lambda: "worker-0" not in there.processes.roles)
        assert heard == [("worker-0", "worker-1"), ("worker-1",)]
        assert "! worker-0 removed" in there.events()
        await workers.end(1.0)
        with pytest.raises(ConfigError, match="only while the run trains"):
            await workers.add(1)


async def test_a_worker_whose_error_others_would_repeat_ends_the_run(tmp_path: Path) -> None:
    async with stage(tmp_path, {"a": 2}) as there:
        workers = workers_of(there, [])
        workers.prepare(await there.launcher.place({"worker-0": 0, "worker-1": 0}))
        role = there.processes.roles["worker-0"]
        assert not workers.ends_run(role)
        for status in (2, 3):
            role.exit_status = status
            assert workers.ends_run(role)


async def test_a_replica_that_moves_is_at_its_new_address_in_the_fleet(tmp_path: Path) -> None:
    async with stage(tmp_path, {"a": 1, "b": 1}) as there:
        fleets = StatePublisher("tcp://127.0.0.1:*", Fleet())
        replicas = bare_replicas(there.processes, there.launcher, fleets, there.view)

        async def moved(name: str, placement: Placement) -> None:
            await replicas.moved(name, placement)

        there.processes.moved = moved
        await replicas.begin(await there.launcher.place({replicas.names(1)[0]: 0}), there.spawn)
        role = there.processes.roles["engine-0"]
        await there.runs(role, 1)
        there.launcher.lose("a")
        await there.runs(role, 2)
        assert role.arguments == ("--listen", there.launcher.at["engine-0"].address)
        assert role.probe == (f"http://{there.launcher.at['engine-0'].address}", "/health")
        (info,) = fleets.state.replicas
        assert (info.url, info.incarnation, info.state) == (role.probe[0], 1, "starting")
        await fleets.close()


def test_workers_share_the_limit_of_episodes_as_they_come_and_go() -> None:
    config = load("quickstart", ["rollout.max_episodes=80", "rollout.workers=2"])
    settings = RunSettings(1, config, ("worker-0", "worker-3", "worker-4"))
    assert [settings.episode_limit(name) for name in settings.workers] == [27, 27, 26]
    assert settings.episode_limit("worker-9") == 26  # which was just removed
    assert RunSettings(1, load("quickstart"), ("worker-0",)).episode_limit("worker-0") is None


def test_each_replica_is_reported_on_by_one_of_the_workers_that_there_are_now() -> None:
    for workers in (("worker-0", "worker-1"), ("worker-1",), ("worker-1", "worker-2", "worker-7")):
        settings = RunSettings(1, load("quickstart"), workers)
        shares = [range(10)[start::step] for start, step in map(settings.share, workers)]
        assert sorted(replica for share in shares for replica in share) == [*range(10)]
