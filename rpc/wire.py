"""The wire: messages as a msgpack header and the raw bytes of every array behind it, and the ZeroMQ sockets that they travel on.

Invariants:
- Frame 0 is one format byte and the msgpack of a message; frame 1 + i is array i, in the order in which the header names them.
- No pickle. An array's dtype comes from the receiver's annotation, its length from its frame; a frame that does not fit is a
  WireError, never a crash.
- Decoded arrays are read-only views of the frames: decoding copies nothing, receiving copies frames below `KEEP_BYTES`.
- A socket is awaited by asyncio, and read and written without a future per message; TCP keepalive finds peers that are gone.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Sequence
from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec
import numpy as np
import zmq
import zmq.asyncio
from msgspec import Meta

from ..errors import WireError

FORMAT = b"\x09"  # first byte of every message. Raise it when a struct on the wire changes meaning.
# Bytes of one frame: the arrays of the longest trajectory, `buffer.trajectory.LENGTH_LIMIT` tokens of 9 bytes; fewer with experts.
FRAME_LIMIT = 36 << 20
ONE_WAY = 0  # number of a message that gets no reply
LINGER_MS = 500  # how long queued messages outlive their socket: libzmq aborts a process that drops half of a message
DISCONNECTED_S = 0.5  # longest wait for a connection to be taken down
# TCP probes a silent connection after this long, and closes it when the probe is not answered for as long again.
KEEPALIVE_S = 5
# How much the kernel holds of what is sent to a process of the same host. By itself it goes up to megabytes, for long ways through
# a network. Here they have left the processor's cache when they are read, which took a third of the receiver's time.
LOOPBACK, LOOPBACK_BYTES = "tcp://127.", 256 << 10
# As numbers: `|` of pyzmq's enums takes longer than the call.
USER_ID = "User-Id"  # libzmq's name of what `security.CurveServer` says of a message's sender
NOBLOCK, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
POLLIN = int(zmq.POLLIN)
# Smaller frames are copied when they are sent: pyzmq frees a frame that is not in another thread, which costs more.
COPY_BYTES = 128 << 10
# Larger frames stay where libzmq received them, and are sent on from there; smaller ones are copied, because libzmq may
# keep its whole input buffer for them.
KEEP_BYTES = 16 << 10
Frame = bytes | memoryview
M = TypeVar("M")


class RpcMessage(msgspec.Struct, Generic[M], frozen=True, array_like=True):
    """A request or a reply, which has the number of its request; `ONE_WAY` when there is no reply."""

    number: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    message: M


class RpcRefusal(msgspec.Struct, frozen=True, tag=True):
    """The reply to a request that the service does not carry out."""

    reason: str


def encode(message: Any) -> list[Frame]:
    """The frames of `message`; its arrays are not copied."""
    _call.arrays = arrays = []
    return [FORMAT + _encoder.encode(message), *arrays]


def decode(kind: type[M], frames: Sequence[Frame]) -> M:
    """The message in `frames`.

    Raises:
        WireError: the frames are not a message of this kind and format.
    """
    if not frames or bytes(frames[0][:1]) != FORMAT:
        found = bytes(frames[0][:1]).hex() if frames else "no frame"
        raise WireError(f"unknown wire format {found!r}; this side speaks {FORMAT.hex()}")
    _call.frames, _call.used = frames, set()
    try:
        message = _decoder(kind).decode(frames[0][1:])
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a {getattr(kind, '__name__', kind)}: {error}") from None
    if len(_call.used) != len(frames) - 1:
        raise WireError(f"{len(frames) - 1} array frames came, {len(_call.used)} are named in the header")
    return message


def number_of(frames: Sequence[Frame]) -> int:
    """The number of a request whose message may be anything; `ONE_WAY` where there is none."""
    return (_numbers(frames, _request_decoder) or [ONE_WAY])[0]


def numbers_of(frames: Sequence[Frame]) -> list[int]:
    """The numbers of the replies of one message, which may be anything; empty where there are none."""
    return _numbers(frames, _replies_decoder)


def _numbers(frames: Sequence[Frame], decoder: msgspec.msgpack.Decoder[Any]) -> list[int]:
    if not frames or bytes(frames[0][:1]) != FORMAT:
        return []
    try:
        found = decoder.decode(frames[0][1:])
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError, RecursionError):
        return []
    return [one.number for one in (found if isinstance(found, list) else [found])]


class _Call(threading.local):
    """What msgspec's hooks know of the `encode` or `decode` that this thread is in."""

    arrays: list[Frame]
    frames: Sequence[Frame]
    used: set[int]


_call = _Call()


def _to_index(value: Any) -> int:
    """Append an array to the frames; the header has its index."""
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"cannot encode {type(value)}")
    received = value.base
    if isinstance(received, memoryview) and received.nbytes == value.nbytes:
        _call.arrays.append(received)  # a whole frame, as it came
    else:
        _call.arrays.append(np.ascontiguousarray(value).view(np.uint8).data)
    return len(_call.arrays) - 1


