"""Environments in processes of their own: what they return and raise arrives, and one that hangs or dies costs its process."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import psutil
import pytest
import zmq.asyncio
from slipstream.configs import load
from slipstream.configs.environments import (
    Dataset,
    EnvironmentKind,
    PythonEnv,
    TextArena,
    absolute_paths,
    without_placement,
)
from slipstream.envs import EnvPart, Message, Task, ToolCall, task_source
from slipstream.envs.dataset.source import DatasetSource
from slipstream.envs.isolation import remote as remote_module
from slipstream.envs.isolation import serve as serve_module
from slipstream.envs.isolation import stacks
from slipstream.envs.isolation.host import EnvHost
from slipstream.envs.isolation.link import options_of
from slipstream.envs.isolation.messages import (
    CallCancelled,
    CancelCall,
    CloseEpisode,
    Describe,
    Description,
    EnvReply,
    EpisodeClosed,
    EpisodeOpened,
    ResetEpisode,
    SourceKey,
    StepEpisode,
)
from slipstream.envs.isolation.pool import HostPool
from slipstream.envs.isolation.remote import EnvKeys
from slipstream.envs.isolation.serve import EnvServer
from slipstream.envs.isolation.source import IsolatedEnv
from slipstream.envs.tools import in_thread
from slipstream.errors import ConfigError, EnvError, ToolError
from slipstream.rollout.env_guard import EnvGuard, EpisodeLimits, TaskMemo
from slipstream.rpc.client import RpcClient
from slipstream.rpc.security import make_pair

SOON = 60.0

HURRIED = EpisodeLimits(60.0, 1.0, 0.5)
UNHURRIED = EpisodeLimits(60.0, SOON, 0.5)
"""In which an episode begins also where its process has to wait for a core."""

PLAYGROUND = """
import asyncio, ctypes, os, random, threading, time
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task, Tool, ToolSpec, call_tool, in_thread
from slipstream.errors import ToolError

class Reward(float): pass

async def sleeps(arguments): await asyncio.sleep(60)

class Playground(SimpleEnv):
    penalty = -2.0
    def task(self, index):
        if index == 13: raise KeyError("unlucky")
        if index == 14: holds_the_lock()
        return Task(f"p-{index}", {"n": self.rng(index).randint(0, 10**6)})
    async def reset(self, task):
        self.n, self.closed = task.payload["n"], False
        return Observation([Message("user", f"{self.n} in {os.getpid()}")])
    async def step(self, message):
        said = message.content
        print("environments may print")
        if said == "block":
            began = time.monotonic()
            time.sleep(0.2)
            return StepResult(metrics={"began": began, "ended": time.monotonic()}, done=True)
        if said == "sleep": await asyncio.sleep(60)
        if said == "stubborn":
            for _ in range(100):
                try: await asyncio.sleep(1)
                except asyncio.CancelledError: pass
        if said == "lock": holds_the_lock()
        if said == "thread": await in_thread(holds_the_lock)
        if said == "segv": ctypes.string_at(0)
        if said == "exit": raise SystemExit(3)
        if said == "die": os._exit(7)
        if said == "raise": return {}["Spain"]
        if said == "tool": raise ToolError("the shop is closed")
        if said == "call":
            tool = Tool(ToolSpec("shop", "", {"type": "object"}), sleeps)
            return StepResult(((await call_tool({"shop": tool}, message.tool_calls[0]))[0],))
        if said == "text": return StepResult(reward="1.0")
        if said == "surrogate": return StepResult((Message("user", "\\ud800"),))
        if said == "nothing": return None
        return StepResult([Message("user", f"you said {said}")], Reward(0.5), metrics={"length": len(said)})
    def demonstration(self, task, rng):
        return Observation((Message("user", "hm"),)), (Message("assistant", str(rng.random())),)

def holds_the_lock():
    return len(str(7 ** (7 ** 9)))  # C that neither ends nor gives the interpreter's lock away
