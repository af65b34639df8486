"""Sandboxes on this host: commands, Python cells and shell commands in confined processes, and the pool that starts them.

Invariants:
- Every sandbox is used once. A pre-started one has only Python in it, which waits.
- What a sandbox answers is checked for its form and otherwise taken as the policy's word.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import resource
import weakref
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar, get_args

from ...errors import ConfigError, SlipstreamError, ToolError, with_deadline
from .base import Ended, ExecResult, GatewayAddress, Limits, Mount, Sandbox
from .frames import ENVELOPE, file_parts, folder_of, result_of
from .kinds import require_sandbox
from .process import END_S, START_S, ConfinedProcess, LaunchSpec, SandboxEnded
from .programs import Confinement, Program

log = logging.getLogger(__name__)

T = TypeVar("T")

FILE_S = 60.0  # longest reading or writing of a file
STARTS = 2 * (os.cpu_count() or 1)  # sandboxes that start at once; more would only be slower, each of them
SPARE = 4  # sandboxes that wait in the pool of an event loop: 12 MiB each
CLOSE_S = START_S + 2 * END_S  # longest end of what waits in pools, or still starts


DEFAULT = Limits()


class LocalSandbox:
    """A `Sandbox` on this host."""

    def __init__(self, process: ConfinedProcess, limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self.home = process.home
        self.python = process.python
        self.gateway = process.gateway  # host and port at which programs reach the pool's gateway, or ""
        self.pid = process.pid

    async def run(
        self,
        argv: Sequence[str],
        stdin: bytes = b"",
        *,
        wall_s: float | None = None,
        environ: Mapping[str, str] = {},
        cwd: str = "",
    ) -> ExecResult:
        limits = self._limits
        wall_s = limits.wall_s if wall_s is None else wall_s
        rlimits = (*self._process.rlimits, (resource.RLIMIT_CPU, math.ceil(limits.cpu_s)))
        command = [*self._process.relay, *argv]
        request = ("run", command, stdin, dict(environ), wall_s, limits.cpu_s, rlimits, limits.output, cwd)
        try:
            parts = await self._ask(request, wall_s)
        except SandboxEnded as end:
            return ExecResult("", "", None, end.reason)
        return _result(parts, self._process)

    async def write(self, path: str, data: bytes) -> None:
        if len(data) > self._limits.disk:
            raise OSError(errno.EFBIG, "larger than the sandbox's disk", path)
        await self._file(("write", path, data))

    async def read(self, path: str) -> bytes:
        return (await self._file(("read", path, self._limits.disk), 1))[0]

    async def read_folder(self, path: str) -> dict[str, bytes]:
        return folder_of(await self._file(("folder", path, self._limits.disk)))

    async def close(self) -> None:
        await self._process.close()

    async def _file(self, request: tuple[object, ...], count: int | None = None) -> list[bytes]:
        try:
            parts = await self._ask(request, FILE_S)
        except SandboxEnded as end:
            raise OSError(errno.EIO, f"the sandbox was ended by what ran in it ({end.reason})") from None
        return file_parts(parts, str(request[1]), count)

    async def _ask(self, request: tuple[object, ...], seconds: float) -> list[bytes]:
        limit = max(2 * self._limits.output, self._limits.disk) + ENVELOPE
        return await self._process.ask(request, seconds=seconds, cpu_s=self._limits.cpu_s, limit=limit)


class PythonSession:
    """Python that keeps its variables between cells. What a cell does ends at most the session. It scores nothing: a cell may
    answer what it likes."""

    def __init__(self, process: ConfinedProcess, limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self.home = process.home
        self.pid = process.pid

    @property
    def ended(self) -> Ended | None:
        """Why the session has ended; None while it lasts. Another one has none of its variables and files."""
        reason = self._process.reason
        return reason if reason in get_args(Ended) else None  # pyright: ignore[reportReturnType]

    async def run(self, code: str, wall_s: float | None = None) -> ExecResult:
        """Run a cell: `stdout` is what it and its children printed, and the value of an expression at its end; `stderr` its
        traceback. A cell beyond `wall_s` is interrupted and the session lasts, where Python can interrupt it. Raises ToolError."""
        limits = self._limits
        wall_s = limits.wall_s if wall_s is None else wall_s
        request = (code.encode(errors="replace"), wall_s, limits.output)
        limit = 2 * limits.output + ENVELOPE
        try:
            parts = await self._process.ask(request, seconds=wall_s, cpu_s=limits.cpu_s, limit=limit)
        except SandboxEnded as end:
            return ExecResult("", "", None, end.reason)
        return _result(parts, self._process)

    async def close(self) -> None:
        """End it. May be called twice."""
        await self._process.close()


SHELL = """cd -- "$(cat .shell/folder 2>/dev/null)" 2>/dev/null
[ ! -f "$HOME/.shell/variables" ] || . "$HOME/.shell/variables" 2>/dev/null
trap 'mkdir -p "$HOME/.shell" && pwd > "$HOME/.shell/folder" && export -p > "$HOME/.shell/variables"' EXIT
eval "$1"
"""


class ShellSession:
    """A shell that keeps its files, folder and exported variables between commands. Processes in the background end with
    their command."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox

    async def run(self, command: str, wall_s: float | None = None) -> ExecResult:
        """Run a command of bash. Raises ToolError."""
        return await self.sandbox.run(("/bin/bash", "-c", SHELL, "bash", command), wall_s=wall_s)

    async def close(self) -> None:
        """End it. May be called twice."""
        await self.sandbox.close()


