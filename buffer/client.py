"""How workers and learners speak to the buffer.

Invariants:
- Every request has a deadline, but `lease`, which ends with its caller. Until then it is sent again whenever the buffer is
  silent, which is safe: all requests may be repeated. A buffer that is restarted in between is not noticed.
- Replies are matched by number; any number of requests may be under way at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import TypeVar

import zmq
import zmq.asyncio

from ..errors import StateError, WireError, within
from . import messages as m
from . import wire
from .ledger import Counts
from .messages import Batch, Lease, Stats
from .trajectory import Outcome, Trajectory

RESEND_S = 5.0
"""Silence after which a request is sent again. A lease or a batch may take longer; asking twice costs one small frame."""

HEARTBEAT_MS = 5000
"""A connection whose other end vanished without a word is noticed and made anew after this long."""

R = TypeVar("R")


class BufferClient:
    """A connection to the buffer at `address`, used as an async context manager. `name` is unique per role, not per process."""

    def __init__(self, address: str, name: str, *, deadline_s: float = 60.0) -> None:
        self.name = name
        self.incarnation = uuid.uuid4().hex
        self._address = address
        self._deadline_s = deadline_s
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[m.Reply]] = {}
        self._leasing = asyncio.Lock()

    async def __aenter__(self) -> BufferClient:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"{self.name}/{self.incarnation}".encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.connect(self._address)
        self._receiver = asyncio.create_task(self._receive(), name=f"{self.name} buffer replies")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._receiver.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._receiver
        self._socket.close()
        self._context.term()

    # --- workers --------------------------------------------------------------------------------------------------

    async def hello(self) -> None:
        await self._ask(m.Hello(self.name, self.incarnation), m.Done)

    async def lease(self) -> Lease:
        """The next group to play. How long admission takes is the learner's affair, so the caller's cancellation is the
        only deadline. The buffer keeps one such wish per client: calls queue here, and a cancelled one is replaced."""
        async with self._leasing:
            return (await self._send(m.WantLease(self.name), m.Granted)).lease

    async def progress(self, generated: dict[str, Counts], slot_s: float, idle_slot_s: float) -> tuple[str, ...]:
        """Report running totals; returns the episodes among them that nobody waits for any more."""
        return (await self._ask(m.Progress(self.name, generated, slot_s, idle_slot_s), m.Unwanted)).episodes

    async def deliver(
        self, episode_id: str, generated: Counts, outcome: Outcome, trajectories: Sequence[Trajectory]
    ) -> None:
        """Returns once the episode is durable."""
        await self._ask(m.Deliver(self.name, episode_id, generated, outcome, tuple(trajectories)), m.Done)

    async def goodbye(self) -> None:
        await self._ask(m.Goodbye(self.name), m.Done)

    # --- learner --------------------------------------------------------------------------------------------------

    async def recover(self, version: int) -> int:
        """Start from weights that contain the commits up to `version`; the version to publish them under."""
        return (await self._ask(m.Recover(version), m.Recovered)).version

    async def take(self, version: int, deadline_s: float) -> Batch:
        """The batch for `version`.

        Raises:
            DeadlineExceeded: there was none within `deadline_s`.
        """
        return await self._ask(m.Take(version), Batch, deadline_s)

    async def fresh(self, version: int, limit: int) -> tuple[Trajectory, ...]:
        """At most `limit` delivered trajectories, outside of batches, that hold tokens of `version`."""
        return (await self._ask(m.WantFresh(version, limit), m.Fresh)).trajectories

    async def commit(self, version: int) -> None:
        await self._ask(m.Commit(version), m.Done)

    async def served(self, version: int) -> None:
        await self._ask(m.Served(version), m.Done)

    async def checkpointed(self, version: int) -> None:
        await self._ask(m.Checkpointed(version), m.Done)

    async def stats(self) -> Stats:
        return (await self._ask(m.WantStats(), m.StatsReply)).stats

    # --- transport ------------------------------------------------------------------------------------------------

    async def _ask(self, request: m.Request, expected: type[R], deadline_s: float | None = None) -> R:
        seconds = self._deadline_s if deadline_s is None else deadline_s
        return await within(
            seconds,
            self._send(request, expected),
            who=self.name,
            waits_for=f"the buffer's answer to {type(request).__name__}",
            hint=f"is the buffer at {self._address} alive, and are workers delivering?",
        )

    async def _send(self, request: m.Request, expected: type[R]) -> R:
        number = next(self._numbers)
        frames = wire.encode(m.Envelope(number, request))
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            while not future.done():
                await self._socket.send_multipart(frames, copy=False)
                await asyncio.wait([future], timeout=RESEND_S)
        finally:
            del self._waiting[number]
        reply = future.result()
        if isinstance(reply, m.Refused):
            raise StateError(f"the buffer refused {type(request).__name__} of {self.name}: {reply.error}")
        if not isinstance(reply, expected):
            raise StateError(f"the buffer answered {type(request).__name__} with {type(reply).__name__}")
        return reply

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                reply = wire.decode(m.ReplyEnvelope, frames)
            except WireError as error:
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(error)
                continue
            future = self._waiting.get(reply.number)
            if future is not None and not future.done():
                future.set_result(reply.message)