"""


@pytest.fixture(autouse=True)
def _playground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "playground.py").write_text(PLAYGROUND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "playground", raising=False)
    monkeypatch.chdir(tmp_path)


def playground(**placement) -> PythonEnv:
    return PythonEnv(factory="playground:Playground", **({"isolate": 1} | placement))


def said(text: str) -> Message:
    return Message("assistant", text)


async def begun(source, index: int = 0) -> IsolatedEnv:
    env = source.make()
    async with asyncio.timeout(SOON):
        await env.reset(source.task(index))
    return env


def pids(source) -> list[int]:
    return [slot.process.pid for slot in source._hosts.slots if slot.process is not None and not slot.process.ended]


async def test_an_isolated_source_is_like_any_other() -> None:
    here, there = (task_source(config, "train", 3) for config in (playground(isolate=0), playground(isolate=1)))
    assert (there.name, there.penalty) == ("Playground", -2.0)
    assert [there.task(i) for i in range(5)] == [here.task(i) for i in range(5)]
    assert there.task(0) != task_source(playground(), "eval", 3).task(0)
    shown = there.demonstration(there.task(0), here.rng(0))
    assert shown is not None
    assert float(shown[1][0].content) != 0.0
    env = there.make()
    opening = await env.reset(there.task(2))
    assert opening.messages[0].content == f"{here.task(2).payload['n']} in {pids(there)[0]}"
    result = await env.step(said("hm"))
    assert (result.messages[0].content, result.reward, result.metrics) == ("you said hm", 0.5, {"length": 2.0})
    await env.close()


@pytest.mark.parametrize(
    ("text", "kind", "complaint"),
    [
        ("raise", EnvError, r"KeyError: 'Spain' \(playground.py:\d+ in step\)"),
        ("tool", ToolError, "the shop is closed"),
        ("exit", EnvError, "SystemExit: 3"),
        ("text", EnvError, "a reward of '1.0'; allowed are numbers"),
        ("nothing", EnvError, "it returned None; return StepResult"),
        ("surrogate", EnvError, "cannot be sent|surrogate"),
    ],
)
async def test_what_it_raises_and_breaks_is_a_failure_of_its_episode_alone(
    text: str, kind: type, complaint: str
) -> None:
    source = task_source(playground(), "train", 0)
    env, other = await begun(source), await begun(source)
    with pytest.raises(kind, match=complaint):
        await env.step(said(text))
    assert (await other.step(said("hm"))).reward == 0.5
    await env.close()
    await other.close()


@pytest.mark.parametrize(("text", "how"), [("segv", "ended with SIGSEGV"), ("die", "ended with status 7")])
async def test_a_process_that_dies_fails_its_episodes_and_is_replaced(text: str, how: str) -> None:
    source = task_source(playground(isolate=2), "train", 0)
    envs = [await begun(source) for _ in range(3)]
    first = set(pids(source))
    assert len(first) == 2
    with pytest.raises(EnvError, match=f"the process of Playground {how}") as ended:
        await envs[0].step(said(text))
    if text == "segv":
        assert "it was in playground.py:" in str(ended.value)
    assert (await envs[1].step(said("hm"))).reward == 0.5
    with pytest.raises(EnvError, match=how):
        await envs[2].step(said("hm"))
    for env in envs:
        await env.close()
    again = [await begun(source) for _ in range(2)]
    assert len(set(pids(source)) - first) == 1
    for env in again:
        await env.close()


@pytest.mark.parametrize("text", ["lock", "thread"])
async def test_a_call_that_never_returns_is_a_failure_that_says_where_it_was(text: str) -> None:
    """The interpreter's lock is held in C, in the thread of the event loop or in another."""
    source = task_source(playground(isolate=2), "train", 0)
    part = EnvPart("games", 1.0, source, None)
    guard, other, neighbor = EnvGuard(part, UNHURRIED, TaskMemo()), await begun(source), await begun(source)
    with guard.calls:
        await guard.reset(await guard.open(0))
        guard._limits = HURRIED
        started = time.perf_counter()
        with pytest.raises(
            EnvError, match=r"it was in playground.py:\d+ in holds_the_lock, and its process was killed"
        ):
            await guard.step(said(text))
    assert time.perf_counter() - started < SOON
    assert guard.failure is not None
    assert guard.rewards == []
    failed, going_on = (other, neighbor) if other_is_with(guard, other) else (neighbor, other)
    with pytest.raises(
        EnvError, match=r"was killed: a call did not end after it was cancelled; it was in playground.py"
    ):
        await failed.step(said("hm"))
    assert (await going_on.step(said("hm"))).reward == 0.5
    for env in (guard, other, neighbor):
        await env.close()


