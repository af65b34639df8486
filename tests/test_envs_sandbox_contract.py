"""What every kind of sandbox keeps of the contract in `envs/sandbox/base.py`, those elsewhere included."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import importlib.util
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import import_module
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from aiohttp import web
from slipstream.envs import PythonTool, ShellTool, ToolCall, call_tool
from slipstream.envs.sandbox import MIB, ExecResult, Limits, SandboxPool, ShellSession, SweRexPool
from slipstream.envs.sandbox.deployments import deployment_maker
from slipstream.envs.verifiers import score_contents
from slipstream.errors import ConfigError, ToolError
from slipstream.tests.sandbox_pools import ALL, Deployment, Machines, pool_of
from slipstream.tests.tiny import free_port
from swerex.deployment.docker import DockerDeployment
from swerex.deployment.remote import RemoteDeployment

LIMITS = Limits(wall_s=20, cpu_s=10, memory=300 * MIB, disk=16 * MIB)


@pytest.fixture(params=ALL)
async def pool(request: pytest.FixtureRequest) -> AsyncIterator[SandboxPool]:
    pool = pool_of(request.param, LIMITS)
    yield pool
    await pool.close()


async def test_commands_and_files(pool: SandboxPool) -> None:
    box = await pool.open()
    ran = await box.run(
        ("/bin/sh", "-c", "cat; echo problem >&2; echo $WORD > made; exit 3"), b"given", environ={"WORD": "x"}
    )
    assert ran == ExecResult("given", "problem\n", 3)
    assert await box.read("made") == b"x\n"
    await box.write("folder/data", bytes(range(256)) * 1000)
    assert await box.read(f"{box.home}/folder/data") == bytes(range(256)) * 1000
    ran = await box.run((box.python, "-I", "-c", "import sys, json, zlib; print(sys.version_info[0])"))
    assert ran.stdout == "3\n"
    assert ran.ok
    missing = await box.run(("/no/such/program",))
    assert (missing.exit_code, missing.stderr) == (127, "/no/such/program: No such file or directory\n")
    assert (await box.run(("/bin/sh", "-c", "kill -TERM $$"))).exit_code == -15
    await box.close()
    await box.close()
    with pytest.raises(ToolError, match="closed"):
        await box.run(("/bin/true",))


async def test_what_the_policy_did_to_its_files_is_an_os_error_and_blocks_nothing(pool: SandboxPool) -> None:
    box = await pool.open()
    make = "mkfifo pipe; mkdir folder; ln -s loop loop; echo x > closed; chmod 0 closed"
    await box.run(("/bin/sh", "-c", make))
    for path in ("missing", "pipe", "folder", "loop"):
        with pytest.raises(OSError, match=path):
            await box.read(path)
    for path in ("pipe", "folder", "loop/x"):
        with pytest.raises(OSError, match=path):
            await box.write(path, b"x")
    with pytest.raises(OSError, match=r"room|space|large"):
        await box.write("all", bytes(20 * MIB))
    assert (await box.run(("/bin/echo", "fine"))).stdout == "fine\n"
    await box.close()


async def test_two_sandboxes_share_nothing(pool: SandboxPool) -> None:
    one, other = await asyncio.gather(pool.open(), pool.open())
    await one.write("secret", b"s")
    spy = "import glob, os\nprint([glob.glob(p + '/**') for p in ('/box', '/tmp', os.path.dirname(os.getcwd()))])"
    ran = await other.run((other.python, "-I", "-c", spy))
    assert "secret" not in ran.stdout
    assert one.home not in ran.stdout.replace("/box", "") or one.home == other.home
    await asyncio.gather(one.close(), other.close())


async def test_folders_are_read_as_a_whole(pool: SandboxPool) -> None:
    box = await pool.open()
    assert await box.read_folder("task") == {}
    ran = await box.run(
        ("/bin/sh", "-c", "pwd; mkdir -p a/b; echo x > a/b/c; ln -s /etc/passwd link; : > d"), cwd="task"
    )
    assert ran.stdout == f"{box.home}/task\n"
    assert await box.read_folder("task") == {"a/b/c": b"x\n", "d": b""}
    await box.close()


async def test_long_arguments_and_input(pool: SandboxPool) -> None:
    box = await pool.open()
    words = [f"{number:0100}" for number in range(1000)]
    ran = await box.run(("/bin/sh", "-c", 'wc -c; echo "$#"', "sh", *words), bytes(5 * MIB))
    assert ran.stdout.split() == [str(5 * MIB), "1000"]
    await box.close()


LEAVES = """
import os, sys, time
if os.fork() == 0:
    try: os.setsid()
    except OSError: pass  # Landlock refuses it
    for fd in (0, 1, 2): os.close(fd)
    if os.fork() == 0:
        while True:
            with open("alive", "a") as file: file.write("x")
            time.sleep(0.01)
    os._exit(0)
