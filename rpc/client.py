"""The calling end of RPC: numbered requests over one DEALER socket, and one-way messages.

    client = RpcClient(address, "worker-0", "the buffer", Ack | LeaseReply, resend_s=5.0)
    lease = await client.request(RequestLease(...), LeaseReply, deadline_s=60.0)
    client.notify(Progress(...))            # no reply, never blocks

Invariants:
- Replies are matched by number; any number of requests may be under way at once, and one message may bring several replies. A reply
  to a finished request is ignored. A message that cannot be decoded fails the requests that it answers; all that
  are pending where not even their numbers can be read.
- With `resend_s` a request is sent again after that long without a reply, and at once when `trust` names the key of another process
  of the service, which must treat a repetition as the same request. A service that restarts meanwhile goes unnoticed. Without it
  a request is sent once.
- A deadline counts time in which this process could have received the reply: one that was stopped (SIGSTOP) waits on.
- Without a connection, requests that are resent wait in the caller and do not pile up; other messages queue in libzmq.
- A service whose key is not known yet, or that has another one after a restart, is connected to when `trust` names the key.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import zmq
import zmq.asyncio

from ..errors import DeadlineExceeded, RequestRefused, StateError, TrackedWait, WireError
from . import wire
from .security import KeyPair, configure_client, split_address
from .wire import (
    FRAME_LIMIT,
    LINGER_MS,
    ONE_WAY,
    AsyncSocket,
    Frame,
    RpcMessage,
    RpcRefusal,
    enable_keepalive,
    limit_loopback,
)

STEP_S = 5.0  # longest step by which a deadline is counted down
R = TypeVar("R")


class _Pending(NamedTuple):
    """A request without a reply yet."""

    request: str
    reply_type: type[Any]
    reply: asyncio.Future[Any]


class RpcClient:
    """A connection to the `RpcServer` at `address`. Create it in a running event loop; `close` it at the end.

    Args:
        address: see `security`; with an empty key it connects when `trust` is called.
        name: the caller, for error messages and `slipstream waits`.
        service: what the caller calls the other end, as in "the buffer".
        replies: the (union of) tagged structs that the service replies with.
        identity: the ZeroMQ identity that the service sees; None for a random one.
        resend_s: see above; None to send each request once.
        frame_limit: the service's, in bytes; a request above it is a WireError here. None for no limit.
        pair: the caller's keys, where they are not those of this process.
        context: shared by several clients, whose owner terminates it; None for one of its own.
    """

    def __init__(
        self,
        address: str,
        name: str,
        service: str,
        replies: Any,
        *,
        identity: bytes | None = None,
        resend_s: float | None = None,
        frame_limit: int | None = FRAME_LIMIT,
        pair: KeyPair | None = None,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        self.name = name
        self._address, key = split_address(address)
        self._pair = pair
        self._trusted = ""
        self._service = service
        self._reply_type: type[list[RpcMessage[Any]]] = list[RpcMessage[replies | RpcRefusal]]
        self._resend_s = resend_s
        self._frame_limit = frame_limit
        self._numbers = itertools.count(ONE_WAY + 1)
        self._pending: dict[int, _Pending] = {}
        self._pauses: set[asyncio.Future[bool]] = set()  # see `_pause`
        self._own_context = None if context is not None else zmq.asyncio.Context()
        socket = (context or self._own_context or zmq.asyncio.Context()).socket(zmq.DEALER)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.IMMEDIATE, int(resend_s is not None))
        enable_keepalive(socket)
        limit_loopback(socket, self._address)
        self._raw, self._socket = socket, AsyncSocket(socket)
        if key is None:
            socket.connect(self._address)
        else:
            self.trust(key)
        self._receiver = asyncio.create_task(self._receive(), name=f"replies of {service} to {name}")

    def trust(self, key: str) -> None:
        """Talk only to the process with the public key `key`; what was queued for another is dropped. Empty: it is not known."""
        if key == self._trusted:
            return
        if self._trusted:
            self._socket.disconnect(self._address)
            for pause in self._pauses:
                _end(pause, over=False)
        self._trusted = key
        if key:
            configure_client(self._raw, key, self._pair)
            self._socket.connect(self._address)

    async def request(
        self, message: Any, reply_type: type[R], deadline_s: float, *, waits_for: str = "", hint: str = ""
    ) -> R:
        """The reply to `message`, a `reply_type`. `deadline_s` may be infinite: then the wait ends with its caller.

        Raises:
            DeadlineExceeded: no reply within `deadline_s`; with `waits_for` and `hint`.
            RequestRefused: the service refused.
            StateError: the reply is of another type.
            WireError: the message is too large, or the reply cannot be decoded.
        """
        waits_for = waits_for or f"{self._service}'s answer to {type(message).__name__}"
        frames, reply = self._begin(message, reply_type)
        left, unsent, again = deadline_s, True, self._resend_s is not None
        with TrackedWait(self.name, waits_for, None if deadline_s == float("inf") else deadline_s):
            try:
                while not reply.done() and left > 0:
                    step, began, over = min(left, self._resend_s or STEP_S), time.monotonic(), True
                    if not (unsent or again) or self._try_send(frames):
                        unsent = False
                        over = await self._pause(reply, step)
                    else:
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(step):
                                while unsent := not self._try_send(frames):
                                    await self._socket.poll_send()
                                over = await self._pause(reply, step)
                    # By the step, not the clock, see above, unless it was cut short.
                    left -= step if over else min(step, time.monotonic() - began)
            finally:
                reply.cancel()
        if reply.cancelled():
            raise DeadlineExceeded(
                self.name, waits_for, deadline_s, hint or f"is {self._service} at {self._address} alive?"
            )
        return reply.result()

    def send(self, message: Any, reply_type: type[R]) -> asyncio.Future[R]:
        """Send a request now; the reply is in the future, which raises as `request` does but has no deadline. The caller cancels it
        to stop waiting. Requests of one client arrive in the order in which they were sent.

        Raises:
            zmq.Again: there is no room, or with `resend_s` no connection.
        """
        frames, reply = self._begin(message, reply_type)
        try:
            self._socket.send(frames)
        except zmq.Again:
            reply.cancel()
            raise
        return reply

    def notify(self, message: Any) -> bool:
        """Send a one-way message. Never blocks: returns False when there is no room for it."""
        return self._try_send(wire.encode(RpcMessage(ONE_WAY, message)))

    def close(self) -> None:
        """Stop receiving. Queued messages have `LINGER_MS` to leave."""
        self._receiver.cancel()
        self._socket.close()
        if self._own_context is not None:
            self._own_context.term()

    async def _pause(self, reply: asyncio.Future[Any], seconds: float) -> bool:
        """Until the reply is there, another process has the service, or `seconds` are over; whether they are. `asyncio.wait` for a
        future that all requests share would look at all of them for each."""
        loop = asyncio.get_running_loop()
        pause: asyncio.Future[bool] = loop.create_future()
        timer = loop.call_later(seconds, _end, pause)

        def replied(_: asyncio.Future[Any]) -> None:
            _end(pause, over=False)

        reply.add_done_callback(replied)
        self._pauses.add(pause)
        try:
            return await pause
        finally:
            timer.cancel()
            reply.remove_done_callback(replied)
            self._pauses.discard(pause)

    def _begin(self, message: Any, reply_type: type[R]) -> tuple[list[Frame], asyncio.Future[R]]:
        number = next(self._numbers)
        frames = wire.encode(RpcMessage(number, message))
        if self._frame_limit is not None and max(map(len, frames)) > self._frame_limit:
            raise WireError(f"a frame of {type(message).__name__} is above {self._frame_limit} bytes")
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        reply.add_done_callback(lambda _: self._pending.pop(number, None))
        self._pending[number] = _Pending(type(message).__name__, reply_type, reply)
        return frames, reply

    def _try_send(self, frames: Sequence[Frame]) -> bool:
        """Send now; False where there is no connection with room."""
        try:
            self._socket.send(frames)
        except zmq.Again:
            return False
        return True

    async def _receive(self) -> None:
        while True:
            while (frames := self._socket.receive()) is not None:
                self._resolve(frames)
            await self._socket.poll()

    def _resolve(self, frames: Sequence[Frame]) -> None:
        """Complete the requests that a message replies to. One that cannot be decoded fails these, and all that are pending where
        not even their numbers can be read."""
        try:
            replies = wire.decode(self._reply_type, frames)
        except WireError as error:
            for number in wire.numbers_of(frames) or list(self._pending):
                pending = self._pending.get(number)
                if pending is not None and not pending.reply.done():
                    pending.reply.set_exception(error)
            return
        for reply in replies:
            self._complete(reply)

    def _complete(self, reply: RpcMessage[Any]) -> None:
        pending = self._pending.get(reply.number)
        if pending is None or pending.reply.done():
            return
        if isinstance(reply.message, RpcRefusal):
            what = f"{self._service} refused {pending.request} of {self.name}"
            pending.reply.set_exception(RequestRefused(reply.message.reason, what))
        elif not isinstance(reply.message, pending.reply_type):
            found = type(reply.message).__name__
            pending.reply.set_exception(StateError(f"{self._service} answered {pending.request} with {found}"))
        else:
            pending.reply.set_result(reply.message)


def _end(pause: asyncio.Future[bool], *, over: bool = True) -> None:
    if not pause.done():
        pause.set_result(over)


class RpcNotifier:
    """One-way messages to the `RpcServer` at `address` from a thread without an event loop, which makes, uses and closes it. A
    context manager.

    Args:
        address: see `security`; its key is known.
        linger_ms: how long `close` waits for unsent messages to leave.

    Raises:
        zmq.ZMQError: the address is malformed.
    """

    def __init__(self, address: str, *, linger_ms: int = LINGER_MS) -> None:
        endpoint, key = split_address(address)
        self._context = zmq.Context()  # its own: it must not share the fate of another library's sockets
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        enable_keepalive(self._socket)
        try:
            if key is not None:
                configure_client(self._socket, key, None)
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise

    def __enter__(self) -> RpcNotifier:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def notify(self, message: Any) -> bool:
        """Queue `message`. Never blocks: returns False when there is no room for it."""
        try:
            self._socket.send_multipart(wire.encode(RpcMessage(ONE_WAY, message)), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close()
        self._context.term()
