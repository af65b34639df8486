"""Sandboxes on machines elsewhere, by SWE-ReX (https://swe-rex.com): its deployments start a machine in Docker, at Modal, at AWS or
at another provider, with a server in it that runs commands.

    SweRexPool.open ──start──> deployment ──> machine
    Sandbox.run ─────HTTP────> server in it ──> once.py ──> command

Invariants:
- Every sandbox is a machine of its own, which is stopped when the sandbox is closed. What confines the policy in it, such as its
  network, is the deployment's choice.
- Each request starts a process there, `inside/once.py`, which keeps the limits and ends all that its command has left. The policy
  that ends this process has ended its sandbox: no failure.
- One request at a time. A server that does not answer in time, or answers what SWE-ReX does not, is lost: ToolError. So is one that
  the policy has ended, whose rights it has.
- SWE-ReX's own client is not used: it has no deadlines, and no limit for an answer.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import marshal
import math
import resource
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ...common.tasks import in_thread
from ...errors import ToolError, describe, with_deadline
from .base import Ended, ExecResult, Limits
from .deployments import SweRexDeployment, deployment_maker, stop
from .frames import ENVELOPE, file_parts, folder_of, parts_of, result_of
from .local import DEFAULT, FILE_S
from .process import GRACE_S, SandboxEnded
from .programs import rlimits, text

START_S = 900.0  # longest start of a machine, whose image may have to be fetched
TRAVEL_S = 30.0  # what a request may take beyond its own limit
CONNECT_S = 30.0  # until a machine has accepted a connection
LONGEST = 64 << 10  # bytes of a request in an argument, which may have 128 KiB; a longer one is put into a file
OVERTIME = "swerex.exceptions.CommandTimeoutError"


class _Failure(msgspec.Struct):
    class_path: str = ""
    message: str = ""


class _Reply(msgspec.Struct):
    """SWE-ReX's answer to a request: what the request raised there (with status 511), if it did."""

    swerexception: _Failure | None = None


class _Executed(_Reply):
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None


R = TypeVar("R", bound=_Reply)


class SweRexSandbox:
    """A `Sandbox` on a machine elsewhere; made by `SweRexPool.open`."""

    def __init__(self, deployment: SweRexDeployment, limits: Limits) -> None:
        import aiohttp  # here: an environment in an interpreter of its own may be without it

        self.home, self.python = "", "python3"
        self._deployment, self._limits = deployment, limits
        runtime = deployment.runtime  # SWE-ReX has no public names for its address and key
        self._url = str(runtime._api_url).rstrip("/")
        self._http = aiohttp.ClientSession(
            headers={**runtime._headers, "Accept-Encoding": "identity"},
            auto_decompress=False,  # an answer has no more bytes than were received
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )
        self._lost = ""  # why it answers no more
        self._ended: Ended | None = None  # how what ran in it has ended it
        self._lock = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Make its home. Raises ToolError."""
        try:
            home, python = file_parts(await self._ask(("open",), FILE_S, 0), "", 2)
        except (SandboxEnded, OSError) as error:  # the policy was not there yet
            raise self._lose(str(error.__cause__ or error)) from error
        self.home, self.python = home.decode(), python.decode()

    async def run(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        wall_s: float | None = None,
        environ: Mapping[str, str] = {},
        cwd: str = "",
    ) -> ExecResult:
        """See `Sandbox.run`."""
        limits = self._limits
        wall_s = limits.wall_s if wall_s is None else wall_s
        own = {"HOME": self.home, "TMPDIR": self.home, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        # Without one of processes: the kernel would count those of its uid in other machines of its host.
        kernel = (*rlimits(limits), (resource.RLIMIT_CPU, math.ceil(limits.cpu_s)))
        async with self._lock:
            content = await self._put(stdin) if stdin else ""
            summed = limits.cpu_s, limits.memory, limits.disk, limits.processes
            command = list(argv), own | dict(environ), wall_s, kernel, limits.output, cwd
            request = "run", self.home, content, *summed, *command
            try:
                return result_of(await self._ask(request, wall_s, 2 * limits.output))
            except ValueError:
                self._ended = "killed"
                return ExecResult("", "", None, "killed")
            except SandboxEnded as end:
                return ExecResult("", "", None, end.reason)

    async def write(self, path: str, data: bytes) -> None:
        """See `Sandbox.write`."""
        if len(data) > self._limits.disk:
            raise OSError(errno.EFBIG, "larger than the sandbox's disk", path)
        async with self._lock:
            await self._file("write", path, before=(await self._put(data),))

    async def read(self, path: str) -> bytes:
        """See `Sandbox.read`."""
        async with self._lock:
            return (await self._file("read", path, 1))[0]

    async def read_folder(self, path: str) -> dict[str, bytes]:
        """See `Sandbox.read_folder`."""
        async with self._lock:
            return folder_of(await self._file("folder", path))

    async def close(self) -> None:
        """Stop the machine; a provider that does not is logged. May be called twice."""
        if self._closing is None:
            self._lost = self._lost or "is closed"
            self._closing = asyncio.create_task(self._close(), name="end of a sandbox elsewhere")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._http.close()
        await stop(self._deployment)

    async def _file(self, what: str, path: str, count: int | None = None, before: tuple[str, ...] = ()) -> list[bytes]:
        request = what, self.home, *before, path, self._limits.disk
        try:
            parts = await self._ask(request, FILE_S, self._limits.disk)
        except SandboxEnded as end:
            raise OSError(errno.EIO, f"the sandbox was ended by what ran in it ({end.reason})", path) from None
        return file_parts(parts, path, count)

    async def _put(self, data: bytes) -> str:
        """Where a new file with `data` is on the machine. Raises ToolError."""
        import aiohttp

        place = f"{self.home}-{uuid.uuid4().hex}"
        form = aiohttp.FormData({"target_path": place})
        form.add_field("file", io.BytesIO(data), filename="data")
        await self._post("upload", FILE_S, 0, _Reply, data=form)
        return place

    async def _ask(self, request: tuple[Any, ...], seconds: float, size: int) -> list[bytes]:
        """What once.py answers: texts of at most `size` bytes. Raises SandboxEnded: what runs there has ended it, or answered in
        its place; ToolError."""
        if self._ended is not None:
            raise SandboxEnded(self._ended)
        asked = marshal.dumps(request, 2)
        argument = f"@{await self._put(asked)}" if len(asked) > LONGEST else base64.b64encode(asked).decode()
        command = {
            "command": [self.python, "-I", "-S", "-c", text("once"), argument],
            "timeout": seconds + GRACE_S,
        }
        done = await self._post("execute", seconds + GRACE_S, size, _Executed, json=command)
        try:
            if done.exit_code != 0:
                raise ValueError(f"python3 ended with {done.exit_code}: {done.stderr.strip()[-300:]}")
            return parts_of(base64.b64decode(done.stdout))
        except ValueError as error:
            self._ended = "wall" if done.swerexception else "killed"
            raise SandboxEnded(self._ended) from error

    async def _post(self, what: str, seconds: float, size: int, kind: type[R], **body: Any) -> R:
        """SWE-ReX's answer to a request. Raises ToolError."""
        if self._lost:
            raise ToolError(f"the sandbox at {self._url} {self._lost}")
        answering = self._answer(what, 2 * (size + ENVELOPE), body)
        waits_for, hint = f"a sandbox at {self._url}", "look at its machine and its server"
        try:
            answer = await with_deadline(
                seconds + TRAVEL_S, answering, who="an episode", waits_for=waits_for, hint=hint
            )
            reply = msgspec.json.decode(answer, type=kind)
            failure = reply.swerexception
            if failure is not None and failure.class_path != OVERTIME:
                raise ValueError(f"{failure.class_path}: {failure.message:.300}")
            return reply
        except asyncio.CancelledError:
            self._lost = "was closed by a cancelled request"
            raise
        except Exception as error:  # whatever breaks a connection, and DeadlineExceeded
            raise self._lose(f"{what}: {describe(error)}") from error

    async def _answer(self, what: str, most: int, body: dict[str, Any]) -> bytes:
        # No redirects: the machine must not choose what else this host asks.
        async with self._http.post(f"{self._url}/{what}", allow_redirects=False, **body) as response:
            answer = bytearray()
            async for piece in response.content.iter_any():
                answer += piece
                if len(answer) > most:
                    raise ValueError(f"the answer has more than {most} bytes")
            if response.status not in (200, 511):
                raise ValueError(f"status {response.status}: {answer[:300].decode(errors='replace')}")
            return bytes(answer)

    def _lose(self, why: str) -> ToolError:
        self._lost = f"is lost: {why}"
        return ToolError(f"the sandbox at {self._url} {self._lost}")


