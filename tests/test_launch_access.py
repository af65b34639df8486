"""Keys and tokens of a run: who makes them, who gets which, when they are void. Real launcher, real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
from slipstream.buffer.client_registry import SUPERVISOR
from slipstream.buffer.messages import Configured, Request
from slipstream.common.owned_folders import PRIVATE_VARIABLE
from slipstream.configs import load
from slipstream.errors import DeadlineExceeded, RequestRefused
from slipstream.launch import peers as peers_module
from slipstream.launch.launchers.local import LocalLauncher, free_ports
from slipstream.launch.peers import PeerDirectory, following_peers, request_access
from slipstream.launch.run_context import RunContext
from slipstream.launch.supervisor.health import HealthMonitor
from slipstream.launch.supervisor.heartbeat import Heartbeat, RoleFailed, StepReported, StepSummary
from slipstream.launch.supervisor.processes import ProcessManager, RoleProcess
from slipstream.launch.supervisor.settings import SettingsManager
from slipstream.launch.supervisor.sockets import SupervisorSockets
from slipstream.rollout.engines.access import ServerAccess
from slipstream.rollout.engines.server_keys import make_server_keys
from slipstream.rpc.client import RpcNotifier
from slipstream.rpc.security import FILE, KeyPair, PeerTable, make_pair, read_pair
from slipstream.rpc.server import RpcRequest, RpcServer
from slipstream.weightsync.fleet import FalseReplies, ReplicaReport

SOON = 30.0

SHOW = """
import json, os, sys
folder = os.environ["SLIPSTREAM_PRIVATE"]
shown = {"folder": folder, "modes": [os.stat(p).st_mode & 0o777 for p in (folder, folder + "/curve.json")]}
open(sys.argv[1], "w").write(json.dumps(shown))
sys.stdin.read()
__import__("time").sleep(60)
"""
"""A role that writes down what it was given, and lives."""


def shown(path: Path) -> dict[str, object]:
    """What another process has written, as soon as it has."""
    until = time.monotonic() + SOON
    while not path.exists() or not path.read_bytes():
        assert time.monotonic() < until
        time.sleep(0.02)
    return json.loads(path.read_bytes())


async def test_each_process_has_a_pair_of_its_own_that_goes_with_it(tmp_path: Path) -> None:
    launcher, keys = LocalLauncher(tmp_path, 0), list[tuple[str, str]]()
    launcher.authorize = lambda role, key: keys.append((role, key))
    try:
        await launcher.place({"worker-0": 0})
        for number in range(2):
            process = await launcher.start("worker-0", [sys.executable, "-c", SHOW, str(tmp_path / f"{number}")], {})
            assert len(keys) == number + 1  # known before it could use it
            given = await asyncio.to_thread(shown, tmp_path / f"{number}")
            folder = str(given["folder"])
            assert given["modes"] == [0o700, 0o600]
            assert keys[number] == ("worker-0", read_pair(folder).public)
            secret = read_pair(folder).secret
            assert not any(secret in seen for seen in visible(process.pid))
            await process.kill()
            assert await process.wait() == -9
            assert not os.path.exists(folder)  # noqa: ASYNC240
        assert len(set(keys)) == 2
        await launcher.start("worker-0", [sys.executable, "-c", SHOW, str(tmp_path / "2")], {})
        folder = str((await asyncio.to_thread(shown, tmp_path / "2"))["folder"])
    finally:
        await launcher.close()
    assert not os.path.exists(folder)  # noqa: ASYNC240


def visible(pid: int) -> list[str]:
    """The command line and the environment of a process."""
    return [Path(f"/proc/{pid}/{what}").read_text() for what in ("cmdline", "environ")]


class Run:
    """The sockets of a supervisor, and roles that are this process by turns."""

    def __init__(self, sockets: SupervisorSockets, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sockets, self._folder, self._monkeypatch = sockets, folder, monkeypatch
        self.context = RunContext(load("quickstart"), sockets.addresses, str(folder), "gloo", str(folder), pushed=True)

    def become(self, role: str, pair: KeyPair | None = None) -> KeyPair:
        """This process is `role`, whose key is authorized unless it is given."""
        own = pair or make_pair()
        if pair is None:
            self.sockets.access.authorize(role, own.public)
        folder = self._folder / own.public.encode().hex()
        folder.mkdir(exist_ok=True)
        (folder / FILE).write_bytes(msgspec.json.encode(own))
        self._monkeypatch.setenv(PRIVATE_VARIABLE, str(folder))
        return own


@pytest.fixture
def certified() -> list[tuple[str, str]]:
    return []


@pytest.fixture
async def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, certified: list[tuple[str, str]]) -> AsyncIterator[Run]:
    sockets = SupervisorSockets("127.0.0.1", load("quickstart"), lambda *told: certified.append(told))
    serving = [asyncio.create_task(service) for service in sockets.services()]
    try:
        yield Run(sockets, tmp_path, monkeypatch)
    finally:
        for task in serving:
            task.cancel()
        await asyncio.wait(serving)
        await sockets.close()


async def test_a_role_gets_the_tokens_that_it_may_use(run: Run, certified: list[tuple[str, str]]) -> None:
    tokens = run.sockets.access.servers
    async with asyncio.timeout(2 * SOON):
        for role in ("worker-3", "evaluator", "rater"):
            run.become(role)
            assert await request_access(run.context, role, "c0ffee") == msgspec.structs.replace(tokens, control="")
        for role in ("learner-0", "engine-1", "reward"):
            run.become(role)
            assert await request_access(run.context, role, "c0ffee") == tokens
        assert certified == [("engine-1", "c0ffee"), ("reward", "c0ffee")]  # a worker has no certificate
        for role in ("buffer", "critic-0", "sft-0"):
            run.become(role)
            with pytest.raises(RequestRefused, match=f"{role} uses no server"):
                await request_access(run.context, role)
        assert run.sockets.access.access("engine-1").certificate == "c0ffee"
        run.become("engine-1")  # it starts again, and has not said its new one yet
        assert run.sockets.access.access("engine-1").certificate == ""
    assert tokens.request != tokens.control
    assert tokens.request not in repr(tokens)
    context = msgspec.json.encode(run.context).decode()
    assert not any(secret in context for secret in (tokens.request, tokens.control, run.sockets.access.pair.secret))


async def test_a_server_that_others_started_has_tokens_of_its_own(run: Run, tmp_path: Path) -> None:
    keys, access = make_server_keys(tmp_path / "keys.json", "127.0.0.1"), run.sockets.access
    access.admit_server("engine-0", keys)
    assert access.access("engine-0") == keys.access
    async with asyncio.timeout(2 * SOON):
        run.become("worker-0")
        granted = await request_access(run.context, "worker-0")
        assert granted.of("engine-0", "") == msgspec.structs.replace(keys.access, control="")
        assert granted.of("engine-1", "c0ffee") == ServerAccess(access.servers.request, "", "c0ffee")
        run.become("learner-0")
        assert (await request_access(run.context, "learner-0")).of("engine-0", "") == keys.access
        run.become("reward")
        assert (await request_access(run.context, "reward")).others == {}
        run.become("engine-0", KeyPair(keys.public, keys.secret))
        with pytest.raises(RequestRefused, match="engine-0 is a server that others started"):
            await request_access(run.context, "engine-0")
    assert access.directory.keys["engine-0"] == keys.public
    assert keys.control not in repr(access.servers)


async def test_the_key_of_a_process_before_and_foreign_ones_get_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run.become("worker-0")
    await request_access(run.context, "worker-0")
    monkeypatch.setattr(peers_module, "ACCESS_S", 1.0)  # from here on no request is granted
    run.become("worker-0")
    for pair in (before, make_pair()):
        run.become("worker-0", pair)
        with pytest.raises(
            DeadlineExceeded, match=r"worker-0 waited 1 s .*is the supervisor at .* alive, and this pro"
        ):
            await request_access(run.context, "worker-0")
    run.sockets.access.revoke("worker-0")
    assert "worker-0" not in run.sockets.access.directory.keys


async def test_the_directory_reaches_the_roles(run: Run) -> None:
    seen: asyncio.Queue[PeerDirectory] = asyncio.Queue()
    buffer = run.become("buffer")
    async with asyncio.timeout(SOON), following_peers(run.context, seen.put_nowait):
        while "buffer" not in (directory := await seen.get()).keys:
            pass
        assert directory.keys == {"supervisor": run.sockets.access.pair.public, "buffer": buffer.public}
        worker = make_pair()
        run.sockets.access.authorize("worker-0", worker.public)
        while "worker-0" not in (directory := await seen.get()).keys:
            pass
        assert directory.keys["worker-0"] == worker.public


class Lines:
    """A view that shows nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


