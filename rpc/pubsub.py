"""Publish/subscribe of one state: every subscriber gets the newest snapshot, whole.

    publisher.publish(state) ──XPUB──> every subscriber: `state`, `changed`, `until`, `async for`

Invariants:
- The `revision` of a state rises with every change. A message is a whole state, or what has changed since the whole state that was
  sent last: a push to a thousand replicas does not send their names and addresses again.
- A subscriber may miss snapshots, never the newest: the whole state is sent on every subscription, and what has changed since, or
  that nothing has, every `REPEAT_S`. One that lacks the whole state subscribes again, at most every `REPEAT_S`.
- Sending takes about `SHARE` of a core, however large the state is and however many follow it: after each snapshot the publisher
  waits in proportion to its cost, at most `PAUSE_S`, and then sends what is the newest, to all that have subscribed meanwhile.
- A subscriber ignores a frame that it cannot decode and a revision that is not newer than its own.
- Of what peers send, only a subscription counts: anything else is dropped and counted, a frame above `SUBSCRIPTION_BYTES` costs its
  sender the connection.
- A guarded publisher sends nothing to a peer whose key is not in its table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec
import zmq
import zmq.asyncio

from ..common.bounded import Count
from ..errors import WireError
from . import wire
from .security import CurveServer, KeyPair, PeerTable, configure_client, split_address

log = logging.getLogger(__name__)
REPEAT_S = 5.0  # between repetitions of an unchanged state: a few bytes, for a subscriber whose connection lost a frame
SUBSCRIPTION_BYTES = 4096  # of one message, those of the CURVE handshake included
SUBSCRIBE, UNSUBSCRIBE = b"\x01", b"\x00"  # what libzmq says of a subscriber to everything
SHARE = 0.02  # of one core
MESSAGE_S, BYTE_S = (
    20e-6,
    5e-9,
)  # CPU of a snapshot for each subscriber, and for each byte to it: encryption and system calls
PAUSE_S = 1.0  # longest between two snapshots of a state that changes: what a request may be late by
COMPRESSED = b"\x88"  # first byte of a frame whose rest, inflated, is a frame of `wire`
CHANGES = b"\x89"  # first byte of a frame whose rest is the msgpack of `StateChanges`
COMPRESS_BYTES = 4096  # longer states are sent so: names and addresses of many replicas take a tenth
CLOSE_LINGER_MS = 500  # how long the last snapshot may take to leave when the publisher closes


class Revisioned(Protocol):
    """A msgspec struct with a revision number; published ones start at 1."""

    @property
    def revision(self) -> int: ...


S = TypeVar("S", bound=Revisioned)


@runtime_checkable
class Incremental(Protocol):
    """A state that can say what has changed in it. One that cannot is sent whole whenever it changes."""

    def changes_since(self, whole: Any) -> bytes | None:
        """What is different in this state from `whole`, an earlier one; None where that is best sent whole."""

    def with_changes(self, revision: int, changes: bytes) -> Any:
        """The state with the number `revision` of which `changes_since(self)` gave `changes`. Raises WireError."""


class StateChanges(msgspec.Struct, frozen=True, array_like=True):
    """The state `revision`: the one with the revision `whole`, which was sent whole, and `changes`, empty where it is that one."""

    whole: Count
    revision: Count
    changes: bytes


class StatePublisher(Generic[S]):
    """Publishes the newest state at `address`; a port `*` is a free one, and `address` is then what subscribers connect to. With
    `peers` the socket is guarded by `pair`, by default that of this process."""

    def __init__(self, address: str, state: S, peers: PeerTable | None = None, pair: KeyPair | None = None) -> None:
        self.state = state
        self.dropped = 0  # messages that were no subscription
        self._subscribers = 0
        self._whole: S | None = None  # that all subscribers have; None where there is a new one
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._guard = CurveServer(self._context, peers, pair)
        self._guard.configure(self._socket)
        self._socket.setsockopt(zmq.MAXMSGSIZE, SUBSCRIPTION_BYTES)
        self._socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # report every subscription and its end
        self._socket.setsockopt(zmq.LINGER, CLOSE_LINGER_MS)
        wire.enable_keepalive(self._socket)
        self._socket.bind(address)
        self.address = self._guard.address(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self._changed = asyncio.Event()

    def publish(self, state: S) -> None:
        """Replace the state; `serve` sends it."""
        self.state = state
        self._changed.set()

    async def serve(self) -> None:
        """Send every change at once; runs until it is cancelled."""
        subscribed = asyncio.ensure_future(self._socket.recv())
        changed = asyncio.create_task(self._changed.wait(), name="state changed")
        try:
            while True:
                if changed.done():
                    self._changed.clear()
                    changed = asyncio.create_task(self._changed.wait(), name="state changed")
                size = await self._send(self.state)
                free = time.monotonic() + self._pause_s(size)
                due, wanted = free + REPEAT_S, False
                while (left := (free if wanted else due) - time.monotonic()) > 0:
                    awaited = {subscribed} if changed.done() else {subscribed, changed}
                    await asyncio.wait(awaited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                    if subscribed.done():
                        wanted = self._count(subscribed.result()) or wanted
                        subscribed = asyncio.ensure_future(self._socket.recv())
                    wanted = wanted or changed.done()
        finally:
            subscribed.cancel()
            changed.cancel()

    def _pause_s(self, size: int) -> float:
        """How long the state of `size` bytes that was sent now must be the newest."""
        return min(PAUSE_S, self._subscribers * (MESSAGE_S + size * BYTE_S) / SHARE)

    def _count(self, message: bytes) -> bool:
        """Take in what a peer sent; whether it is a subscription."""
        if message == SUBSCRIBE:
            self._subscribers += 1
            self._whole = None
        elif message == UNSUBSCRIBE:
            self._subscribers = max(0, self._subscribers - 1)
        else:
            self._drop()
        return message == SUBSCRIBE

    def _drop(self) -> None:
        self.dropped += 1
        if self.dropped & (self.dropped - 1) == 0:
            log.warning("%s dropped message %d that is no subscription", self.address, self.dropped)

    async def close(self, last: S | None = None) -> None:
        """Send `last` to all subscribers, then close the socket."""
        if last is not None:
            await self._send(last)
        self._guard.close()
        self._socket.close()
        await asyncio.to_thread(self._context.term)

    async def _send(self, state: S) -> int:
        """Send a snapshot; returns its bytes."""
        frame = None if self._whole is None else _encode_changes(self._whole, state)
        if frame is None:
            self._whole, frame = state, encode_state(state)
        await self._socket.send(frame)
        return len(frame)


class StateSubscriber(Generic[S]):
    """Follows the state published at `address`; an async context manager.

    Args:
        state: the state before the first snapshot; also gives the type. Its revision is 0, or that of a snapshot known already.
        pair: by default that of this process.
    """

    def __init__(self, address: str, state: S, pair: KeyPair | None = None) -> None:
        self.state = state
        self._address, self._key = split_address(address)
        self._pair = pair
        self._condition = asyncio.Condition()
        self._whole: S | None = None  # that was received last
        self._asked_at = 0.0

    async def __aenter__(self) -> StateSubscriber[S]:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        wire.enable_keepalive(self._socket)
        if self._key is not None:
            configure_client(self._socket, self._key, self._pair)
        self._socket.connect(self._address)
        self._socket.subscribe(b"")
        self._asked_at = time.monotonic()
        self._reader = asyncio.create_task(self._read(), name="state subscriber")
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._reader.cancel()
        await asyncio.wait({self._reader})
        self._socket.close()
        self._context.term()

    async def changed(self, since: int) -> S:
        """The newest state, as soon as its revision is above `since`. The caller sets the deadline."""
        return await self.until(lambda state: state.revision > since)

    async def until(self, condition: Callable[[S], bool]) -> S:
        """The first state from now on, the present one included, for which `condition` holds. The caller sets the deadline."""
        async with self._condition:
            await self._condition.wait_for(lambda: condition(self.state))
            return self.state

    async def __aiter__(self) -> AsyncIterator[S]:
        """Each newest state, from the first one received; states in between are skipped."""
        state = await self.changed(0)
        while True:
            yield state
            state = await self.changed(state.revision)

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                state = self._take(frame)
            except WireError as error:
                log.warning("dropped a frame of %s: %s", self._address, error)
                continue
            if state is not None and state.revision > self.state.revision:
                async with self._condition:
                    self.state = state
                    self._condition.notify_all()

    def _take(self, frame: bytes) -> S | None:
        """The state that a frame brings; None where it brings none, or one whose whole state is not here. Raises WireError."""
        if frame[:1] != CHANGES:
            self._whole = decode_state(type(self.state), frame)
            return self._whole
        message = _decode_changes(frame)
        if message.revision <= self.state.revision:
            return None
        if self._whole is None or self._whole.revision != message.whole:
            self._ask()
            return None
        if not isinstance(self._whole, Incremental):
            raise WireError(f"changes of a {type(self._whole).__name__}, which is always sent whole")
        return self._whole.with_changes(message.revision, message.changes)

    def _ask(self) -> None:
        """Have the whole state sent."""
        now = time.monotonic()
        if now - self._asked_at >= REPEAT_S:
            self._asked_at = now
            self._socket.unsubscribe(b"")
            self._socket.subscribe(b"")


@contextlib.asynccontextmanager
async def following(
    address: str, state: S, update: Callable[[S], None], name: str
) -> AsyncIterator[StateSubscriber[S]]:
    """Passes the newest state published at `address` to `update` on every change, in a task called `name`. A failure of `update`
    ends the context. `state` is the one before the first snapshot."""

    async def follow(states: StateSubscriber[S]) -> None:
        async for newest in states:
            update(newest)

    async with StateSubscriber(address, state) as states, asyncio.TaskGroup() as tasks:
        task = tasks.create_task(follow(states), name=name)
        try:
            yield states
        finally:
            task.cancel()


def _encode_changes(whole: Revisioned, state: Revisioned) -> bytes | None:
    """The frame that makes `state` of `whole`; None where `state` is to be sent whole."""
    changes: bytes | None = None
    if state.revision == whole.revision:
        changes = b""
    elif isinstance(state, Incremental):
        changes = state.changes_since(whole)
    if changes is None:
        return None
    return CHANGES + msgspec.msgpack.encode(StateChanges(whole.revision, state.revision, changes))


def _decode_changes(frame: bytes) -> StateChanges:
    """Raises WireError."""
    try:
        return msgspec.msgpack.decode(frame[1:], type=StateChanges)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"these are no changes: {error}") from None


def encode_state(state: Any) -> bytes:
    """The frame of a whole state."""
    (frame,) = wire.encode(state)
    return COMPRESSED + zlib.compress(frame, 1) if len(frame) > COMPRESS_BYTES else bytes(frame)


def decode_state(kind: type[S], frame: bytes) -> S:
    """The whole state in `frame`. Raises WireError."""
    if frame[:1] == COMPRESSED:
        inflating = zlib.decompressobj()
        try:
            frame = inflating.decompress(frame[1:], wire.FRAME_LIMIT)
        except zlib.error as error:
            raise WireError(f"a snapshot cannot be inflated: {error}") from None
        if not inflating.eof:
            raise WireError(f"a snapshot is cut off, or above {wire.FRAME_LIMIT} bytes")
    return wire.decode(kind, [frame])