class SweRexPool:
    """A `SandboxPool` of machines elsewhere.

    Args:
        machine: options of a deployment of SWE-ReX, such as `{"type": "docker", "image": "python:3.12"}`, see `deployment_maker`;
            or a function that makes a deployment that was not started.

    Raises:
        ConfigError: SWE-ReX has no such options, or is not installed.
    """

    def __init__(self, machine: Mapping[str, Any] | Callable[[], SweRexDeployment], limits: Limits = DEFAULT) -> None:
        self.limits = limits
        self._make = machine if callable(machine) else deployment_maker(machine)
        self._ending: set[asyncio.Task[None]] = set()

    async def open(self) -> SweRexSandbox:
        """See `SandboxPool.open`."""
        who, what, hint = "an episode", "a sandbox elsewhere to start", "look at the provider and at the image"
        until = asyncio.get_running_loop().time() + START_S
        try:
            making = in_thread(self._make, "start of a sandbox elsewhere")
            deployment = await with_deadline(START_S, making, who=who, waits_for=what, hint=hint)
        except Exception as error:  # whatever a provider's client raises, and DeadlineExceeded
            raise ToolError(f"the sandbox elsewhere did not start: {describe(error)}") from error
        starting = in_thread(lambda: asyncio.run(deployment.start()), "start of a sandbox elsewhere")
        starting.add_done_callback(lambda started: started.exception())  # also where it has no caller any more
        sandbox: SweRexSandbox | None = None
        try:
            await with_deadline(START_S, asyncio.shield(starting), who=who, waits_for=what, hint=hint)
            sandbox = SweRexSandbox(deployment, self.limits)
            await sandbox.prepare()
            return sandbox
        except BaseException as error:
            ending = asyncio.create_task(
                _end(starting, until, sandbox or deployment), name="end of a sandbox elsewhere"
            )
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            if isinstance(error, Exception):
                raise ToolError(f"the sandbox elsewhere did not start: {describe(error)}") from error
            raise

    async def close(self) -> None:
        """See `SandboxPool.close`: none is pre-started, but some that were not wanted any more may still have to end."""
        await asyncio.gather(*self._ending)


async def _end(starting: asyncio.Future[None], until: float, started: SweRexSandbox | SweRexDeployment) -> None:
    """Stop what did not come to be used. A start cannot be interrupted, and what it starts after a stop would stay."""
    await asyncio.wait({starting}, timeout=max(0.0, until - asyncio.get_running_loop().time()))
    await (started.close() if isinstance(started, SweRexSandbox) else stop(started))
