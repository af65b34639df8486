"""How a run ends: restarts that cannot help are not tried, an error is shown with its cause, an interrupt is answered at once."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from rich.console import Console
from slipstream.common.waits import Wait
from slipstream.configs import load
from slipstream.configs.schema import Agent
from slipstream.envs import parts_of
from slipstream.errors import RoleDied
from slipstream.launch.init_model import TinyModelShape, init_model
from slipstream.launch.launchers.local import LocalLauncher, ProcessHandle
from slipstream.launch.run_context import Addresses, RunContext
from slipstream.launch.supervisor.health import HealthMonitor
from slipstream.launch.supervisor.heartbeat import Heartbeat, HeartbeatSender, RoleSignal, StepReported, StepSummary
from slipstream.launch.supervisor.processes import ProcessManager, RoleProcess, last_error
from slipstream.monitor.terminal import LineView
from slipstream.rpc import wire
from slipstream.rpc.client import RpcNotifier
from slipstream.rpc.pubsub import StatePublisher
from slipstream.rpc.server import RpcServer
from slipstream.rpc.wire import ONE_WAY, RpcMessage
from slipstream.tests.runs import ENDLESS, SMALL, Background, bare_replicas, leftovers, slipstream, tiny_policy
from slipstream.weightsync.fleet import Fleet

WAIT_S = 240.0

HEAD_SIZE = "ValueError: Head size 8 is not supported by FlashAttention. Supported head sizes are: [32, 64, 96]."

VLLM = f"""
print("(EngineCore_0 pid=17) Traceback (most recent call last):", flush=True)
print("(EngineCore_0 pid=17) {HEAD_SIZE}", flush=True)
print("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}", flush=True)
"""
"""What a vLLM server does that cannot serve a model: it ends with status 0."""

BROKEN = """
import sys
sys.modules["slipstream.buffer.service"] = None
from slipstream.launch.supervisor.entrypoints import run_role
raise SystemExit(run_role("buffer"))
"""
"""The buffer of an installation from which a module is missing."""


class Scripts(LocalLauncher):
    """Starts `python -c code` for every role."""

    code, starts = "", 0

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        self.starts += 1
        return await super().start(role, [sys.executable, "-c", self.code], environment)


class Stage:
    """The parts of a supervisor that start roles and hear of them."""

    def __init__(self, folder: Path, server: RpcServer[RoleSignal], *overrides: str) -> None:
        config = load("quickstart", [f"run.dir={folder}", *overrides])
        self.console = Console(file=io.StringIO(), width=1000)
        view = LineView(config, self.console)
        (folder / "logs").mkdir()
        self.launcher = Scripts(folder / "logs", 0)
        self.processes = ProcessManager(config, folder, self.launcher, view)
        self.fleets = StatePublisher("tcp://127.0.0.1:*", Fleet())
        replicas = bare_replicas(self.processes, self.launcher, self.fleets, view)
        self.health = HealthMonitor(self.processes, replicas, config.launch.heartbeat_s, view)
        addresses = Addresses(server.address, "", "", "")
        self.context = RunContext(config, addresses, str(folder), "gloo", str(folder), pushed=True)

    async def died(self, role: RoleProcess, code: str) -> str:
        """Run `code` as the role until the supervisor gives it up; the error."""
        self.launcher.code = code
        self.processes.roles[role.name] = role
        await self.processes.start(role)
        with pytest.raises(RoleDied) as died:
            await self.processes.watch([role])
        return str(died.value)

    def events(self) -> list[str]:
        assert isinstance(self.console.file, io.StringIO)
        return [line for line in self.console.file.getvalue().splitlines() if line.startswith("!")]


@contextlib.asynccontextmanager
async def stage(folder: Path, *overrides: str) -> AsyncIterator[tuple[Stage, RpcServer[RoleSignal]]]:
    server: RpcServer[RoleSignal] = RpcServer("tcp://127.0.0.1:*", "the supervisor", RoleSignal)
    there = Stage(folder, server, *overrides)
    listening = asyncio.create_task(there.health.listen(server))
    try:
        async with asyncio.timeout(WAIT_S):
            yield there, server
        assert not listening.done()
    finally:
        listening.cancel()
        await there.launcher.close()
        await there.fleets.close()
        server.close()


def engine() -> RoleProcess:
    """A server that never answers."""
    return RoleProcess("engine-0", probe=("http://127.0.0.1:1", "/health"))


async def test_a_missing_module_is_not_tried_again(tmp_path: Path) -> None:
    async with stage(tmp_path) as (there, _):
        error = await there.died(RoleProcess("buffer", there.context.environment("buffer")), BROKEN)
    assert there.launcher.starts == 1
    assert "buffer ended with exit status 1: ModuleNotFoundError: " in error
    assert "slipstream.buffer.service" in error
    assert "; a restart would not help. See " in error


async def test_a_server_that_cannot_start_is_tried_twice_and_says_why(tmp_path: Path) -> None:
    async with stage(tmp_path) as (there, _):
        error = await there.died(engine(), VLLM)
    assert there.launcher.starts == 2
    assert there.events() == [f"! engine-0 ended with exit 0: {HEAD_SIZE}; restart 1 of 3"]
    assert f"engine-0 ended with exit 0: {HEAD_SIZE}; given up: a restart ended with the same error. See " in error


REFUSES = """
import os, time
while not os.path.exists(f"{folder}/probed-{{os.getpid()}}"):
    time.sleep(0.01)