def _from_index(annotation: Any, index: Any) -> np.ndarray:
    """A view of the frame that the header names."""
    frames, used = _call.frames, _call.used
    if not isinstance(index, int) or not 0 <= index < len(frames) - 1 or index in used:
        raise ValueError(f"bad array index {index!r}")
    used.add(index)
    dtype = _dtype(annotation)
    array = np.frombuffer(frames[index + 1], dtype=dtype)
    if dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
        raise ValueError("a bool is neither 0 nor 1")
    return array


_request_decoder = msgspec.msgpack.Decoder(RpcMessage[msgspec.Raw])
_replies_decoder = msgspec.msgpack.Decoder(list[RpcMessage[msgspec.Raw]])
_encoder = msgspec.msgpack.Encoder(enc_hook=_to_index)


@functools.lru_cache(256)
def _decoder(kind: type[Any]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_index)


@functools.cache
def _dtype(annotation: Any) -> np.dtype:
    return np.dtype(get_args(get_args(annotation)[1])[0])


# --- sockets --------------------------------------------------------------------------------------------------------


def enable_keepalive(socket: zmq.Socket | zmq.asyncio.Socket) -> None:
    """Have TCP detect a peer whose host or cable is gone. Call before `socket` is bound or connected.

    ZeroMQ's own heartbeats are not used: libzmq 4.3.5 aborts the process (`stream_engine_base.cpp`: `!_io_error`) when one is due
    on a broken connection from which nothing more can be read, for example while its socket is being closed.
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 1)
    socket.setsockopt(zmq.TCP_MAXRT, 2000 * KEEPALIVE_S)


def limit_loopback(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """Where `endpoint` is on this host's loopback, send little at a time. Call before `socket` is bound or connected to it."""
    if endpoint.startswith(LOOPBACK):
        socket.setsockopt(zmq.SNDBUF, LOOPBACK_BYTES)


class AsyncSocket:
    """One socket used twice: polled through asyncio, read and written directly. At most one task polls for input at a time.

    `sender` is the public key that the peer proved who sent the message received last; empty where the socket is not `guarded`.
    """

    def __init__(self, socket: zmq.asyncio.Socket, *, guarded: bool = False) -> None:
        self.sender = ""
        self._guarded = guarded
        self._awaited: Any = socket  # pyzmq types its `poll` as the poller's
        self._direct: zmq.Socket[bytes] = zmq.Socket.shadow(socket)
        self._polling: asyncio.Future[int] | None = None

    def send(self, frames: Sequence[Frame]) -> None:
        """Queue a message. Raises `zmq.Again` when there is no room for it."""
        send, last = self._direct.send, len(frames) - 1
        for i, frame in enumerate(frames):
            flags = MORE if i < last else NOBLOCK
            if isinstance(frame, memoryview) and isinstance(frame.obj, zmq.Frame) and frame.nbytes == len(frame.obj):
                send(frame.obj, flags, copy=False)
            else:
                send(frame, flags, copy=len(frame) < COPY_BYTES)
        polling = self._polling
        # A send may consume the wake-up that the poller waits for.
        if polling is not None and not polling.done() and self._events() & POLLIN:
            polling.set_result(POLLIN)

    def _events(self) -> int:
        """What can be done now, `POLLIN` and `POLLOUT`; to ask may consume the wake-up of pollers."""
        return int(self._direct.getsockopt(zmq.EVENTS))

    def receive(self) -> list[Frame] | None:
        """The next message; None when there is none."""
        receive = self._direct.recv
        frames: list[zmq.Frame] = []
        try:
            while not frames or frames[-1].more:  # `recv_multipart` asks the socket each time
                frames.append(receive(NOBLOCK, copy=False))
        except zmq.Again:
            return None
        if self._guarded:
            self.sender = str(frames[-1].get(USER_ID))
        return [f.bytes if len(f) < KEEP_BYTES else memoryview(f).toreadonly() for f in frames]  # type: ignore[arg-type]

    async def poll(self, timeout_s: float | None = None) -> None:
        """Return when a message can be received, or after `timeout_s`."""
        timeout_ms = None if timeout_s is None else max(1, int(1000 * timeout_s))
        polling: asyncio.Future[int] = self._awaited.poll(timeout_ms)
        self._polling = polling
        await polling

    def wake(self) -> None:
        """End the `poll` of this moment, as a message would."""
        if self._polling is not None and not self._polling.done():
            self._polling.set_result(0)

    async def poll_send(self) -> None:
        """Return when a message can be sent."""
        await self._awaited.poll(flags=zmq.POLLOUT)

    def connect(self, endpoint: str) -> None:
        self._direct.connect(endpoint)

    def disconnect(self, endpoint: str) -> None:
        """Drop the only connection, and what is queued for it. A thread of ZeroMQ takes it down, in a few milliseconds, and says
        nothing when it has: what is sent before that is lost."""
        self._direct.disconnect(endpoint)
        until = time.monotonic() + DISCONNECTED_S
        while self._events() & zmq.POLLOUT and time.monotonic() < until:
            time.sleep(DISCONNECTED_S / 1000)
        self.wake()

    def close(self) -> None:
        self._awaited.close()