async def test_settings_reach_a_buffer_that_starts_while_it_is_asked(run: Run, tmp_path: Path) -> None:
    """As one that was killed does: the supervisor does not know its key yet."""
    access, (port,) = run.sockets.access, free_ports(1)
    addresses = msgspec.structs.replace(run.context.addresses, buffer=f"tcp://127.0.0.1:{port}#")
    context = msgspec.structs.replace(run.context, addresses=addresses)
    processes = ProcessManager(context.config, tmp_path, None, Lines())  # type: ignore[arg-type]
    manager = SettingsManager(
        *(context, run.sockets.settings, processes, Lines()),  # type: ignore[arg-type]
        last_step=lambda: None,
        trusting=access.trusting,
        pair=access.pair,
    )

    async def answer(request: RpcRequest[Request]) -> Configured:
        return Configured(7)

    async with asyncio.timeout(SOON):
        changing = asyncio.create_task(manager.change(["buffer.max_staleness=1"]))
        for alive in (False, True):  # the first dies before it answers
            pair = make_pair()
            access.authorize("buffer", pair.public)
            peers = PeerTable({SUPERVISOR: access.pair.public})
            server: RpcServer[Request] = RpcServer(
                f"tcp://127.0.0.1:{port}", "the buffer", Request, peers=peers, pair=pair
            )
            serving = asyncio.create_task(server.serve(answer, "a request") if alive else server.poll())
            await (changing if alive else serving)
            serving.cancel()
            await asyncio.wait({serving})
            server.close()
        (changed,) = changing.result()
    assert (changed.new, changed.version) == (1, 7)


