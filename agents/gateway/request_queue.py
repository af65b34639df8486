"""The gateway's queue of the requests of one episode: those that are under way, and those that wait for their turn.

    request ──> room for its body ──> body ──> its turn ──> call ──> answer

Invariants:
- The bodies of requests have at most `BODIES` bytes together, from before they are read until their calls have ended.
- At most `CALLS` requests are under way: from their turn until they are answered and their calls have ended.
- Room and turns come in the order in which they were asked for: a request asks for its turn once its body is read. A wait for them
  ends with the episode, or `TURN_S` after the request came; that for a turn also with the client's connection.
- A request has room for its whole body before the body is read, and has read it before its turn: no request that is under way
  waits for another's body.
- A client that goes is seen to go once its body is read, or where all of its body has arrived: a connection that is not read does
  not say that it has ended. So a request that waits for room keeps its place.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from ...common.waits import TrackedWait
from ...errors import PolicyError
from .bodies import RefusedRequest

CALLS = 256  # requests of one episode that are under way; what their calls sample is bounded by the session
BODIES = 1 << 27  # bytes of their bodies; more than one of the largest
TURN_S = 600.0  # as long as OpenAI's and Anthropic's clients wait for an answer


class FifoSemaphore:
    """`limit` units, which go to those that ask in the order in which they ask."""

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self._limit = limit
        self._waiting: dict[asyncio.Future[None], int] = {}

    def acquire(self, units: int) -> asyncio.Future[None]:
        """Has a result once the caller has the units. It may be cancelled or given an exception before that."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = units
        turn.add_done_callback(self._forget)
        self._admit()
        return turn

    def release(self, units: int) -> None:
        self.taken -= units
        self._admit()

    def _forget(self, turn: asyncio.Future[None]) -> None:
        if self._waiting.pop(turn, None) is not None:
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            turn, units = next(iter(self._waiting.items()))
            if not turn.done():
                if self.taken + units > self._limit:
                    return
                self.taken += units
                turn.set_result(None)
            del self._waiting[turn]


class RequestRoom:
    """What a request takes of its episode's room: the bytes of its body, a turn, and its call once it has one."""

    def __init__(self, queue: RequestQueue, gone: asyncio.Future[None]) -> None:
        self.call: asyncio.Task[Any] | None = None
        self._queue = queue
        self._gone = gone
        self._until = asyncio.get_running_loop().time() + TURN_S
        self._waits_for = ""  # of the newest wait
        self._taken: list[tuple[FifoSemaphore, asyncio.Future[None], int]] = []

    def reserve(self, size: int) -> asyncio.Future[None]:
        """Has a result once there is room for a body of `size` bytes. Raises, and ends, as `turn`."""
        return self._ask(
            self._queue.bodies, size, f"room: bodies of the episode's requests have {BODIES} bytes at most"
        )

    def shrink_to(self, size: int) -> None:
        """The body has turned out to have `size` bytes: give the others back."""
        ((bodies, reserved, most),) = self._taken
        self._taken = [(bodies, reserved, size)]
        bodies.release(most - size)

    def turn(self) -> asyncio.Future[None]:
        """Has a result once it is the request's turn, RefusedRequest where it waits for too long, PolicyError where the episode is
        over before, ConnectionResetError where the client is gone. Raises RefusedRequest where too many wait."""
        return self._ask(self._queue.calls, 1, f"its turn: the episode has {CALLS} others under way")

    def tracked(self) -> TrackedWait:
        """Around the wait for what was asked for last."""
        left = self._until - asyncio.get_running_loop().time()
        return TrackedWait("a call of an agent", self._waits_for, max(0.0, left))

    def leave(self) -> None:
        """Give all of it back."""
        for semaphore, turn, units in self._taken:
            if not turn.done():
                turn.cancel()
            elif not turn.cancelled() and turn.exception() is None:
                semaphore.release(units)

    def _ask(self, semaphore: FifoSemaphore, units: int, waits_for: str) -> asyncio.Future[None]:
        self._waits_for = waits_for
        why = f"the call has waited {TURN_S:g} s for {waits_for}"
        turn = self._queue.acquire(semaphore, units, self._gone, self._until, why)
        self._taken.append((semaphore, turn, units))
        return turn


class RequestQueue:
    """The requests of one episode, of which at most `most_waiting` wait."""

    def __init__(self, most_waiting: int) -> None:
        self.bodies, self.calls = FifoSemaphore(BODIES), FifoSemaphore(CALLS)
        self.waiting: set[asyncio.Future[None]] = set()
        self._most_waiting = most_waiting
        self._closed = False

    @contextlib.asynccontextmanager
    async def room(self, size: int, gone: asyncio.Future[None]) -> AsyncIterator[RequestRoom]:
        """Around a request of at most `size` bytes and its answer, once there is room for its body; `gone` ends with its client's
        connection. Raises RefusedRequest, PolicyError and ConnectionResetError as `RequestRoom.turn`."""
        room = RequestRoom(self, gone)
        try:
            reserved = room.reserve(size)
            with room.tracked():
                await reserved
            yield room
        finally:
            if room.call is None or room.call.done():
                room.leave()
            else:
                room.call.add_done_callback(lambda _: room.leave())

    def acquire(
        self, semaphore: FifoSemaphore, units: int, gone: asyncio.Future[None], until: float, why: str
    ) -> asyncio.Future[None]:
        """See `RequestRoom.turn`; `until` is the loop's time at which it ends by a refusal that says `why`."""
        if self._closed:
            raise PolicyError("the episode is over")
        turn = semaphore.acquire(units)
        if turn.done():
            return turn
        if sum(not other.done() for other in self.waiting) >= self._most_waiting:
            turn.cancel()
            full = (
                f"{self._most_waiting} calls of the episode wait already, as many as may; at most {CALLS} are under way"
            )
            raise RefusedRequest(429, full, "rate_limit_exceeded")
        self.waiting.add(turn)
        late = asyncio.get_running_loop().call_at(
            until, _fail_turn, turn, RefusedRequest(429, why, "rate_limit_exceeded")
        )

        def lost(_: asyncio.Future[None]) -> None:
            _fail_turn(turn, ConnectionResetError("the client is gone"))

        def ended(_: asyncio.Future[None]) -> None:
            self.waiting.discard(turn)
            late.cancel()
            gone.remove_done_callback(lost)

        gone.add_done_callback(lost)
        turn.add_done_callback(ended)
        return turn

    def close(self) -> None:
        """None that waits has a turn any more."""
        self._closed = True
        for turn in self.waiting:
            _fail_turn(turn, PolicyError("the episode is over"))


def _fail_turn(turn: asyncio.Future[None], error: Exception) -> None:
    if not turn.done():
        turn.set_exception(error)
        turn.exception()  # a request that was cancelled meanwhile does not ask for it
