"""The serving end of RPC: one bound ROUTER socket, guarded by CURVE where the run has keys.

A simple service answers each request in turn:

    server = RpcServer("tcp://127.0.0.1:*", "supervisor", AddReplicas | GetStatus)
    await server.serve(handler, "the next command")       # until cancelled; server.address has the port

One that works in rounds, as the buffer does, reads what has arrived and replies when it can:

    for request in server.requests(): ...
    server.reply(request.identity, request.number, message)
    await server.poll(timeout_s)

Invariants:
- A message that is no request is dropped and counted, and logged at powers of two, so that a flood of them does not flood the log.
- Memory is bounded: `backlog` messages per connection wait to be read, then its sender waits; a peer that sends a frame above
  `frame_limit` is disconnected. One thing libzmq does not bound: a message of ever more frames that never ends. Only a peer with
  the run's keys can send one.
- A reply never blocks: a peer that does not read loses it, and asks again.
- A client that reconnects under its identity replaces its old connection.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from ..errors import RequestRefused, TrackedWait, WireError
from . import wire
from .security import CurveServer, Keys
from .wire import FRAME_LIMIT, LINGER_MS, ONE_WAY, AsyncSocket, RpcMessage, RpcRefusal, enable_keepalive

log = logging.getLogger(__name__)
BACKLOG = 64  # messages of one connection that wait to be read, after which its sender waits
M = TypeVar("M")


class RpcRequest(msgspec.Struct, Generic[M], frozen=True):
    """What a peer sent: its connection's identity, the request's number (`ONE_WAY`: no reply is expected), the message."""

    identity: bytes
    number: int
    message: M


class RpcServer(Generic[M]):
    """Bound when it is made, in a running event loop. `close` it at the end.

    Args:
        address: to bind; a port `*` is a free one. `address` is then what clients connect to.
        name: the service, for logs and `slipstream waits`.
        requests: the (union of) tagged structs that it accepts, one-way messages included.
        frame_limit: bytes; None for no limit.
        keys: the run's CURVE keys, where they are not those of this process.

    Attributes:
        dropped: messages that were no request.
        received, received_bytes: messages so far, those dropped included.

    Raises:
        zmq.ZMQError: the address is malformed or in use.
    """

    def __init__(
        self,
        address: str,
        name: str,
        requests: Any,
        *,
        backlog: int = BACKLOG,
        frame_limit: int | None = FRAME_LIMIT,
        keys: Keys | None = None,
    ) -> None:
        self.name = name
        self.dropped = self.received = self.received_bytes = 0
        self._request_type: type[RpcMessage[M]] = RpcMessage[requests]
        self._context = zmq.asyncio.Context()
        self._guard = CurveServer(self._context, keys)
        socket = self._context.socket(zmq.ROUTER)
        self._socket = AsyncSocket(socket)
        socket.setsockopt(zmq.MAXMSGSIZE, -1 if frame_limit is None else frame_limit)
        socket.setsockopt(zmq.RCVHWM, backlog)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        enable_keepalive(socket)
        self._guard.configure(socket)
        try:
            socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def refused(self) -> int:
        """Attempts to connect without the run's keys; a peer may try often."""
        return self._guard.refused

    def requests(self, more: Callable[[], bool] = lambda: True) -> Iterator[RpcRequest[M]]:
        """The requests that have arrived, while `more`, which is asked before each message is read."""
        while more() and (frames := self._socket.receive()) is not None:
            identity, *message = frames
            self.received += 1
            self.received_bytes += sum(map(len, message))
            try:
                request = wire.decode(self._request_type, message)
            except WireError as error:
                self.dropped += 1
                if self.dropped & (self.dropped - 1) == 0:
                    log.warning("%s dropped message %d that is no request: %s", self.name, self.dropped, error)
                continue
            yield RpcRequest(bytes(identity), request.number, request.message)

    def reply(self, identity: bytes, number: int, message: Any) -> None:
        """Reply to request `number` of the connection `identity`; nothing for a one-way message."""
        if number != ONE_WAY:
            self._socket.send([identity, *wire.encode(RpcMessage(number, message))])

    def reply_all(self, replies: Iterable[tuple[bytes, int, Any]]) -> None:
        """Send replies of (identity, number, message)."""
        for identity, number, message in replies:
            self.reply(identity, number, message)

    async def poll(self, timeout_s: float | None = None) -> None:
        """Return when a message has arrived, after `timeout_s`, or at `wake`."""
        await self._socket.poll(timeout_s)

    def wake(self) -> None:
        """End the `poll` of this moment."""
        self._socket.wake()

    async def serve(self, handler: Callable[[RpcRequest[M]], Awaitable[Any]], waits_for: str) -> None:
        """Give each request to `handler`, one after the other, and reply with what it returns; None means that there is no reply
        yet. A handler that raises RequestRefused refuses; any other error ends the service. Runs until it is cancelled, as a wait
        for `waits_for`."""
        while True:
            for request in self.requests():
                try:
                    reply = await handler(request)
                except RequestRefused as error:
                    reply = RpcRefusal(error.reason)
                if reply is not None:
                    self.reply(request.identity, request.number, reply)
            with TrackedWait(self.name, waits_for):
                await self.poll()

    def close(self) -> None:
        """Stop listening. Queued replies have `LINGER_MS` to leave."""
        self._guard.close()
        self._socket.close()
        self._context.term()