def other_is_with(guard: EnvGuard, other: IsolatedEnv) -> bool:
    episodes = other._hosts._episodes  # type: ignore[attr-defined]
    return episodes[guard._inner._episode][1] is episodes[other._episode][1]  # type: ignore[union-attr]


CLOSES = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <unistd.h>

int close(int file)
{
    int done = ((int (*)(int))dlsym(RTLD_NEXT, "close"))(file);
    if (done < 0 && errno == EBADF)
        _exit(99);
    return done;
}
"""


def test_the_pipe_of_a_start_is_closed_once(tmp_path: Path) -> None:
    """Closed twice, a descriptor that another thread has opened meanwhile would be gone, above all one of libzmq, which aborts."""
    (tmp_path / "closes.c").write_text(CLOSES)
    subprocess.run(("gcc", "-shared", "-fPIC", "-o", "closes.so", "closes.c", "-ldl"), cwd=tmp_path, check=True)
    program = (
        "import os, uvloop\n"
        "from slipstream.envs.isolation.process import _line\n"
        "told, tells = os.pipe()\n"
        "os.write(tells, b'{}\\n')\n"
        "assert uvloop.run(_line(told)) == b'{}\\n'\n"
    )
    preloaded = os.environ | {"LD_PRELOAD": str(tmp_path / "closes.so")}
    done = subprocess.run((sys.executable, "-c", program), env=preloaded, timeout=SOON, check=False)
    assert done.returncode == 0  # 99: what is not open was closed


async def test_a_task_that_never_comes_costs_its_process(caplog: pytest.LogCaptureFixture) -> None:
    source = task_source(playground(), "train", 0)
    guard = EnvGuard(EnvPart("games", 1.0, source, None), HURRIED, TaskMemo())
    (before,) = pids(source)
    with pytest.raises(EnvError, match="task 14"):
        await guard.open(14)
    async with asyncio.timeout(SOON):
        while pids(source) == [before]:  # noqa: ASYNC110 - until the kernel has ended it
            await asyncio.sleep(0.05)
    assert "in holds_the_lock" in caplog.text
    with pytest.raises(EnvError, match="KeyError: 'unlucky'"):
        source.task(13)


async def test_a_cancelled_call_that_ends_costs_nothing_but_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.envs.isolation.pool.ANSWER_S", SOON)  # its process may have to wait for a core
    source = task_source(playground(), "train", 0)
    process = pids(source)
    env, other = await begun(source), await begun(source)
    for text in ("sleep", "stubborn"):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await env.step(said(text))
        assert env.where == ""
    assert (await other.step(said("hm"))).reward == 0.5
    assert pids(source) == process
    await env.close()
    await other.close()


async def test_a_tool_that_takes_too_long_is_the_tools_failure() -> None:
    source = task_source(playground(), "train", 0)
    guard = EnvGuard(EnvPart("games", 1.0, source, None), UNHURRIED, TaskMemo())
    with guard.calls:
        await guard.reset(await guard.open(0))
        call = Message("assistant", "call", (ToolCall("shop", {}, "c0"),))
        with pytest.raises(ToolError, match=r"waited 0\.5 s for the tool 'shop'"):
            await guard.step(call)
    await guard.close()


async def test_blocking_episodes_share_the_processes_and_the_loop_turns() -> None:
    source = task_source(playground(isolate=4), "train", 0)
    envs = await asyncio.gather(*(begun(source) for _ in range(16)))
    assert len(pids(source)) == 4
    turns = 0

    async def beat() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    beating, started = asyncio.create_task(beat()), time.perf_counter()
    blocked = [(await step).metrics for step in asyncio.as_completed([env.step(said("block")) for env in envs])]
    took = time.perf_counter() - started
    beating.cancel()
    at_once = [sum(other["began"] <= one["began"] < other["ended"] for other in blocked) for one in blocked]
    assert 1 < max(at_once) <= 4  # one in each process
    assert turns > 10 * took  # five where each call of a process holds it up
    await asyncio.gather(*(env.close() for env in envs))


SMALL = ("msgspec", "zmq", "pyzmq.libs", "numpy", "numpy.libs", "yaml", "_yaml")  # what a host needs, and nothing else


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """An interpreter of its own with the small set of packages, and one that ours has not."""
    home = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", home], check=True, timeout=SOON)
    site = next(home.glob("lib/python*/site-packages"))
    ours = Path(msgspec.__file__).parent.parent
    for name in filter(lambda name: (ours / name).exists(), SMALL):
        (site / name).symlink_to(ours / name)
    (site / "conflicting.py").write_text("VERSION = 7")
    return str(home / "bin" / "python")


async def test_an_interpreter_of_its_own_needs_four_small_packages(other_python: str, tmp_path: Path) -> None:
    (tmp_path / "pinned.py").write_text(
        "import conflicting, sys\nfrom playground import *\n"
        "class Pinned(Playground):\n"
        "    def __len__(self): return 5\n"
        "    async def step(self, message):\n"
        "        return StepResult((Message('user', sys.executable),), float(conflicting.VERSION), True)\n"
    )
    source = task_source(PythonEnv(factory="pinned:Pinned", python=other_python), "train", 0)
    assert len(source) == 5
    env = await begun(source)
    result = await env.step(said("hm"))
    assert (result.messages[0].content, result.reward) == (other_python, 7.0)
    await env.close()
    with pytest.raises(ConfigError, match="No module named 'conflicting'"):
        task_source(PythonEnv(factory="pinned:Pinned", isolate=1), "train", 0)


async def test_an_interpreter_without_the_packages_is_refused_with_what_to_install(other_python: str) -> None:
    for package in Path(other_python).parent.parent.glob("lib/python*/site-packages/msgspec"):
        package.unlink()
    with pytest.raises(
        ConfigError, match=r"No module named 'msgspec'; run `.*python -m pip install msgspec pyzmq"
    ) as refused:
        task_source(playground(python=other_python), "train", 0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (PythonEnv(factory="nowhere:Env", isolate=1), "env.factory: cannot import 'nowhere'"),
        (PythonEnv(factory="playground:Gone", isolate=1), "env.factory: 'playground' has no callable 'Gone'"),
        (TextArena(id="204-v0", isolate=1), "env.id: textarena has no game"),
        (PythonEnv(factory="playground:Playground", python="/nowhere/python"), "env: .*does not start.*No such file"),
        (PythonEnv(factory="playground:Playground", python="/bin/false"), "env: .*ended before it was ready"),
    ],
)
async def test_what_is_wrong_with_it_is_one_line_before_anything_starts(
    config: EnvironmentKind, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        task_source(config, "train", 0)
    assert "\n" not in str(refused.value)


async def test_rows_are_read_here_and_scored_there(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2?", "answer": "4"}\n{"question": "1+2?", "answer": "3"}\n')
    (tmp_path / "scoring.py").write_text(
        "import os\ndef score(completion, row): return {'reward': float(completion == row['answer']), 'pid': os.getpid()}\n"
    )
    config = Dataset(
        path=str(tmp_path / "rows.jsonl"), reward=f"{tmp_path}/scoring.py:score", evaluation=0.0, isolate=1
    )
    source, plain = (task_source(c, "train", 0) for c in (config, without_placement(config)))
    assert isinstance(source, DatasetSource)
    assert (len(source), source.task(1)) == (2, plain.task(1))
    env = await begun(source)
    result = await env.step(said(source.task(0).payload["reference"]))
    assert (result.reward, result.metrics["pid"]) == (1.0, float(pids(source)[0]))
    await env.close()


WORKER = """
import asyncio, sys
from slipstream.configs.environments import PythonEnv
from slipstream.envs import Message, task_source
async def main():
    source = task_source(PythonEnv(factory="playground:Playground", isolate=2), "train", 0)
    envs = [source.make(), source.make()]
    for env in envs: await env.reset(source.task(0))
    stuck = asyncio.ensure_future(envs[0].step(Message("assistant", "lock")))
    await envs[1].step(Message("assistant", "hm"))
    print(*(slot.process.pid for slot in source._hosts.slots), flush=True)
    await stuck
