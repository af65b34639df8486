"""One process that holds isolated environments, seen from the process that started it.

Invariants:
- It ends with the process that started it, also when that one is killed: the kernel kills it when the thread ends that started it,
  which is the one of `source.py` that lives as long as its process.
- When it ends, every call in it fails at once, by EnvError with the reason; no call waits for a dead process.
- `abort` has the process write where it was before it dies, also where it runs C code that never returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypeVar

import zmq
import zmq.asyncio

from ...common.owned_folders import PRIVATE_VARIABLE
from ...common.process import PARENT
from ...errors import EnvError, with_deadline
from ...rpc.client import RpcClient
from ...rpc.security import make_pair
from . import stacks
from .messages import EnvFailure, EnvReply, EnvRequest

log = logging.getLogger(__name__)

R = TypeVar("R")

START_S = 120.0  # longest start: an interpreter and four small packages, on a busy machine
ABORT_S = 1.0  # how long a process may take to write its stacks and die, before it is killed
END_S = 10.0  # how long a process may take to end that was killed
BOOT = str(Path(__file__).with_name("boot.py"))
LINES = 30  # of the stacks in the log
LINE_BYTES = 1 << 16  # of the line that says where a host listens, at once


class HostProcess:
    """A host, from `start` to its end. `name` is the environment's in messages."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], stack: int) -> None:
        self.ended = ""  # why it answers no more
        self.pid = popen.pid
        self._name = name
        self._popen = popen
        self._stack = stack
        self._written: list[str] = []  # stacks, once it has ended
        self._why = ""  # it is aborted
        self._client: RpcClient | None = None
        self._calls: set[asyncio.Future[object]] = set()
        self._exited = asyncio.Event()
        self._pidfd = os.pidfd_open(popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)

    @classmethod
    async def start(cls, name: str, python: str, context: zmq.asyncio.Context) -> HostProcess:
        """Raises EnvError: it does not start; the message says why."""
        told, tells = os.pipe()
        with tempfile.TemporaryFile() as file:
            stack = os.dup(file.fileno())
        pair = make_pair()  # only this process may talk to it
        spec = {
            "peer": pair.public,
            "root": str(stacks.ROOT),
            "paths": module_paths(python),
            "ready": tells,
            "stack": stack,
            "parent": os.getpid(),
        }
        ours = (PARENT, PRIVATE_VARIABLE)
        environ = {k: v for k, v in os.environ.items() if k not in ours} | {"PYTHONUNBUFFERED": "1"}
        try:
            popen = subprocess.Popen(  # noqa: ASYNC220 - returns once the program is executed
                (python or sys.executable, BOOT, json.dumps(spec)),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what environments print belongs into the log
                pass_fds=(tells, stack),
                env=environ,
                start_new_session=True,
            )
        except OSError as error:
            os.close(told)
            os.close(stack)
            raise EnvError(f"the process of {name} does not start: {error}") from None
        finally:
            os.close(tells)
        process = cls(name, popen, stack)
        try:
            hint = "the machine is overloaded"
            line = await with_deadline(
                START_S, _line(told), who=name, waits_for="the process of its environments to start", hint=hint
            )
        except BaseException:
            process.kill("it did not start in time")
            raise
        found = json.loads(line or "{}")
        if "address" not in found:
            process.kill("it did not start")
            why = found.get("error", "it ended before it was ready; its output is in the log")
            raise EnvError(f"the process of {name} does not start ({python or sys.executable}): {why}")
        process._client = RpcClient(found["address"], name, "its environments", EnvReply, context=context, pair=pair)
        return process

    async def ask(self, request: EnvRequest, reply_type: type[R]) -> R | EnvFailure:
        """Its answer. The caller has the deadline. Raises EnvError: it ended."""
        if self.ended or self._client is None:
            raise EnvError(self.ended or "its process has not started")
        try:
            reply = self._client.send(request, reply_type | EnvFailure)  # type: ignore[arg-type]  (isinstance takes it)
        except zmq.Again:
            raise EnvError(f"the process of {self._name} reads no more calls") from None
        self._calls.add(reply)
        try:
            return await reply
        finally:
            self._calls.discard(reply)
            reply.cancel()

    async def abort(self, why: str) -> str:
        """End it, because of `why`; returns where it was, or "". Its other calls fail with both."""
        self._why = why
        self.signal(signal.SIGABRT)  # faulthandler writes the stacks, without the interpreter's lock
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await self._exited.wait()
        where = stacks.innermost(self._written or self._read_stacks())
        self.kill(why)
        return where

    def kill(self, why: str) -> None:
        """End it and what it has started, now."""
        if not self.ended:
            self.ended = f"the process of {self._name} was killed: {why}"
        self.signal(signal.SIGKILL, group=True)
        self._fail_calls()

    async def exited(self) -> None:
        """Wait for the end of what was killed; its connection is closed then. Raises DeadlineExceeded."""
        hint = "it hangs in the kernel, above all in a file system"
        await with_deadline(
            END_S, self._exited.wait(), who=self._name, waits_for="a process that was killed", hint=hint
        )

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to it, or to it and what it has started, unless it has ended; from any thread."""
        with contextlib.suppress(ProcessLookupError):
            if self._exited.is_set():
                return  # another process may have its number
            if group:
                os.killpg(self.pid, number)
            elif self._popen.returncode is None:
                os.kill(self.pid, number)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.signal(
            signal.SIGKILL, group=True
        )  # what it has started; until it is waited for, nothing else has its number
        status, self._written = self._popen.wait(), self._read_stacks()
        if self._written:
            text = "\n".join(self._written[:LINES])
            log.warning("stacks of the process of %s when it ended:\n%s", self._name, text)
        if not self.ended:
            where = stacks.innermost(self._written)
            by = signal.Signals(-status).name if status < 0 else f"status {status}"
            what = f"was killed: {self._why}" if self._why else f"ended with {by}"
            self.ended = f"the process of {self._name} {what}{f'; it was in {where}' if where else ''}"
            log.warning("%s; another one takes its place", self.ended)
        os.close(self._stack)
        self._exited.set()
        self._fail_calls()
        if self._client is not None:
            self._client.close()

    def _fail_calls(self) -> None:
        for call in list(self._calls):
            if not call.done():
                call.set_exception(EnvError(self.ended))

    def _read_stacks(self) -> list[str]:
        if self._exited.is_set():
            return self._written
        return os.pread(self._stack, 1 << 16, 0).decode(errors="replace").splitlines()


async def _line(fd: int) -> bytes:
    """The first line of a pipe, which it closes; what came where the pipe is closed before. uvloop's own reader of pipes closes the
    descriptor twice, and the second time it may be one that another thread has just opened."""
    loop, line, readable = asyncio.get_running_loop(), b"", asyncio.Event()
    os.set_blocking(fd, False)
    loop.add_reader(fd, readable.set)
    try:
        while not line.endswith(b"\n"):
            await readable.wait()
            readable.clear()
            with contextlib.suppress(BlockingIOError):
                if not (more := os.read(fd, LINE_BYTES)):
                    return line
                line += more
        return line
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def module_paths(python: str) -> list[str]:
    """Where a host finds modules, beside what its interpreter brings: for ours all that we have, for another one what is not of
    our interpreter."""
    paths = [os.path.abspath(path) for path in sys.path if path == "" or os.path.isdir(path)]
    if not python:
        return paths
    ours = tuple(os.path.join(os.path.realpath(prefix), "") for prefix in (sys.prefix, sys.base_prefix))
    return [path for path in paths if not os.path.join(os.path.realpath(path), "").startswith(ours)]
