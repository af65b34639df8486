"""One confined process of a sandbox, seen from the host: its start, its frames, its end.

Invariants:
- One request at a time; each has a deadline, after which the process is killed.
- A process that has ended keeps the reason. `closed` and what ended it from outside are ToolErrors; every other reason is the
  policy's doing.
- A caller that is cancelled during a request leaves no half-read answer behind: the process is killed.
- Nothing of it outlives `close`, nor this process: the sandbox ends when the socket to it is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import marshal
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from ...common.waits import Overdue, within
from ...errors import DeadlineExceeded, ToolError, with_deadline
from .base import Ended, Limits, Reason
from .frames import FRAME, parts_of
from .watchdog import WATCHDOG, Watched, kill_session

START_S = 60.0  # longest start of a sandbox: a second on a very busy machine, more where all start at once
END_S = 30.0  # longest wait for the kernel to end killed processes
GRACE_S = 2.0  # what an answer may take beyond the limit that is enforced inside
MESSAGES = 1 << 14  # bytes of the sandbox's own messages, shown when it does not start


T = TypeVar("T")


class LaunchSpec(msgspec.Struct, frozen=True):
    """How a confined process is started. `clean` runs in a thread when it has ended; `limits` are rlimits that hold inside."""

    argv: tuple[str, ...]
    home: str
    environ: dict[str, str]
    rlimits: tuple[tuple[int, int], ...]
    pass_fds: tuple[int, ...] = ()
    owns_session: bool = (
        False  # its processes stay in its session, by which they are found; else they are its descendants
    )
    files: Callable[[int], float] | None = None  # bytes in its files, by the id of one of its processes
    clean: Callable[[], None] | None = None
    relay: tuple[str, ...] = ()  # what runs its commands, where it has a network of its own and a gateway in it
    gateway: str = ""  # host and port at which commands reach the gateway
    own_memory: int = 0  # bytes that this kind of sandbox itself may take, beside its programs
    own_threads: int = 0  # and its threads
    ends: Mapping[int, Ended] | None = (
        None  # by exit status: what the policy did; None: whatever it is, it has ended it
    )

    def discard(self) -> None:
        """Instead of a start."""
        for fd in self.pass_fds:
            os.close(fd)
        if self.clean is not None:
            self.clean()


class SandboxEnded(Exception):
    """The process has ended; the argument is the reason."""

    def __init__(self, reason: Ended) -> None:
        super().__init__(reason)
        self.reason: Ended = reason


class ConfinedProcess:
    """A started process, which answers requests until it ends; made by `start`."""

    def __init__(
        self,
        launch: LaunchSpec,
        popen: subprocess.Popen[bytes],
        watched: Watched,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        messages: int,
    ) -> None:
        self.home = launch.home
        self.python = ""
        self.relay, self.gateway = launch.relay, launch.gateway
        self.pid = popen.pid  # of the outermost process, on the host
        self.rlimits = launch.rlimits
        self._launch = launch
        self._popen = popen
        self._watched = watched
        self._reader, self._writer = streams
        self._messages = messages
        self._lock = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None
        self._exited = asyncio.Event()
        asyncio.get_running_loop().add_reader(watched.pidfd, self._on_exit)

    @classmethod
    async def start(cls, launch: LaunchSpec, limits: Limits) -> ConfinedProcess:
        """Start it and wait until it is ready. Raises ToolError. Cancelled or not, `launch` is spent."""
        try:
            popen, watched, streams, messages = await _execute(launch, limits)
        except BaseException as error:
            if launch.clean is not None:
                launch.clean()
            if isinstance(error, OSError):
                raise ToolError(f"the sandbox did not start: {error}") from error
            raise
        process = cls(launch, popen, watched, streams, messages)
        try:
            await _in_time(START_S, process._greeting(), "its sandbox to start", "the machine is overloaded")
        except BaseException:
            await process.close()
            raise
        return process

    @property
    def reason(self) -> Reason | None:
        """Why it has ended; None while it runs."""
        return self._watched.reason

    @property
    def exited(self) -> bool:
        """Whether the outermost process has ended."""
        return os.waitid(os.P_PIDFD, self._watched.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    async def ask(self, request: tuple[Any, ...], *, seconds: float, cpu_s: float, limit: int) -> list[bytes]:
        """The answer to a request, of at most `limit` bytes. Raises SandboxEnded: the policy has ended it; ToolError."""
        async with self._lock:
            self._require_alive()
            self._watched.allow(cpu_s)
            try:
                return await within(seconds + GRACE_S, self._answer(request, limit))
            except Overdue:
                self.kill("wall")
            except ValueError:  # no answer of ours: the policy has taken the process over
                self.kill("killed")
            except (asyncio.IncompleteReadError, ConnectionError):
                await self._ended()
            except asyncio.CancelledError:
                self.kill("closed")
                raise
            self._require_alive()
            raise AssertionError("unreachable: it has ended")

    async def _answer(self, request: tuple[Any, ...], limit: int) -> list[bytes]:
        await self.send(request)
        return parts_of(await self._frame(limit))

    async def send(self, message: tuple[Any, ...]) -> None:
        """Send what is not answered."""
        body = marshal.dumps(message, 2)
        self._writer.write(len(body).to_bytes(FRAME, "big") + body)
        await self._writer.drain()

    def kill(self, reason: Reason) -> None:
        """End it now, for `reason` unless it has ended before."""
        self._watched.kill(reason)

    async def close(self) -> None:
        """End it, and remove its files when it has ended; this goes on where the caller is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"end of sandbox {self.pid}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._writer.close()
        try:
            # Bubblewrap that is killed while it starts leaves a process. This one ends when it reads from the closed socket.
            if not self.python:
                with contextlib.suppress(ToolError):
                    await self._exit()
            self.kill("closed")
            await self._exit()
            if self._launch.owns_session:
                await asyncio.to_thread(kill_session, self.pid)
        finally:
            self.kill("closed")
            asyncio.get_running_loop().remove_reader(self._watched.pidfd)
            WATCHDOG.forget(self._watched)
            os.close(self._messages)
            self._popen.poll()  # only now: until it is reaped, nothing else has its number or its session's
        if self._launch.clean is not None:
            await asyncio.to_thread(self._launch.clean)

    async def _greeting(self) -> None:
        try:
            ready, _, python = parts_of(await self._frame(MESSAGES))
        except (asyncio.IncompleteReadError, ConnectionError, ValueError):
            ready, python = b"", b""
        if ready != b"ready":
            await self._exit()
            self.kill("lost")
            raise ToolError(f"the sandbox did not start: {self._read_messages() or 'it ended'}")
        self.python = python.decode()

    async def _frame(self, limit: int) -> bytes:
        size = int.from_bytes(await self._reader.readexactly(FRAME), "big")
        if size > limit:
            raise ValueError(f"an answer of {size} bytes")
        return await self._reader.readexactly(size)

    def _require_alive(self) -> None:
        reason = self.reason
        if reason == "lost":
            raise ToolError(
                f"the sandbox was ended from outside{': ' + said if (said := self._read_messages()) else ''}"
            )
        if reason == "closed":
            raise ToolError("the sandbox is closed")
        if reason is not None:
            raise SandboxEnded(reason)

    async def _ended(self) -> None:
        """Its socket is closed: find out why. A signal to the outermost process, which the policy cannot reach, came from
        outside."""
        await self._exit()
        ended = os.waitid(os.P_PIDFD, self._watched.pidfd, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - it has ended
        if ended is None or ended.si_code != os.CLD_EXITED:
            self.kill("lost")
        else:
            self.kill("killed" if self._launch.ends is None else self._launch.ends.get(ended.si_status, "lost"))

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched.pidfd)  # it stays readable
        self._exited.set()

    async def _exit(self) -> None:
        """Return when the outermost process has ended. Raises ToolError."""
        await _in_time(END_S, self._exited.wait(), "its sandbox to end", "look for processes in state D")

    def _read_messages(self) -> str:
        os.set_blocking(self._messages, False)
        with contextlib.suppress(BlockingIOError):
            return os.read(self._messages, MESSAGES).decode(errors="replace").strip().replace("\n", "; ")
        return ""