raise RuntimeError("Unsupported CPU attention configuration: head_dim=20")
"""
"""What a server does that starts with any model, and dies of the first request, which comes after its first probe."""


@pytest.mark.parametrize(("served", "starts"), [(False, 2), (None, 4)])
async def test_a_server_that_dies_before_it_served_a_version_is_tried_twice(
    served: bool | None, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role = RoleProcess("engine-0", probe=("", ""), served=served)

    async def answers(*_: object) -> bool:
        assert role.process is not None
        (tmp_path / f"probed-{role.process.pid}").touch()
        return True

    monkeypatch.setattr("slipstream.launch.supervisor.processes.is_healthy", answers)
    async with stage(tmp_path) as (there, _):
        error = await there.died(role, REFUSES.format(folder=tmp_path))
    assert there.launcher.starts == starts
    assert "RuntimeError: Unsupported CPU attention configuration: head_dim=20; given up" in error


@pytest.mark.full
def test_a_model_that_vllm_refuses_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    source = parts_of(load("quickstart").env, "train", 0)[0].source
    shape = TinyModelShape(head_dim=20, heads=2, kv_heads=2)
    init_model(tmp_path / "policy", sources=[source], agent=Agent(), shape=shape, samples=64)
    arguments = ("train", "quickstart", f"model.path={tmp_path / 'policy'}", f"run.dir={tmp_path / 'run'}")
    done = slipstream(*arguments, *SMALL, check=False)
    assert done.returncode == 1
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("slipstream: RoleDied: "))
    assert "RuntimeError: Unsupported CPU attention configuration: head_dim=20" in line
    assert "given up: a restart ended with the same error" in line
    assert done.stdout.count("engine-0: started") == 2


@pytest.mark.parametrize(
    "code",
    [
        "raise OSError('[Errno 98] Address already in use')",
        "raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
async def test_what_may_pass_is_tried_as_often_as_the_config_allows(code: str, tmp_path: Path) -> None:
    async with stage(tmp_path, "launch.restarts=2") as (there, _):
        assert "given up after 2 restarts" in await there.died(engine(), code)
    assert there.launcher.starts == 3


def test_an_error_of_an_earlier_process_is_not_that_of_a_later_one(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("ValueError: wrong\n")
    assert last_error(log) == "ValueError: wrong"
    assert last_error(log, log.stat().st_size) == ""
    log.write_text("EngineDeadError: EngineCore encountered an issue. See stack trace for the root cause.\n")
    assert last_error(log).startswith("EngineDeadError")  # better than nothing
    assert last_error(tmp_path / "of another host.log") == ""


def test_a_view_gets_numbers_that_are_finite() -> None:
    sender = HeartbeatSender("tcp://127.0.0.1:1", "learner-0")
    fields = {name: 1 for name in StepSummary.__struct_fields__} | {
        "loss": 2.0,
        "reward_mean": float("nan"),
        "outcomes": {"finished": 1},
    }
    sender.stepped(msgspec.defstruct("Metrics", list(fields))(**fields))
    reported = sender._outbox.get_nowait()
    assert isinstance(reported, StepReported)
    assert (reported.summary.step, reported.summary.reward_mean) == (1, None)


async def test_a_message_of_a_wrong_type_changes_nothing(tmp_path: Path) -> None:
    async with stage(tmp_path) as (there, server):
        role = there.processes.roles["learner-0"] = RoleProcess("learner-0")
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(server.address)
        step = {"type": "StepReported", "role": "learner-0"}
        for message in (
            [1, 2],
            step | {"summary": [1, 2]},
            step | {"summary": {"step": "x"}},
            {"type": "Heartbeat", "role": 7},
        ):
            await socket.send_multipart(wire.encode(RpcMessage(ONE_WAY, message)))
        await socket.send_multipart([b"", b"\xff"])
        await socket.send_multipart(wire.encode(RpcMessage(ONE_WAY, Heartbeat("nobody-9"))))
        while server.received < 6:  # noqa: ASYNC110 - a dropped message sets nothing that could be awaited
            await asyncio.sleep(0.01)
        assert role.last_seen == 0.0
        with RpcNotifier(server.address) as notifier:
            notifier.notify(Heartbeat("learner-0", (Wait("learner-0", "a batch", 1.0, 2.0),)))
            while not role.waits:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert server.dropped == 5
        socket.close(linger=0)
        context.term()


def test_a_terminal_that_is_closed_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    settings = ("rollout.engine.kind=transformers", ENDLESS, "learner.checkpoint_every=400")
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *settings)
    log = run / "logs" / "supervisor.log"
    with Background(*arguments) as going:
        going.until_step(1)
        learner = going.roles()["learner-0"].pid
        os.kill(learner, signal.SIGSTOP)  # so that the answer cannot wait for its end
        going.process.send_signal(signal.SIGHUP)
        going.until(lambda: "interrupted: waiting up to" in log.read_text(), "answer to the signal")
        assert "for the learner to write a checkpoint; interrupt again to end at once" in log.read_text()
        os.kill(learner, signal.SIGCONT)
        output = going.output()
    assert going.process.returncode == 130, output
    assert "! interrupted: waiting up to" in output
    assert len(list((run / "checkpoints").glob("step-*"))) == 1
    assert leftovers(run) == []


def test_a_second_interrupt_ends_a_run_at_once(tmp_path: Path) -> None:
    policy, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    settings = ("rollout.engine.kind=transformers", ENDLESS, "launch.heartbeat_s=80")
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *settings)
    log = run / "logs" / "supervisor.log"
    with Background(*arguments) as going:
        going.until_step(1)
        os.kill(going.roles()["learner-0"].pid, signal.SIGSTOP)
        going.process.send_signal(signal.SIGINT)
        going.until(lambda: "interrupted: waiting" in log.read_text(), "answer to the signal")
        going.process.send_signal(signal.SIGINT)
        output = going.output()
    assert going.process.returncode == 130, output
    assert "! interrupted again: ending all processes now" in output
    assert leftovers(run) == []
    assert slipstream("ledger", str(run), "--json").returncode == 0