asyncio.run(main())
"""


def test_nothing_outlives_a_worker_that_is_killed(tmp_path: Path) -> None:
    """Not even a process that holds its interpreter's lock, and could not notice by itself."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdout=subprocess.PIPE, env=environ, text=True)
    assert worker.stdout is not None
    hosts = [psutil.Process(int(pid)) for pid in worker.stdout.readline().split()]
    assert len(hosts) == 2
    worker.send_signal(signal.SIGKILL)
    worker.wait(SOON)
    _, alive = psutil.wait_procs(hosts, timeout=SOON)
    assert alive == []


async def test_a_source_that_is_dropped_ends_its_processes() -> None:
    gc.collect()  # sources of other tests, in tracebacks, would share the processes and keep them
    source = task_source(playground(), "train", 0)
    (pid,) = pids(source)
    process = psutil.Process(pid)
    again = task_source(playground(), "eval", 0)
    assert pids(again) == [pid], "both splits share the processes"
    del source, again
    _, alive = psutil.wait_procs([process], timeout=SOON)
    assert alive == []


def test_where_a_process_was_is_the_users_line() -> None:
    def written(*frames: str) -> list[str]:
        return [line if line.startswith(("Thread", "Current")) else f"  File {line}" for line in frames]

    library, ours = (
        '"/x/lib/python3.12/threading.py", line 3 in wait',
        f'"{stacks.ROOT}/envs/tools.py", line 5 in in_thread',
    )
    users, package = (
        '"/home/me/games.py", line 9 in step',
        '"/x/lib/python3.12/site-packages/chess/board.py", line 7 in mate',
    )
    main, other = "Current thread 0x1 (most recent call first):", "Thread 0x2 (most recent call first):"
    assert stacks.innermost(written(main, library, users)) == "games.py:9 in step"
    assert stacks.innermost(written(main, package, users)) == "board.py:7 in mate"
    assert stacks.innermost(written(other, package, ours, main, library, ours, users)) == "board.py:7 in mate"
    assert stacks.innermost(written(main, library, ours)) == ""
    assert stacks.innermost([]) == ""


