"""What the supervisor of a program's run has of the program: the pipes, and rank 0 of the learner as a role that it starts, and
ends.

Invariants:
- Rank 0 is started once: where a rank of the learner fails, the run ends, and can be resumed.
- Where the program ends, so does the run.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from ...common.owned_folders import OwnedFolder
from ...configs import Config
from ...errors import RoleDied
from ...monitor.output import open_console
from ...monitor.terminal import LineView
from ..launchers.local import LocalLauncher, ProcessHandle
from ..resources import GpuAssignment
from ..supervisor.factory import FIRST_RANK
from .messages import (
    BeginRun,
    FromProgram,
    FromSupervisor,
    LeaveRun,
    RankEnded,
    StartRank,
    StopRank,
    encode_line,
)


class ProgramLink:
    """The supervisor's end of the pipes. The first line is read before there is an event loop."""

    def __init__(self, read: BinaryIO, write: BinaryIO) -> None:
        self._read, self._write = read, write
        self._rank: ProgramRank | None = None
        self._ending = False
        self._decode = msgspec.json.Decoder(FromProgram).decode
        begin = self._decode(read.readline())
        assert isinstance(begin, BeginRun)
        self.begin = begin

    def send(self, message: FromSupervisor) -> None:
        """Raises BrokenPipeError where the program has ended, and this process is about to."""
        self._ending |= isinstance(message, StopRank)
        self._write.write(encode_line(message))

    def start_rank(self, environment: dict[str, str], private: OwnedFolder) -> ProgramRank:
        """Have the program begin its rank. Raises RoleDied the second time."""
        if self._rank is not None:
            raise RoleDied(
                "a rank of the learner ended, and rank 0, which is the program, does not start again: see the logs of the "
                "ranks, and start the program again with resume=True"
            )
        self._rank = ProgramRank(self, private)
        self.send(StartRank(environment))
        return self._rank

    def view(self, config: Config) -> LineView:
        console = open_console(stderr=True)
        console.quiet = not self.begin.show
        return LineView(config, console)

    async def supervise(self, work: Coroutine[Any, Any, None], interrupt: Callable[[], None]) -> None:
        """Carry out `work`, which `interrupt` ends as the first and the second SIGINT do, while the program is listened to."""
        loop, lines = asyncio.get_running_loop(), asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), self._read)
        listening = asyncio.create_task(self._listen(lines, interrupt), name="program")
        try:
            await work
        finally:
            listening.cancel()
            await asyncio.wait({listening})
            transport.close()

    async def _listen(self, lines: asyncio.StreamReader, interrupt: Callable[[], None]) -> None:
        while line := await lines.readline():
            match self._decode(line):
                case LeaveRun():
                    if not self._ending:
                        interrupt()
                case RankEnded(status) if self._rank is not None:
                    self._rank.ended(status)
                case _:
                    pass
        if self._rank is not None:  # the program is gone
            self._rank.ended(-signal.SIGKILL)
        interrupt()
        interrupt()


class ProgramRank(ProcessHandle):
    """Rank 0 of the learner, in the program's process."""

    lost = False

    def __init__(self, link: ProgramLink, private: OwnedFolder) -> None:
        self.pid = os.getppid()
        self._link, self._private = link, private
        self._exit: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def ended(self, status: int) -> None:
        if not self._exit.done():
            self._exit.set_result(status)
            self._private.close()

    async def wait(self) -> int:
        return await asyncio.shield(self._exit)

    async def terminate(self) -> None:
        if not self._exit.done():
            self._link.send(StopRank())

    async def kill(self) -> None:
        """The program's process lives on; its rank counts no more."""
        self.ended(-signal.SIGKILL)


class ProgramLauncher(LocalLauncher):
    """Child processes on this machine, but for rank 0 of the learner, which is the program at the other end of `link`."""

    def __init__(
        self, logs: Path, first_port: int, placement: GpuAssignment, available: int, link: ProgramLink
    ) -> None:
        super().__init__(logs, first_port, placement, available)
        self._link = link

    async def execute(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        if role != FIRST_RANK:
            return await super().execute(role, command, environment)
        rank = self._link.start_rank(environment | self.own_variables(role), self._private.pop(role))
        self._started[role].append(rank)
        return rank
