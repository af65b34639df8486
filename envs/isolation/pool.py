"""The processes of one environment: which of them an episode goes to, and what happens when one of them hangs or ends.

Invariants:
- Processes are started when they are needed, at most as many as there are slots. One that has ended is replaced at the next
  request for its slot; the episodes in it fail, and no other.
- An episode stays in its process. A new one goes to the process with the fewest.
- A process that does not answer to the cancellation of a call, within `ANSWER_S` and `ABORT_S`, is killed. A call that ignores its
  cancellation, in a process that answers, is abandoned.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import Any

import zmq.asyncio

from ...errors import EnvError
from .messages import (
    CallCancelled,
    CancelCall,
    CloseEpisode,
    Demonstrate,
    Demonstrated,
    Describe,
    Description,
    EnvReply,
    EnvRequest,
    EpisodeClosed,
    EpisodeOpened,
    EpisodeStepped,
    MakeTask,
    ResetEpisode,
    StepEpisode,
    TaskMade,
)
from .process import HostProcess

ANSWER_S = 2.0  # how long a process may take to say that it has cancelled a call, before it counts as stuck
HUNG = "a call did not end after it was cancelled"
REPLIES: dict[type, type[Any]] = {
    Describe: Description,
    MakeTask: TaskMade,
    Demonstrate: Demonstrated,
    ResetEpisode: EpisodeOpened,
    StepEpisode: EpisodeStepped,
    CloseEpisode: EpisodeClosed,
    CancelCall: CallCancelled,
}


class HostSlot:
    """Room for one process; `load` is the episodes and other calls that it has."""

    def __init__(self) -> None:
        self.load = 0
        self.process: HostProcess | None = None
        self.starting: asyncio.Task[HostProcess] | None = None


class HostPool:
    """At most `processes` hosts of the interpreter `python`, ours where it is empty. `name` is the environment's in messages."""

    def __init__(self, name: str, processes: int, python: str, context: zmq.asyncio.Context) -> None:
        self._name, self._python, self._context = name, python, context
        self.slots = tuple(HostSlot() for _ in range(processes))
        self._episodes: dict[str, tuple[HostSlot, HostProcess | None]] = {}  # None: its process is starting
        self._calls: dict[str, HostProcess] = {}

    async def handle(self, request: EnvRequest) -> EnvReply:
        """The answer of the process that it concerns. Raises EnvError: that process ended, or does not start."""
        match request:
            case CancelCall(call=call):
                return await self._cancel(call)
            case StepEpisode(episode=episode):
                _, process = self._episodes.get(episode, (None, None))
                if process is None:
                    raise EnvError("there is no such episode")
                return await self._ask(process, request)
            case CloseEpisode(episode=episode):
                return await self._close(episode, request)
            case ResetEpisode(episode=episode):
                return await self._ask(await self._open_episode(episode), request)
            case _:
                slot = self._take()
                try:
                    return await self._ask(await self._started(slot), request)
                finally:
                    slot.load -= 1

    async def end(self) -> None:
        """End all processes, and close the connections to them. Raises DeadlineExceeded: one does not end though it is killed."""
        kill_all(self.slots)
        for slot in self.slots:
            if slot.starting is not None:
                slot.starting.cancel()
                await asyncio.wait([slot.starting])
            if slot.process is not None:
                await slot.process.exited()

    def _take(self) -> HostSlot:
        """The slot with the least load; of several one with a process."""
        slot = min(self.slots, key=lambda slot: (slot.load, slot.process is None))
        slot.load += 1
        return slot

    async def _open_episode(self, episode: str) -> HostProcess:
        """The process of a new episode. Raises EnvError: it does not start, or the episode was closed meanwhile."""
        starting = self._episodes[episode] = self._take(), None
        slot = starting[0]
        try:
            process = await self._started(slot)
        except BaseException:
            if self._episodes.get(episode) is starting:
                del self._episodes[episode]
                slot.load -= 1
            raise
        if self._episodes.get(episode) is not starting:
            raise EnvError("its episode was closed while its process started")
        self._episodes[episode] = slot, process
        return process

    async def _started(self, slot: HostSlot) -> HostProcess:
        if slot.process is not None and not slot.process.ended:
            return slot.process
        if slot.starting is None:
            slot.starting = asyncio.create_task(HostProcess.start(self._name, self._python, self._context))
            slot.starting.add_done_callback(lambda task: self._start_ended(slot, task))
        return await asyncio.shield(slot.starting)

    def _start_ended(self, slot: HostSlot, task: asyncio.Task[HostProcess]) -> None:
        slot.starting = None
        if not task.cancelled() and task.exception() is None:
            slot.process = task.result()

    async def _ask(self, process: HostProcess, request: Any) -> EnvReply:
        self._calls[request.call] = process
        try:
            reply = await process.ask(request, REPLIES[type(request)])
        except asyncio.CancelledError:  # its caller sends CancelCall next
            raise
        except BaseException:
            self._calls.pop(request.call, None)
            raise
        self._calls.pop(request.call, None)
        return reply

    async def _close(self, episode: str, request: CloseEpisode) -> EnvReply:
        slot, process = self._episodes.pop(episode, (None, None))
        if slot is None:
            return EpisodeClosed()
        try:
            return EpisodeClosed() if process is None or process.ended else await self._ask(process, request)
        finally:
            slot.load -= 1

    async def _cancel(self, call: str) -> CallCancelled:
        process = self._calls.pop(call, None)
        if process is None or process.ended:
            return CallCancelled()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                reply = await process.ask(CancelCall(call), CallCancelled)
                return reply if isinstance(reply, CallCancelled) else CallCancelled()
        return CallCancelled(await process.abort(HUNG))


def kill_all(slots: tuple[HostSlot, ...]) -> None:
    """End all processes, from any thread."""
    for slot in slots:
        if slot.process is not None and not slot.process.ended:
            slot.process.ended = "its environment is not used any more"
            slot.process.signal(signal.SIGKILL, group=True)
