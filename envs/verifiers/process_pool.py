"""The pool of processes that verifiers call functions in: a process is killed, for what a verifier computes may never end, and may
hold the interpreter's lock while it does.

    caller ──function, arguments──> a free process ──"begun"──> the limit starts ──result or exception──> caller

Invariants:
- A call that passes its limit costs its process, which is killed at once; the next call gets another. The event loop never waits.
- The limit begins when the function does: not while a process starts, imports, or is awaited.
- Only a process that ends after it has begun the function can be that function's doing: one that ends before is replaced.
- A process ends with this one, also when this one is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import TypeVar

from ...common.process import PARENT
from ...common.waits import within
from ...errors import EnvError, describe, with_deadline

T = TypeVar("T")

PROCESSES = max(2, os.cpu_count() or 1)  # two at least: one that runs away holds back no other
START_S = 180.0  # longest start of a process and import of a function: sympy takes seconds, on a busy machine a minute
FREE_S = 600.0  # longest wait for a free process; the deadline of the episode's step comes first
STARTS = 3  # processes that may end in a row before they begin one call
FRAME = 4  # bytes of a length
BEGUN, RESULT, FAILED = b"b", b"r", b"f"  # what an answer is


class ProcessLost(EnvError):
    """The process of a call ended while the function ran: the function crashed it, or it was killed from outside."""


class _NeverBegun(EnvError):
    """A process ended before it began the function."""


class _Process:
    """One process, and its socket. Made by `start`."""

    def __init__(
        self, popen: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._popen = popen
        self._reader = reader
        self._writer = writer
        self._status: asyncio.Future[int] | None = None  # once it was killed

    @classmethod
    async def start(cls) -> _Process:
        ours, theirs = socket.socketpair()
        with theirs:
            environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), PARENT: str(os.getpid())}
            popen = subprocess.Popen(  # noqa: ASYNC220 - returns once the program is executed
                (sys.executable, "-m", f"{__package__}.call_server", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environ,
            )
        return cls(popen, *await asyncio.open_connection(sock=ours))

    async def call(self, request: bytes, seconds: float) -> tuple[bytes, bytes]:
        """The kind and body of the answer. Raises TimeoutError; ProcessLost; _NeverBegun."""
        lost: type[EnvError] = _NeverBegun
        try:
            self._writer.write(len(request).to_bytes(FRAME, "big") + request)
            await self._writer.drain()
            hint = "the machine is overloaded"
            kind, body = await with_deadline(
                START_S, self._answer(), who="an episode", waits_for="a process to import its verifier", hint=hint
            )
            if kind == BEGUN:
                lost = ProcessLost
                kind, body = await within(seconds, self._answer())
            return kind, body
        except (asyncio.IncompleteReadError, ConnectionError):
            raise lost(f"the process of a verifier ended with status {await self.kill()}") from None

    async def _answer(self) -> tuple[bytes, bytes]:
        size = int.from_bytes(await self._reader.readexactly(FRAME), "big")
        body = await self._reader.readexactly(size)
        return body[:1], body[1:]

    def ended(self) -> bool:
        return self._popen.poll() is not None

    def kill(self) -> asyncio.Future[int]:
        """Its status comes when it is gone: a process with much memory takes a while."""
        if self._status is None:
            self._popen.kill()
            self._writer.close()
            self._status = asyncio.get_running_loop().run_in_executor(None, self._popen.wait)
        return self._status


class _Pool:
    """The processes of one event loop."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(PROCESSES)
        self._free: list[_Process] = []

    async def call(self, request: bytes, seconds: float) -> tuple[bytes, bytes]:
        hint = "verifiers run away, or take longer than episodes come; look at what they are given"
        await with_deadline(
            FREE_S, self._slots.acquire(), who="an episode", waits_for="a verifier's process", hint=hint
        )
        try:
            for _ in range(STARTS - 1):
                with contextlib.suppress(_NeverBegun):
                    return await self._call_once(request, seconds)
            return await self._call_once(request, seconds)
        finally:
            self._slots.release()

    async def _call_once(self, request: bytes, seconds: float) -> tuple[bytes, bytes]:
        process = await self._take()
        try:
            answer = await process.call(request, seconds)
        except BaseException:  # a cancelled call, too: its process may never end
            process.kill()
            raise
        self._free.append(process)
        return answer

    async def _take(self) -> _Process:
        while self._free:
            process = self._free.pop()
            if not process.ended():
                return process
            process.kill()
        return await _Process.start()


_pools: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pool] = weakref.WeakKeyDictionary()


async def in_process(function: Callable[..., T] | str, *arguments: object, seconds: float) -> T:
    """`function(*arguments)` in a process of its own, which is killed after `seconds`. Function, arguments and result are
    pickled: the function is found by its module and name. A text, `package.module:function`, names a function whose module only
    that process imports. Importing does not count against `seconds`. Raises what it raises; TimeoutError: it was killed;
    ProcessLost; EnvError: no process came to begin it."""
    pool = _pools.setdefault(asyncio.get_running_loop(), _Pool())
    kind, body = await pool.call(pickle.dumps((function, arguments)), seconds)
    if kind == FAILED:
        error, text = pickle.loads(body)
        raise error if error is not None else EnvError(text)
    return pickle.loads(body)


def failure(error: BaseException) -> bytes:
    """An exception for the caller; one that cannot be pickled as its description."""
    try:
        pickled = pickle.dumps((error, ""))
        pickle.loads(pickled)  # some can be written but not read
        return pickled
    except Exception:
        return pickle.dumps((None, describe(error)))
