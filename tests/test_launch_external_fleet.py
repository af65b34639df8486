"""Servers that others started in the fleet of a run: they are probed, missed and taken again, and never started or ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from slipstream.configs import Config, load
from slipstream.errors import ConfigError
from slipstream.launch.launchers.local import LocalLauncher
from slipstream.launch.run_context import Addresses, RunContext
from slipstream.launch.supervisor.access import AccessManager
from slipstream.launch.supervisor.external import external_servers
from slipstream.launch.supervisor.factory import make_engine
from slipstream.launch.supervisor.health import HealthMonitor
from slipstream.launch.supervisor.processes import ProcessManager
from slipstream.launch.supervisor.replicas import ReplicaManager
from slipstream.monitor.terminal import LineView
from slipstream.rollout.engines.server_keys import make_server_keys
from slipstream.rpc.pubsub import StatePublisher, StateSubscriber
from slipstream.tests import tiny
from slipstream.tests.runs import ENDLESS, SMALL, Background, check_accounts, leftovers, metrics, slipstream
from slipstream.tests.served import ServedEngine, named
from slipstream.weightsync.fleet import FalseReplies, Fleet, ReplicaReport

WAIT_S = 240.0


class FleetStage:
    """A run's replicas, probed and watched, without learner and workers."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._folder = folder
        self._console = Console(file=(folder / "events").open("w"), width=1000)
        self.view = LineView(config, self._console)
        self.launcher = LocalLauncher(folder, 0)
        self.processes = ProcessManager(config, folder, self.launcher, self.view)
        self.fleets = StatePublisher("tcp://127.0.0.1:*", Fleet())
        self.servers = external_servers(config, self.view.event)
        access = AccessManager("127.0.0.1", lambda *_: None)
        for name, server in self.servers.items():
            access.admit_server(name, server.keys)
        self.access = access
        self.processes.access, self.processes.revoke = access.access, access.revoke
        context = RunContext(config, Addresses("", "", "", ""), str(folder), "gloo", str(folder), pushed=True)
        self.replicas = ReplicaManager(
            self.processes,
            self.launcher,
            self.fleets.publish,
            self.view,
            environment=lambda name, placement: {},
            make_engine=functools.partial(make_engine, context, access.servers),
            probe_path="/health",
            gpus=0,
            pushed=True,
        )
        self.health = HealthMonitor(self.processes, self.replicas, config.launch.heartbeat_s, self.view)

    def events(self) -> str:
        self._console.file.flush()
        return (self._folder / "events").read_text()

    async def close(self) -> None:
        await self.launcher.close()
        await self.fleets.close()
        await self.access.close()


