"""A connection to a service that answers by number: requests go out one after the other, answers come in any order.

Invariants:
- An answer that nobody waits for is forgotten; one that cannot be read fails whoever waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import zmq
import zmq.asyncio

from ..curve import Keys, join
from ..errors import WireError
from ..keepalive import keep_alive
from . import wire
from .door import Door

LINGER_MS = 500
"""For messages that are on their way when an end is closed: libzmq aborts a process that drops half of one."""

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Answer(Protocol[R_co]):
    """What comes back: the number of a request, and the reply to it."""

    @property
    def number(self) -> int: ...

    @property
    def message(self) -> R_co: ...


class Line(Generic[R]):
    """The line called `name` to the service at `address`.

    Args:
        answer: the type of its answers.
        identity: by which the service knows this end again; None for one that ZeroMQ makes up.
        patient: whether requests wait in this process while the service is away. Else `put` does.
        keys: those of the run, if not this process's own.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: str,
        name: str,
        answer: type[Answer[R]],
        *,
        identity: bytes | None = None,
        patient: bool = True,
        keys: Keys | None = None,
    ) -> None:
        self.name = name
        self._answer = answer
        self._waiting: dict[int, asyncio.Future[R]] = {}
        socket = context.socket(zmq.DEALER)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.IMMEDIATE, int(not patient))
        keep_alive(socket)
        join(socket, keys)
        socket.connect(address)
        self._door = Door.of(socket)
        self._receiver = asyncio.create_task(self._receive(), name=f"{name}'s answers")

    def expect(self, number: int) -> asyncio.Future[R]:
        """The reply to the request of that number. Cancel it to wait no longer."""
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        reply.add_done_callback(lambda _: self._waiting.pop(number, None))
        return reply

    def send(self, frames: Sequence[wire.Frame]) -> None:
        """Send a request now. Raises `zmq.Again` where that cannot be."""
        self._door.plain.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._hear()  # see `Door`

    async def put(self, frames: Sequence[wire.Frame]) -> None:
        """Send a request as soon as it can be."""
        while True:
            try:
                return self.send(frames)
            except zmq.Again:
                await self._door.ready.poll(flags=zmq.POLLOUT)  # pyright: ignore[reportCallIssue]  pyzmq types it as the poller's

    def close(self) -> None:
        """Hear no more; the context can be terminated."""
        self._receiver.cancel()
        self._door.ready.close()

    async def _receive(self) -> None:
        while True:
            await self._door.ready.poll()
            self._hear()

    def _hear(self) -> None:
        """Give out the answers that are there."""
        while (frames := self._door.read()) is not None:
            try:
                answer = wire.decode(self._answer, frames)
            except WireError as error:
                for reply in self._waiting.values():
                    if not reply.done():
                        reply.set_exception(error)
                continue
            reply = self._waiting.get(answer.number)
            if reply is not None and not reply.done():
                reply.set_result(answer.message)