async def _execute(
    launch: LaunchSpec, limits: Limits
) -> tuple[subprocess.Popen[bytes], Watched, tuple[asyncio.StreamReader, asyncio.StreamWriter], int]:
    """The process, watched; the streams to it; the pipe of its messages. Raises OSError: there is none, and nothing stays open."""
    with contextlib.ExitStack() as given, contextlib.ExitStack() as kept:
        for fd in launch.pass_fds:
            given.callback(os.close, fd)
        ours, theirs = socket.socketpair()
        given.callback(theirs.close)
        with contextlib.ExitStack() as unread:
            unread.callback(ours.close)
            messages, their_messages = os.pipe()
            given.callback(os.close, their_messages)
            kept.callback(os.close, messages)
            streams = await asyncio.open_connection(sock=ours)
            unread.pop_all()
        kept.callback(streams[1].close)
        popen = subprocess.Popen(  # noqa: ASYNC220 - returns once the program is executed
            launch.argv,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=their_messages,
            pass_fds=launch.pass_fds,
            env=launch.environ,
            cwd="/",
            start_new_session=True,
        )
        kept.callback(popen.wait, END_S)
        kept.callback(popen.kill)
        memory, processes = limits.memory + launch.own_memory, limits.processes + launch.own_threads
        counted = msgspec.structs.replace(limits, memory=memory, processes=processes)
        watched = WATCHDOG.watch(popen.pid, counted, launch.owns_session, launch.files)
        kept.pop_all()
        return popen, watched, streams, messages


async def _in_time(seconds: float, awaitable: Awaitable[T], waits_for: str, hint: str) -> T:
    """Raises ToolError where it takes longer: the sandbox is the tool's."""
    try:
        return await with_deadline(seconds, awaitable, who="an episode", waits_for=waits_for, hint=hint)
    except DeadlineExceeded as error:
        raise ToolError(str(error)) from error
