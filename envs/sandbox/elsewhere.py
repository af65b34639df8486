"""Sandboxes on machines elsewhere: each is a machine of a provider, with a server in it that runs commands.

    MachinePool.open ──start──> provider ──> machine
    Sandbox.run ───────HTTP───> server in it ──> once.py ──> command

Invariants:
- Every sandbox is a machine of its own, which is stopped when the sandbox is closed, also where its start was cancelled. What
  confines the policy in it, such as its network, is the provider's choice.
- Each request starts a process there, `inside/once.py`, which keeps the limits and ends all that its command has left. The policy
  that ends this process has ended its sandbox: no failure.
- One request at a time. A server that does not answer in time, or not in its form, is lost: ToolError. So is one that the policy
  has ended, if it has the right to.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import marshal
import math
import resource
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ...errors import ToolError, describe, with_deadline
from .base import Ended, ExecResult, Limits
from .frames import ENVELOPE, file_parts, folder_of, parts_of, result_of
from .local import DEFAULT, FILE_S
from .process import GRACE_S, SandboxEnded
from .programs import rlimits, text

START_S = 900.0  # longest start of a machine, whose image may have to be fetched
TRAVEL_S = 30.0  # what a request may take beyond its own limit
CONNECT_S = 30.0  # until a machine has accepted a connection
LONGEST = 64 << 10  # bytes of a request in an argument, which may have 128 KiB; a longer one is put into a file
WHO, HINT = "an episode", "look at the provider, at its machine and its server"

T = TypeVar("T")


class Executed(msgspec.Struct, frozen=True):
    """What a machine says of a command: its output, its exit status, and whether it had to be ended for its time."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None
    overtime: bool = False


class Machine(Protocol):
    """A machine that has started; `address` is its name in messages. Requests raise whatever says that the machine does not answer,
    or not in its form."""

    address: str

    async def execute(self, argv: Sequence[str], seconds: float, most: int) -> Executed:
        """Run a command for at most `seconds`. Raises, too: the answer has more than `most` bytes."""
        ...

    async def upload(self, path: str, data: bytes) -> None:
        """Make a file."""
        ...

    async def stop(self) -> None:
        """End the machine, or log that it may be left running."""
        ...


class RemoteSandbox:
    """A `Sandbox` on a machine elsewhere; made by `MachinePool.open`."""

    def __init__(self, machine: Machine, limits: Limits) -> None:
        self.home, self.python = "", "python3"
        self._machine, self._limits = machine, limits
        self._lost = ""  # why it answers no more
        self._ended: Ended | None = None  # how what ran in it has ended it
        self._lock = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        """Make its home. Raises ToolError."""
        try:
            home, python = file_parts(await self._ask(("open",), FILE_S, 0), "", 2)
        except (SandboxEnded, OSError) as error:  # the policy was not there yet
            raise self._mark_lost(str(error.__cause__ or error)) from error
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
            self._closing = asyncio.create_task(self._machine.stop(), name="end of a sandbox elsewhere")
        await asyncio.shield(self._closing)

    async def _file(self, what: str, path: str, count: int | None = None, before: tuple[str, ...] = ()) -> list[bytes]:
        request = what, self.home, *before, path, self._limits.disk
        try:
            parts = await self._ask(request, FILE_S, self._limits.disk)
        except SandboxEnded as end:
            raise OSError(errno.EIO, f"the sandbox was ended by what ran in it ({end.reason})", path) from None
        return file_parts(parts, path, count)

    async def _put(self, data: bytes) -> str:
        """Where a new file with `data` is on the machine. Raises ToolError."""
        place = f"{self.home}-{uuid.uuid4().hex}"
        await self._answer("upload", FILE_S, lambda: self._machine.upload(place, data))
        return place

    async def _ask(self, request: tuple[Any, ...], seconds: float, size: int) -> list[bytes]:
        """What once.py answers: texts of at most `size` bytes. Raises SandboxEnded: what runs there has ended it, or answered in
        its place; ToolError."""
        if self._ended is not None:
            raise SandboxEnded(self._ended)
        asked = marshal.dumps(request, 2)
        argument = f"@{await self._put(asked)}" if len(asked) > LONGEST else base64.b64encode(asked).decode()
        argv = self.python, "-I", "-S", "-c", text("once"), argument
        seconds, most = seconds + GRACE_S, 2 * (size + ENVELOPE)
        done = await self._answer("execute", seconds, lambda: self._machine.execute(argv, seconds, most))
        try:
            if done.exit_code != 0:
                raise ValueError(f"python3 ended with {done.exit_code}: {done.stderr.strip()[-300:]}")
            return parts_of(base64.b64decode(done.stdout))
        except ValueError as error:
            self._ended = "wall" if done.overtime else "killed"
            raise SandboxEnded(self._ended) from error

    async def _answer(self, what: str, seconds: float, ask: Callable[[], Awaitable[T]]) -> T:
        """The machine's answer to a request. Raises ToolError."""
        if self._lost:
            raise ToolError(f"the sandbox at {self._machine.address} {self._lost}")
        waits_for = f"a sandbox at {self._machine.address}"
        try:
            return await with_deadline(seconds + TRAVEL_S, ask(), who=WHO, waits_for=waits_for, hint=HINT)
        except asyncio.CancelledError:
            self._lost = "was closed by a cancelled request"
            raise
        except Exception as error:  # whatever breaks a connection, and DeadlineExceeded
            raise self._mark_lost(f"{what}: {describe(error)}") from error

    def _mark_lost(self, why: str) -> ToolError:
        self._lost = f"is lost: {why}"
        return ToolError(f"the sandbox at {self._machine.address} {self._lost}")


class MachinePool:
    """A `SandboxPool` of machines elsewhere, which `start` starts. `start` has a deadline of its own, and leaves no machine behind
    where it raises; it is never cancelled, as what a provider has begun to start would stay."""

    def __init__(self, start: Callable[[], Awaitable[Machine]], limits: Limits = DEFAULT) -> None:
        self.limits = limits
        self._start = start
        self._ending: set[asyncio.Task[None]] = set()

    async def open(self) -> RemoteSandbox:
        """See `SandboxPool.open`."""
        starting = asyncio.ensure_future(self._start())
        try:
            sandbox = RemoteSandbox(await asyncio.shield(starting), self.limits)
            await sandbox.prepare()
            return sandbox
        except BaseException as error:
            ending = asyncio.create_task(_end(starting), name="end of a sandbox elsewhere")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
            if isinstance(error, Exception):
                raise ToolError(f"the sandbox elsewhere did not start: {describe(error)}") from error
            raise

    async def close(self) -> None:
        """See `SandboxPool.close`: none is pre-started, but some that were not wanted any more may still have to end."""
        await asyncio.gather(*self._ending)


async def _end(starting: asyncio.Future[Machine]) -> None:
    """Stop what did not come to be used, once it has started."""
    await asyncio.wait({starting})
    if starting.exception() is None:
        await starting.result().stop()