class LocalPool:
    """A `SandboxPool` on this host that keeps `spare` sandboxes of each program started once one was asked for.

    Args:
        kind: as for `require_sandbox`.
        packages: a folder of Python packages (`pip install --target FOLDER ...`) that programs in the sandbox may import.
        mounts: more files of the host, for all of its sandboxes.
        gateway: what commands in its sandboxes may connect to.
        links: folders at the root of its sandboxes, such as `/app`, by the folders below home that they lead to; "" is home.

    Raises:
        ConfigError: nothing can be confined here, or what confines cannot show links.
    """

    def __init__(
        self,
        limits: Limits = DEFAULT,
        *,
        kind: str | None = None,
        spare: int = 0,
        packages: str = "",
        mounts: tuple[Mount, ...] = (),
        gateway: GatewayAddress | None = None,
        links: Mapping[str, str] = {},
    ) -> None:
        self.limits = limits
        self.spare = spare
        self.confinement: Confinement = require_sandbox(kind)
        if links and not self.confinement.shows_links:
            raise ConfigError(
                f"sandbox: {self.confinement.name} cannot show a folder under another name, as {next(iter(links))}; use bubblewrap"
            )
        self._packages = packages
        self._mounts = mounts
        self._gateway = gateway
        self._links = dict(links)
        self._ready: dict[Program, deque[ConfinedProcess]] = {"commands": deque(), "cells": deque()}
        self._starting: dict[Program, set[asyncio.Task[None]]] = {"commands": set(), "cells": set()}
        self._starts = asyncio.Semaphore(STARTS)
        self._closed = False

    async def open(self) -> LocalSandbox:
        """A sandbox that was never used. Raises ToolError."""
        return LocalSandbox(await self._take("commands"), self.limits)

    async def open_python(self) -> PythonSession:
        """A session that was never used. Raises ToolError."""
        return PythonSession(await self._take("cells"), self.limits)

    async def fill(self, program: Program) -> None:
        """Return when `spare` sandboxes wait for `program`, or the pool is closed."""
        while not self._closed and len(self._ready[program]) < self.spare:
            self._replace(program)
            await asyncio.gather(*self._starting[program])

    async def close(self) -> None:
        """Have no more start before they are asked for, and end those that wait, once they have started; sandboxes that were
        opened stay."""
        self._closed = True
        await self.drain()

    async def drain(self) -> None:
        """End those that wait, once they have started. The pool may be used again, then also by another event loop."""
        _filled.get(asyncio.get_running_loop(), set[LocalPool]()).discard(self)
        closed, self._closed = self._closed, True
        try:
            starting = [task for tasks in self._starting.values() for task in tasks]
            await asyncio.gather(*starting, return_exceptions=True)
            ready = [process for waiting in self._ready.values() for process in waiting]
            for waiting in self._ready.values():
                waiting.clear()
            await asyncio.gather(*(process.close() for process in ready))
        finally:
            self._closed = closed
            self._starts = asyncio.Semaphore(STARTS)  # it belongs to the event loop in which it was first waited for

    async def _take(self, program: Program) -> ConfinedProcess:
        waiting, taken = self._ready[program], None
        while waiting and taken is None:
            taken = waiting.popleft()
            if taken.reason is not None or taken.exited:  # ended while it waited
                await taken.close()
                taken = None
        taken = taken or await self._start(program)
        self._replace(program)
        return taken

    async def _start(self, program: Program) -> ConfinedProcess:
        async with self._starts:
            process = await ConfinedProcess.start(await self._launch(program), self.limits)
            if program == "cells":
                try:
                    await process.send(process.rlimits)
                except BaseException:
                    await process.close()
                    raise
            return process

    async def _launch(self, program: Program) -> LaunchSpec:
        """In a thread: it makes files, and may read /proc. What its caller no longer waits for is discarded. Raises ToolError."""
        options = program, self.limits, self._packages, self._mounts, self._gateway, self._links
        making = asyncio.ensure_future(asyncio.to_thread(self.confinement.launch, *options))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(lambda made: made.cancelled() or made.exception() or made.result().discard())
            raise
        except OSError as error:
            raise ToolError(f"the sandbox did not start: {error}") from error

    def _replace(self, program: Program) -> None:
        """Start what is missing of the pre-started ones."""
        starting = self._starting[program]
        while not self._closed and len(self._ready[program]) + len(starting) < self.spare:
            _filled.setdefault(asyncio.get_running_loop(), set()).add(self)
            task = asyncio.create_task(self._prepare(program), name="start a sandbox")
            starting.add(task)
            task.add_done_callback(starting.discard)

    async def _prepare(self, program: Program) -> None:
        self._ready[program].append(await self._start(program))


def _result(parts: list[bytes], process: ConfinedProcess) -> ExecResult:
    """What a sandbox answered; one that answers otherwise is not ours any more."""
    try:
        return result_of(parts)
    except ValueError:
        process.kill("killed")
        return ExecResult("", "", None, "killed")


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LocalPool] = weakref.WeakKeyDictionary()
_filled: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, set[LocalPool]] = weakref.WeakKeyDictionary()
"""The pools that have pre-started sandboxes in an event loop."""


def local_pool() -> LocalPool:
    """The pool of this event loop, which the tools use when they are given none. Raises ConfigError: nothing can be confined
    here."""
    loop = asyncio.get_running_loop()
    if loop not in _pools:
        _pools[loop] = LocalPool(spare=SPARE)
    return _pools[loop]


async def closing_pools(work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is all that this event loop is for: at its end, however it ends, the pools that have pre-started
    sandboxes here end these. Where they do not end is logged."""
    try:
        return await work
    finally:
        closing = asyncio.gather(*(pool.drain() for pool in _filled.get(asyncio.get_running_loop(), ())))
        hint = "look for processes in state D"
        try:
            await with_deadline(CLOSE_S, closing, who="this process", waits_for="its sandboxes to end", hint=hint)
        except SlipstreamError as error:
            log.warning("%s", error)