@contextlib.asynccontextmanager
async def fleet_stage(folder: Path, config: Config) -> AsyncIterator[tuple[FleetStage, StateSubscriber[Fleet]]]:
    there, kept = FleetStage(config, folder), list[asyncio.Task[None]]()
    try:
        async with (
            asyncio.timeout(WAIT_S),
            StateSubscriber(there.fleets.address, Fleet()) as feed,
            asyncio.TaskGroup() as tasks,
        ):

            def keep(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                kept.append(tasks.create_task(work))
                return kept[-1]

            keep(there.fleets.serve())
            keep(there.health.watch())
            await there.replicas.begin({}, keep)
            await there.replicas.attach(there.servers)
            yield there, feed
            for task in kept:
                task.cancel()
    finally:
        await there.close()


async def test_a_server_is_missed_and_taken_again_and_never_ended(folders: list[Path], tmp_path: Path) -> None:
    server = await asyncio.to_thread(ServedEngine, tmp_path, folders[0])
    file, away = tmp_path / "other.json", f"https://127.0.0.1:{tiny.free_port()}"
    make_server_keys(file, "127.0.0.1")
    config = load(
        "quickstart",
        [*server.config, named(server.named, f"{away}: {file}"), "launch.heartbeat_s=4", "launch.restarts=0"],
    )
    beside = external_servers(config, lambda line: None)["engine-0"].attach()
    client = server.client()
    try:
        async with fleet_stage(tmp_path, config) as (there, feed):
            first = await feed.until(lambda f: bool(f.replicas) and f.replicas[0].answers)
            assert [(r.name, r.url, r.answers) for r in first.replicas] == [
                ("engine-0", server.url, True),
                ("engine-1", away, False),
            ]
            there.replicas.update(ReplicaReport("engine-0", 0, 3))
            rows = there.replicas.listed()
            assert [(row.external, row.pid, row.state) for row in rows] == [
                (True, None, "serving"),
                (True, None, "starting"),
            ]
            with pytest.raises(ConfigError, match="the servers of this run were started by others"):
                await there.replicas.add(1)
            for missed in range(1, 6):  # nothing restarts a server that pushes do not reach: they are repeated
                there.replicas.update(ReplicaReport("engine-0", 0, None, missed, "it was late"))
            assert there.processes.roles["engine-0"].running
            assert await beside.is_ours(client) is True

            server.kill()
            lost = await feed.until(lambda f: f.replicas[0].incarnation == 1)
            assert (lost.replicas[0].answers, lost.replicas[0].version) == (False, None)
            assert await beside.is_ours(client) is None
            before = server.keys
            await asyncio.to_thread(server.start)
            assert server.keys == before  # so that a copy of the file stays good
            back = await feed.until(lambda f: f.replicas[0].answers)
            assert (back.replicas[0].incarnation, back.replicas[0].state) == (1, "starting")  # it has to be pushed to
            assert f"! engine-0 at {server.url} is missed until it is back: it did not answer for" in there.events()
            assert "is killed" not in there.events()
            assert "engine-1 at" not in there.events()  # it was never there

            assert await beside.is_ours(client) is False
            assert beside.why == "it was started again"
            assert await beside.attach().is_ours(client) is True
            there.replicas.suspect("worker-0", [FalseReplies("engine-0", 1, 9, 9.0, "it lied")])
            await feed.until(lambda f: f.replicas[0].incarnation == 2)
            assert await there.servers["engine-0"].is_ours(client) is False  # until it is started again
            assert "is missed until it is back: it goes on giving false replies, 9 so far" in there.events()

            await there.replicas.remove("engine-1")
            await feed.until(lambda f: f.replica("engine-1") is None)
            assert "engine-1" not in there.access.directory.keys
            await there.processes.stop(there.processes.roles["engine-0"], 5.0)
            await feed.until(lambda f: not f.replicas)
        assert server.alive
        await client.call("GET", "/health")
    finally:
        await client.close()
        server.kill()


@pytest.mark.full
def test_a_run_on_a_server_that_it_did_not_start(policy: Path, tmp_path: Path) -> None:
    """It trains, loses the server, trains on when the server is back, and leaves it as it is."""
    run, server = tmp_path / "run", ServedEngine(tmp_path, policy)

    def listed() -> dict[str, Any]:
        return json.loads(slipstream("replicas", str(run), "list", "--json").stdout)[0]

    try:
        arguments = ("train", "quickstart", *server.config, named(server.named), f"run.dir={run}", *SMALL, ENDLESS)
        with Background(*arguments) as going:
            going.until_step(2)
            row = listed()
            assert (row["external"], row["pid"], row["state"], row["url"]) == (True, None, "serving", server.url)
            assert "by others" in slipstream("replicas", str(run), "list").stdout
            assert not any(name.startswith("engine") for name in going.roles())
            server.kill()
            server.start()
            going.until(
                lambda: listed()["incarnation"] > 0 and listed()["state"] == "serving", "the server to serve again"
            )
            going.until_step(max(row["step"] for row in metrics(run)) + 2)
            going.process.send_signal(signal.SIGINT)
            output = going.output()
            assert going.process.returncode == 130, output
        assert f"engine-0 at {server.url} is missed until it is back" in output
        assert server.alive
        check_accounts(run)
        assert leftovers(run) == []
        secrets = [secret.encode() for secret in (server.keys.request, server.keys.control, server.keys.secret)]
        for path in run.rglob("*"):
            assert path.is_dir() or not any(secret in path.read_bytes() for secret in secrets), path
    finally:
        server.kill()