os.wait()
while not os.path.exists("alive"): time.sleep(0.01)"""


async def test_what_a_command_leaves_ends_with_it(pool: SandboxPool) -> None:
    box = await pool.open()
    assert (await box.run((box.python, "-I", "-c", LEAVES))).exit_code == 0
    before = await box.read("alive")
    await box.run(("/bin/sleep", "0.2"))
    assert before
    assert await box.read("alive") == before
    await box.close()


async def test_a_shell_keeps_files_folder_and_variables(pool: SandboxPool) -> None:
    shell = ShellSession(await pool.open())
    assert (await shell.run("mkdir -p a/b && cd a/b && export NAME='two words' && echo here > file")).ok
    ran = await shell.run("cat file; echo $NAME; pwd; false")
    assert ran.stdout.splitlines()[:2] == ["here", "two words"]
    assert ran.stdout.splitlines()[2].endswith("/a/b")
    assert ran.exit_code == 1
    assert (await shell.run("exit 7")).exit_code == 7
    assert (await shell.run("sleep 600 & echo started")).stdout == "started\n"  # and does not wait for it
    await shell.close()


async def test_a_cancelled_caller_ends_what_runs(pool: SandboxPool) -> None:
    box = await pool.open()
    running = asyncio.create_task(box.run(("/bin/sleep", "60")))
    await asyncio.sleep(0.1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ToolError, match="closed"):
        await box.run(("/bin/true",))
    async with asyncio.timeout(20):
        await box.close()


async def test_files_are_scored_in_a_new_one(pool: SandboxPool) -> None:
    tests = {"test.sh": b"sh made.sh | grep -q 42"}
    for made, reward in ((b"echo $((6 * 7))", 1.0), (b"echo $((6 * 8))", 0.0)):
        assert await score_contents({"made.sh": made}, tests, ("/bin/sh", "test.sh"), pool=pool) == reward


async def test_the_tool_shell_takes_any_pool(pool: SandboxPool) -> None:
    tool = ShellTool(pool)
    run = {"shell": tool.tool}
    assert (await call_tool(run, ToolCall("shell", {"command": "cd /; export X=5"})))[0].content == "[no output]"
    assert (await call_tool(run, ToolCall("shell", {"command": "pwd; echo $X"})))[0].content == "/\n5"
    await tool.close()


# --- elsewhere --------------------------------------------------------------------------------------------------------


async def test_the_disk_has_no_more_room_for_what_the_host_writes() -> None:
    box = await Machines(LIMITS).open()
    await box.write("some", bytes(10 * MIB))
    with pytest.raises(OSError, match="no room"):
        await box.write("more", bytes(10 * MIB))
    await box.close()


async def test_a_machine_that_is_lost_is_a_tool_error() -> None:
    pool = Machines(LIMITS)
    box = await pool.open()
    running = asyncio.create_task(box.run(("/bin/sleep", "60")))
    await asyncio.sleep(0.3)
    pool.deployed[0].process.stdin.close()
    with pytest.raises(ToolError, match="is lost: execute: "):
        await running
    for asked in (box.read("x"), box.run(("/bin/true",))):
        with pytest.raises(ToolError, match="is lost: execute: "):
            await asked
    await box.close()


async def test_a_machine_that_does_not_start_is_a_tool_error_and_is_stopped() -> None:
    class Broken(Deployment):
        async def start(self) -> None:
            await super().start()
            raise RuntimeError("no room at the provider")

    pool = Machines(LIMITS, Broken)
    with pytest.raises(ToolError, match="did not start: RuntimeError: no room at the provider"):
        await pool.open()
    await pool.close()
    assert pool.deployed[0].process.returncode is not None


async def test_a_machine_whose_start_was_cancelled_is_stopped_when_it_has_started() -> None:
    begun, may_start = threading.Event(), threading.Event()

    class Slow(Deployment):
        async def start(self) -> None:
            begun.set()
            may_start.wait(60)
            await super().start()

    pool = Machines(LIMITS, Slow)
    opening = asyncio.create_task(pool.open())
    assert await asyncio.to_thread(begun.wait, 60)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    may_start.set()
    async with asyncio.timeout(60):
        await pool.close()
    assert pool.deployed[0].process.returncode is not None


async def test_a_machine_of_modal_is_ended_although_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """SWE-ReX's own deployment, and what stands in for Modal's client."""
    done: list[str] = []

    def call(name: str, result: object = None) -> SimpleNamespace:
        async def aio(*arguments: object, **options: object) -> object:
            done.append(name)
            return result

        return SimpleNamespace(aio=aio)

    service = Machines(LIMITS)
    standing_in = service._make()
    await standing_in.start()
    tunnels = call("tunnels", {8880: SimpleNamespace(url="http://127.0.0.1")})
    machine = SimpleNamespace(object_id="sb-1", poll=call("poll"), tunnels=tunnels, terminate=call("terminate"))
    machine._get_task_id = call("task")
    image = type("Image", (), {"from_registry": MagicMock()})
    client = MagicMock(Sandbox=SimpleNamespace(create=call("create", machine)), Image=image)
    for name, module in {"modal": client, "boto3": MagicMock(), "botocore.exceptions": MagicMock()}.items():
        monkeypatch.setitem(sys.modules, name, module)
    modal = import_module("swerex.deployment.modal")
    del sys.modules["swerex.deployment.modal"]
    monkeypatch.setattr(modal, "RemoteRuntime", lambda **options: standing_in.runtime)
    deployment = modal.ModalDeployment(image="python:3.12", startup_timeout=60)
    pool = SweRexPool(lambda: deployment, LIMITS)
    box = await pool.open()
    assert (await box.run(("/bin/echo", "here"))).stdout == "here\n"
    assert "terminate" not in done
    await box.close()
    assert done[-2:] == ["poll", "terminate"]  # SWE-ReX has asked whether it runs, and then we have ended it
    standing_in.process.communicate()


async def test_a_wrong_key_is_named() -> None:
    box = await Machines(LIMITS).open()
    box._machine._http.headers["X-API-Key"] = "another"
    with pytest.raises(ToolError, match="is lost: execute: ValueError: status"):
        await box.run(("/bin/true",))
    await box.close()


FORGES = """
import base64, os
with open(f"/proc/{os.getppid()}/fd/1", "w") as file: file.write(base64.b64encode(b"x" * 40).decode())
os.kill(os.getppid(), 9)"""


@pytest.mark.parametrize("kind", ["swe-rex", "e2b"])
@pytest.mark.parametrize(
    ("program", "ended"),
    [
        ("import os; os.kill(os.getppid(), 9)", "killed"),
        (FORGES, "killed"),
        ("import os; os.kill(os.getppid(), 19)", "wall"),
    ],
    ids=["kills", "forges", "stops"],
)
async def test_the_policy_that_ends_what_runs_it_has_ended_its_sandbox(program: str, ended: str, kind: str) -> None:
    """That is no failure."""
    box = await pool_of(kind, LIMITS).open()
    for command in ((box.python, "-I", "-c", program), ("/bin/true",)):
        ran = await box.run(command, wall_s=1 if ended == "wall" else 20)
        assert ran == ExecResult("", "", None, ended)  # pyright: ignore[reportArgumentType]
    with pytest.raises(OSError, match=f"ended by what ran in it .{ended}."):
        await box.read("x")
    await box.close()


async def redirects(request: web.Request) -> web.StreamResponse:
    raise web.HTTPTemporaryRedirect("/elsewhere")


async def is_endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionError):
        while True:
            await response.write(bytes(1 << 16))
    return response


async def is_compressed(request: web.Request) -> web.StreamResponse:
    return web.Response(body=gzip.compress(b'{"stdout": "", "exit_code": 0}'), headers={"Content-Encoding": "gzip"})


async def is_no_json(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (redirects, "status 307"),
        (is_endless, "the answer has more than 8192 bytes"),
        (is_compressed, "JSON is malformed"),
        (is_no_json, "JSON is malformed"),
    ],
)
async def test_a_server_that_is_not_swe_rexs_is_a_tool_error(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], error: str
) -> None:
    """The policy may have put it there."""
    asked: list[str] = []

    async def elsewhere(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        return web.json_response({"stdout": "", "exit_code": 0})

    app = web.Application()
    app.add_routes([web.post("/execute", answer), web.post("/elsewhere", elsewhere)])
    server = web.AppRunner(app)
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", port := free_port())
    await site.start()
    pool = SweRexPool(lambda: RemoteDeployment(host="http://127.0.0.1", port=port, auth_token="key"), LIMITS)
    with pytest.raises(ToolError, match=f"did not start: .*is lost: execute: .*{error}"):
        await pool.open()
    await pool.close()
    await server.cleanup()
    assert asked == []


def test_a_deployment_is_named_by_its_options() -> None:
    made = deployment_maker({"type": "docker", "image": "python:3.12", "docker_args": ["--memory", "2g"]})()
    assert isinstance(made, DockerDeployment)
    assert made._config.docker_args == ["--memory", "2g"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, "'' is no `type` of deployment that starts machines; allowed are docker, modal, fargate, daytona"),
        ({"type": "local"}, "'local' is no `type`"),  # it would run on this host, unconfined
        ({"type": "docker", "imag": "x"}, "'imag' is no option of a deployment of type docker; allowed are .*image"),
        ({"type": "docker", "startup_timeout": "soon"}, "startup_timeout = 'soon' of a deployment: Input should be"),
        pytest.param(
            {"type": "modal"},
            r"type modal needs the package modal; pip install swe-rex\[modal\]",
            marks=pytest.mark.skipif(importlib.util.find_spec("modal") is not None, reason="modal is installed"),
        ),
    ],
)
def test_options_that_no_deployment_has_are_refused(options: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        SweRexPool(options)


def test_sessions_of_python_are_on_this_host() -> None:
    with pytest.raises(ConfigError, match="not of a Machines; take ShellTool"):
        PythonTool(Machines(LIMITS))
