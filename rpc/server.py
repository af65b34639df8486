"""The serving end of RPC: one bound ROUTER socket, guarded by CURVE where it has a table of peers.

A simple service answers each request in turn:

    server = RpcServer("tcp://127.0.0.1:*", "supervisor", AddReplicas | GetStatus)
    await server.serve(handler, "the next command")       # until cancelled; server.address has the port

One that works in rounds, as the buffer does, reads what has arrived and replies when it can:

    for request in server.requests(): ...
    server.reply(request.identity, request.number, message)
    await server.poll(timeout_s)

Invariants:
- A message that is no request is dropped and counted, and logged at powers of two, so that a flood of them does not flood the log.
  Where its number can be read, its sender gets a refusal that says what is wrong with it.
- However many messages arrive, `arriving` and `serve` let the event loop turn after each `ROUND` of them.
- A request that the sender's role may not make is refused, or dropped where it expects no reply, and counted.
- Memory is bounded: `backlog` messages per connection wait to be read, then its sender waits; a peer that sends a frame above
  `frame_limit` is disconnected. One thing libzmq does not bound: a message of ever more frames that never ends. Only a role of
  the run can send one.
- A reply never blocks: a peer that does not read loses it, and asks again.
- A client that reconnects under its identity replaces its old connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

from ..errors import RequestRefused, TrackedWait, WireError
from . import wire
from .security import CurveServer, KeyPair, PeerTable, split_address
from .wire import FRAME_LIMIT, LINGER_MS, ONE_WAY, AsyncSocket, RpcMessage, RpcRefusal, enable_keepalive, limit_loopback

log = logging.getLogger(__name__)
NO_REQUEST = "that is no request"  # how the refusal of what cannot be decoded begins
REASON_LENGTH = 1000  # characters
ROUND = 256  # messages that are read before the event loop turns
BACKLOG = 64  # messages of one connection that wait to be read, after which its sender waits
M = TypeVar("M")


class RpcRequest(msgspec.Struct, Generic[M], frozen=True):
    """What a peer sent: its connection's identity, the request's number (`ONE_WAY`: no reply is expected), the message, and the
    role whose key the peer has proved; None where the socket is not guarded."""

    identity: bytes
    number: int
    message: M
    sender: str | None = None


class RpcServer(Generic[M]):
    """Bound when it is made, in a running event loop. `close` it at the end.

    Args:
        address: to bind; a port `*` is a free one. `address` is then what clients connect to.
        name: the service, for logs and `slipstream waits`.
        requests: the (union of) tagged structs that it accepts, one-way messages included.
        frame_limit: bytes; None for no limit.
        peers: who may connect; None for a plain socket.
        rights: by type of message the kinds of roles that may send it (`worker` for `worker-0`), None for every role of `peers`;
            others are refused, and what is not in it is refused to all.
        pair: the keys of the service, where they are not those of this process.

    Attributes:
        dropped: messages that were no request.
        forbidden: requests that the sender's role may not make, and messages of peers that are no role of the run any more.
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
        peers: PeerTable | None = None,
        rights: Mapping[type, Sequence[str] | None] | None = None,
        pair: KeyPair | None = None,
    ) -> None:
        self.name = name
        self.dropped = self.forbidden = self.received = self.received_bytes = 0
        self._request_type: type[RpcMessage[M]] = RpcMessage[requests]
        self._context = zmq.asyncio.Context()
        self._guard = CurveServer(self._context, peers, pair)
        self._peers, self._rights = peers, rights
        socket = self._context.socket(zmq.ROUTER)
        self._socket = AsyncSocket(socket, guarded=peers is not None)
        socket.setsockopt(zmq.MAXMSGSIZE, -1 if frame_limit is None else frame_limit)
        socket.setsockopt(zmq.RCVHWM, backlog)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        enable_keepalive(socket)
        self._guard.configure(socket)
        endpoint, _ = split_address(address)
        limit_loopback(socket, endpoint)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError:
            self.close()
            raise
        self.address = self._guard.address(socket.getsockopt_string(zmq.LAST_ENDPOINT))

    @property
    def refused(self) -> int:
        """Attempts to connect by peers that are no role of the run; one may try often."""
        return self._guard.refused

    def requests(self, more: Callable[[], bool] = lambda: True) -> Iterator[RpcRequest[M]]:
        """The requests that have arrived, while `more`, which is asked before each message is read."""
        while more() and (frames := self._socket.receive()) is not None:
            identity, *message = frames
            self.received += 1
            self.received_bytes += sum(map(len, message))
            sender = None
            if self._peers is not None and (sender := self._peers.role(self._socket.sender)) is None:
                self._forbid("a process that is no part of the run any more")
                continue
            try:
                request = wire.decode(self._request_type, message)
            except WireError as error:
                self.dropped += 1
                if self.dropped & (self.dropped - 1) == 0:
                    log.warning("%s dropped message %d that is no request: %s", self.name, self.dropped, error)
                if (number := wire.number_of(message)) != ONE_WAY:
                    self.reply(bytes(identity), number, RpcRefusal(f"{NO_REQUEST}: {error}"[:REASON_LENGTH]))
                continue
            if sender is not None and not self._may(sender, type(request.message)):
                name = type(request.message).__name__
                self._forbid(f"{name} of {sender}")
                self.reply(bytes(identity), request.number, RpcRefusal(f"{sender} has no right to {name}"))
                continue
            yield RpcRequest(bytes(identity), request.number, request.message, sender)

    def _may(self, sender: str, message: type) -> bool:
        if self._rights is None:
            return True
        kinds = self._rights.get(message, ())
        return kinds is None or sender.partition("-")[0] in kinds

    def _forbid(self, what: str) -> None:
        self.forbidden += 1
        if self.forbidden & (self.forbidden - 1) == 0:
            log.warning("%s refused request %d without the right to it: %s", self.name, self.forbidden, what)

    async def arriving(self, gather_s: float = 0.0) -> AsyncIterator[RpcRequest[M]]:
        """Every request as it arrives, without an end; after one those that follow it may wait for `gather_s`, and are then read
        together."""
        while True:
            begin = self.received
            end = begin + ROUND
            for request in self.requests(lambda end=end: self.received < end):
                yield request
            if self.received == end:
                await asyncio.sleep(0)
            elif self.received > begin and gather_s:
                await asyncio.sleep(gather_s)
            else:
                await self.poll()

    def reply(self, identity: bytes, number: int, message: Any) -> None:
        """Reply to request `number` of the connection `identity`; nothing for a one-way message."""
        self.reply_all([(identity, number, message)])

    def reply_all(self, replies: Iterable[tuple[bytes, int, Any]]) -> None:
        """Send replies of (identity, number, message). Those to one connection travel as one message, in their order: each message
        costs both ends system calls and wakes two threads."""
        to: dict[bytes, list[RpcMessage[Any]]] = {}
        for identity, number, message in replies:
            if number != ONE_WAY:
                to.setdefault(identity, []).append(RpcMessage(number, message))
        for identity, messages in to.items():
            self._socket.send([identity, *wire.encode(messages)])

    async def poll(self, timeout_s: float | None = None) -> None:
        """Return when a message has arrived, after `timeout_s`, or at `wake`."""
        await self._socket.poll(timeout_s)

    def wake(self) -> None:
        """End the `poll` of this moment."""
        self._socket.wake()

    async def serve(self, handler: Callable[[RpcRequest[M]], Awaitable[Any]], waits_for: str) -> None:
        """`answer` each request, one after the other; an error that does not refuse ends the service. Runs until it is cancelled,
        as a wait for `waits_for`."""
        while True:
            end = self.received + ROUND
            for request in self.requests(lambda end=end: self.received < end):
                await self.answer(request, handler)
            await asyncio.sleep(0)
            with TrackedWait(self.name, waits_for):
                await self.poll()

    async def answer(self, request: RpcRequest[M], handler: Callable[[RpcRequest[M]], Awaitable[Any]]) -> None:
        """Reply with what `handler` returns; None means that there is no reply yet: a task may `answer` later. A handler that
        raises RequestRefused refuses."""
        try:
            reply = await handler(request)
        except RequestRefused as error:
            reply = RpcRefusal(error.reason)
        if reply is not None:
            self.reply(request.identity, request.number, reply)

    def close(self) -> None:
        """Stop listening. Queued replies have `LINGER_MS` to leave."""
        self._guard.close()
        self._socket.close()
        self._context.term()