MESSAGES = 3000


async def test_signals_of_strangers_and_in_other_names_change_nothing(run: Run) -> None:
    class Replicas:
        def update(self, report: ReplicaReport) -> None:
            raise AssertionError(f"a worker spoke of {report}")

        def suspect(self, role: str, reports: tuple[FalseReplies, ...]) -> None:
            assert not reports, role

    processes = ProcessManager(load("quickstart"), Path(run.context.run_dir), None, Lines())  # type: ignore[arg-type]
    processes.roles |= {name: RoleProcess(name) for name in ("worker-0", "worker-1", "learner-0")}
    monitor = HealthMonitor(processes, Replicas(), 30.0, Lines())  # type: ignore[arg-type]
    listening = asyncio.create_task(monitor.listen(run.sockets.signals))
    run.become("worker-0")
    step = StepSummary(9, 0.5, 0.0, 0, None, None, None, None, None)

    def send() -> None:
        address = run.sockets.signals.address
        with contextlib.suppress(OSError), RpcNotifier(address, linger_ms=int(SOON * 1000)) as worker:
            for _ in range(MESSAGES // 4):
                while not worker.notify(RoleFailed("worker-1", "it is ill", expected=False)):
                    pass
                while not worker.notify(StepReported("worker-0", step)):
                    pass
                while not worker.notify(Heartbeat("learner-0", state="done", checkpoint=7)):
                    pass
                mine = Heartbeat("worker-0", replicas=(ReplicaReport("engine-0", 0, 99),), checkpoint=7)
                while not worker.notify(mine):
                    pass
            while not worker.notify(Heartbeat("worker-0", state="ready")):
                pass

    async with asyncio.timeout(4 * SOON):
        await asyncio.to_thread(send)
        await processes.roles["worker-0"].ready.wait()
    assert monitor.foreign == MESSAGES // 2
    assert run.sockets.signals.forbidden == MESSAGES // 4
    assert processes.roles["worker-1"].error == ""
    assert not processes.roles["learner-0"].done.is_set()
    assert all(role.checkpoint == 0 for role in processes.roles.values())
    assert monitor.last_step is None
    listening.cancel()
    await asyncio.wait({listening})