ECHO = "import sys\nfor line in sys.stdin.buffer:\n    sys.stdout.buffer.write(line)\n    sys.stdout.buffer.flush()"


async def test_a_step_takes_at_most_25_times_as_long_as_a_line_to_another_process_and_back() -> None:
    """The best of many of each, by turns: a busy machine does not hide a slow path. It takes 12 times."""
    source = task_source(playground(), "train", 0)
    pipe = subprocess.PIPE
    echo = await asyncio.create_subprocess_exec(sys.executable, "-c", ECHO, stdin=pipe, stdout=pipe)
    assert echo.stdin is not None
    assert echo.stdout is not None
    env, took, bare = await begun(source), list[float](), list[float]()
    for _ in range(1000):
        started = time.perf_counter()
        await env.step(said("hm"))
        stepped = time.perf_counter()
        echo.stdin.write(b"hm\n")
        await echo.stdout.readline()
        took.append(stepped - started)
        bare.append(time.perf_counter() - stepped)
    echo.stdin.close()
    await asyncio.gather(env.close(), echo.wait())
    assert min(took) <= 25 * min(bare), (min(took), min(bare))


# --- other hosts --------------------------------------------------------------------------------------------------


class Server:
    """`slipstream env serve`, as a user starts it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        (folder / "env.yaml").write_text("env: {kind: python, factory: 'playground:Playground', isolate: 2}\n")
        words = ["env", "serve", "env.yaml", *arguments]
        code = f"import sys; from slipstream.launch.cli.main import main; sys.exit(main({words!r}))"
        environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stderr=subprocess.PIPE, env=environ, text=True, cwd=folder
        )
        assert self.process.stderr is not None
        self.line = self.process.stderr.readline()
        found = re.search(r"tcp://\S+:\d+", self.line)
        self.address = found[0].rstrip(",").replace("0.0.0.0", "127.0.0.1") if found else ""

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(SOON)


@pytest.fixture
def server(tmp_path: Path):
    server = Server(tmp_path, "--address", "tcp://127.0.0.1:*", "--keys", "env.keys")
    yield server
    server.stop()


async def test_another_host_runs_the_episodes_over_an_encrypted_link(server: Server, tmp_path: Path) -> None:
    assert server.line.startswith("slipstream: env at tcp://127.0.0.1:")
    assert (tmp_path / "env.keys").stat().st_mode & 0o77 == 0
    here = task_source(playground(isolate=0), "train", 3)
    remote = playground(isolate=0, address=server.address, keys=str(tmp_path / "env.keys"))
    source = task_source(remote, "train", 3)
    assert (source.name, source.penalty, source.task(4)) == ("Playground", -2.0, here.task(4))
    env, other = await begun(source), await begun(source)
    assert (await env.step(said("hm"))).reward == 0.5
    with pytest.raises(EnvError, match="KeyError: 'Spain'"):
        await env.step(said("raise"))
    part = EnvPart("games", 1.0, source, None)
    guard = EnvGuard(part, UNHURRIED, TaskMemo())
    with guard.calls:
        await guard.reset(await guard.open(0))
        guard._limits = HURRIED
        with pytest.raises(
            EnvError, match=r"it was in playground.py:\d+ in holds_the_lock, and its process was killed"
        ):
            await guard.step(said("lock"))
    results = await asyncio.gather(*(e.step(said("hm")) for e in (env, other)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["EnvError", "StepResult"]
    for episode in (env, other, guard):
        await episode.close()
    with pytest.raises(ConfigError, match="env: the server was given other options of it"):
        task_source(msgspec.structs.replace(remote, arguments={"hard": True}), "train", 3)
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert processes
    server.stop()
    assert psutil.wait_procs(processes, timeout=SOON)[1] == []


async def test_a_stranger_gets_nothing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "DESCRIBE_S", 1.0)
    theirs, ours = make_pair(), make_pair()
    other = EnvKeys(theirs.public, theirs.secret, ours.public, ours.secret)
    (tmp_path / "other.keys").write_bytes(msgspec.json.encode(other))
    for keys in ("", str(tmp_path / "other.keys")):
        with pytest.raises(
            ConfigError, match=r"env: .*waited 1 s .*is `slipstream env serve` running at .*, with the same keys"
        ):
            task_source(playground(isolate=0, address=server.address, keys=keys), "train", 0)


GATED = """
import gate
from playground import *
assert gate.opened.wait(60)
class Gated(Playground):
    async def reset(self, task):
        gate.resets += 1
        return await super().reset(task)
