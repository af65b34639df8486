"""The requests of one episode: those that are under way, and those that wait for their turn.

    request ──> its turn ──> body ──> call ──> answer

Invariants:
- At most `CALLS` are under way, with at most `BODIES` bytes. A request is under way from its turn until it is answered and its call
  has ended.
- Turns come in the order of the requests. A wait ends with its turn, its client's connection, its episode, or after `TURN_S`.
- A request has room for its whole body before the body is read: none that is under way waits for another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from ...common.waits import TrackedWait
from ...errors import PolicyError
from .bodies import RefusedRequest

CALLS = 256  # requests of one episode that are under way; what their calls sample is bounded by the session
BODIES = 1 << 27  # bytes of their bodies; more than one of the largest
TURN_S = 600.0  # as long as OpenAI's and Anthropic's clients wait for an answer


class RequestRoom:
    """What a request takes of its episode's room: the bytes of its body, and its call once it has one."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.call: asyncio.Task[Any] | None = None


class RequestQueue:
    """The requests of one episode, of which at most `most_waiting` wait."""

    def __init__(self, most_waiting: int) -> None:
        self.under_way = self.bytes = 0
        self._most_waiting = most_waiting
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self._closed = False

    @contextlib.asynccontextmanager
    async def turn(self, size: int, gone: asyncio.Future[None]) -> AsyncIterator[RequestRoom]:
        """Around a request of at most `size` bytes and its answer, once it is its turn. Raises RefusedRequest: too many wait, or it
        waits for too long; PolicyError where the episode is over; ConnectionResetError where `gone` ends before its turn."""
        await self._wait(size, gone)
        room = RequestRoom(size)
        try:
            yield room
        finally:
            if room.call is None or room.call.done():
                self._end(room.size)
            else:
                room.call.add_done_callback(lambda _: self._end(room.size))

    def has_read(self, room: RequestRoom, size: int) -> None:
        """The body of the request has turned out to have `size` bytes."""
        self.bytes -= room.size - size
        room.size = size
        self._admit()

    def close(self) -> None:
        """None that waits has a turn any more."""
        self._closed = True
        for turn, _ in self._waiting:
            if not turn.done():
                turn.set_exception(PolicyError("the episode is over"))
        self._waiting.clear()

    async def _wait(self, size: int, gone: asyncio.Future[None]) -> None:
        if self._closed:
            raise PolicyError("the episode is over")
        if not self._waiting and self._fits(size):
            return self._begin(size)
        if len(self._waiting) >= self._most_waiting:
            why = f"the episode has {CALLS} calls under way and {self._most_waiting} that wait, as many as it may"
            raise RefusedRequest(429, why, "rate_limit_exceeded")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, size)
        self._waiting.append(entry)
        try:
            with TrackedWait("a call of an agent", f"its turn after the episode's {CALLS} others", TURN_S):
                await asyncio.wait((turn, gone), timeout=TURN_S, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ConnectionResetError("the client is gone")
            if not turn.done():
                why = f"the call has waited {TURN_S:g} s for its turn: the episode has {CALLS} others under way"
                raise RefusedRequest(429, why, "rate_limit_exceeded")
            turn.result()
        except BaseException:
            self._withdraw(entry)
            raise

    def _withdraw(self, entry: tuple[asyncio.Future[None], int]) -> None:
        turn, size = entry
        if not turn.done():
            self._waiting.remove(entry)
            turn.cancel()
            self._admit()
        elif turn.exception() is None:  # its turn came at the same time
            self._end(size)

    def _fits(self, size: int) -> bool:
        return self.under_way < CALLS and self.bytes + size <= BODIES

    def _begin(self, size: int) -> None:
        self.under_way += 1
        self.bytes += size

    def _end(self, size: int) -> None:
        self.under_way -= 1
        self.bytes -= size
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][1]):
            turn, size = self._waiting.popleft()
            self._begin(size)
            turn.set_result(None)