"""


KEPT = """
from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task

made = []

class Kept(SimpleEnv):
    def task(self, index): return Task("p", {})
    async def reset(self, task): return Observation((Message("user", "Go."),))
    async def played(self): return StepResult(reward=1.0, done=True)
    def step(self, message):
        made.append(self.played())
        return made[-1]
"""
"""Keeps the coroutines of its steps."""


def reset_of(config: PythonEnv) -> ResetEpisode:
    key = SourceKey("env", options_of(config), "train", 0)
    return ResetEpisode("reset", key, "episode", Task("p", {"n": 1}), 1.0)


@pytest.mark.parametrize(
    "ends", [CancelCall("reset"), CloseEpisode("close", "episode")], ids=lambda r: type(r).__name__
)
async def test_an_episode_that_ends_while_its_source_is_made_leaves_no_environment(
    ends: CancelCall | CloseEpisode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gated.py").write_text(GATED)
    gate: Any = ModuleType("gate")
    gate.opened, gate.resets = threading.Event(), 0
    monkeypatch.setitem(sys.modules, "gate", gate)
    monkeypatch.delitem(sys.modules, "gated", raising=False)
    host = EnvHost()
    resetting = asyncio.create_task(host.handle(reset_of(PythonEnv(factory="gated:Gated"))))
    await asyncio.sleep(0)
    await host.handle(ends)
    gate.opened.set()
    with pytest.raises(EnvError, match="its episode was over before its environment was made"):
        await asyncio.wait_for(resetting, SOON)
    assert (gate.resets, host._episodes, host._calls) == (0, {}, {})


async def test_a_call_that_is_cancelled_before_its_first_line_is_no_forgotten_await(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept.py").write_text(KEPT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kept", raising=False)
    host = EnvHost()
    await host.handle(reset_of(PythonEnv(factory="kept:Kept")))
    stepping = asyncio.create_task(host.handle(StepEpisode("step", "episode", Message("assistant", ""))))
    await asyncio.sleep(0)  # the call has a task, which has not begun
    assert await host.handle(CancelCall("step")) == CallCancelled()
    with pytest.raises(asyncio.CancelledError):
        await stepping
    (made,) = sys.modules["kept"].made
    assert (
        inspect.getcoroutinestate(made) == inspect.CORO_CLOSED
    )  # Python warns of one that is collected and was not closed


async def test_an_episode_that_ends_while_its_process_starts_takes_no_room() -> None:
    context = zmq.asyncio.Context()
    pool = HostPool("Playground", 1, "", context)
    resetting = asyncio.create_task(pool.handle(reset_of(playground())))
    await asyncio.sleep(0)
    assert pool.slots[0].load == 1
    await pool.handle(CloseEpisode("close", "episode"))
    with pytest.raises(EnvError, match="its episode was closed while its process started"):
        await asyncio.wait_for(resetting, SOON)
    assert (pool.slots[0].load, pool._episodes) == (0, {})
    await pool.end()
    context.term()


async def test_a_call_that_a_worker_cancels_while_its_process_starts_takes_no_room_of_a_server() -> None:
    server = EnvServer({"env": playground()}, "tcp://127.0.0.1:*", None)
    serving, pool = asyncio.create_task(server.serve()), server.pools["env"]
    client = RpcClient(server.address, "a worker", "the environment server", EnvReply)
    reset = reset_of(playground())
    opened = client.send(reset, EpisodeOpened)
    assert await client.request(CancelCall("reset"), CallCancelled, SOON) == CallCancelled()
    assert (pool.slots[0].load, pool._episodes) == (0, {})
    described = await client.request(Describe("describe", reset.source), Description, SOON)
    await client.request(CloseEpisode("close", "episode"), EpisodeClosed, SOON)
    assert described.name == "Playground"
    assert (pool.slots[0].load, pool._episodes, opened.done()) == (0, {}, False)
    opened.cancel()
    client.close()
    serving.cancel()
    await asyncio.wait({serving}, timeout=SOON)


async def test_episodes_of_a_worker_that_is_gone_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = EnvServer({"env": playground()}, "tcp://127.0.0.1:*", None)
    serving = asyncio.create_task(server.serve())
    config = playground(isolate=0, address=server.address)
    source = await in_thread(task_source, config, "train", 0)
    env, task = source.make(), await in_thread(source.task, 0)
    await env.reset(task)
    pool = server.pools["env"]
    assert len(pool._episodes) == 1
    monkeypatch.setattr(serve_module, "CLIENT_S", 1.0)
    await in_thread(source.task, 1)  # from this request on
    del source, env  # its connection is closed, its episode is not
    async with asyncio.timeout(SOON):
        while pool._episodes:  # noqa: ASYNC110 - until a process has answered
            await asyncio.sleep(0.05)
    processes = [slot.process for slot in pool.slots]
    serving.cancel()
    await asyncio.wait({serving}, timeout=SOON)
    assert serving.cancelled()
    assert all(process is not None and not psutil.pid_exists(process.pid) for process in processes)
    assert server._context.closed  # a context that is collected with open connections waits for them for ever


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["--address", "tcp://0.0.0.0:*"],
            "--keys: must name a file, tcp://0.0.0.0:\\* can be reached from other hosts",
        ),
        (["--address", "10.0.0.1"], "--address: '10.0.0.1' is not of the form tcp://HOST:PORT"),
        (
            ["--address", "tcp://127.0.0.1:*", "env.factory=playground:Gone"],
            "env.factory: 'playground' has no callable 'Gone'",
        ),
    ],
)
def test_what_cannot_be_served_is_one_line(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    server = Server(tmp_path, *arguments)
    assert re.search(complaint, server.line)
    assert server.process.wait(SOON) == 2


def test_a_config_names_where_an_environment_runs() -> None:
    with pytest.raises(ConfigError, match=r"env.address: '10\.0\.0\.7' is not of the form tcp://HOST:PORT"):
        load("quickstart", ["env.address=10.0.0.7"])
    with pytest.raises(ConfigError, match=r"env.keys: must be set, tcp://10\.0\.0\.7:7000 is not on this host"):
        load("quickstart", ["env.address=tcp://10.0.0.7:7000"])
    with pytest.raises(ConfigError, match=r"env.keys: /nowhere holds no keys"):
        task_source(playground(address="tcp://10.0.0.7:7000", keys="/nowhere"), "train", 0)
    config = load("quickstart", ["env.address=tcp://10.0.0.7:7000", "env.keys=env.keys", "env.python=.venv/bin/python"])
    env = absolute_paths(config.env)
    assert (env.keys, env.python) == (os.path.abspath("env.keys"), os.path.abspath(".venv/bin/python"))
