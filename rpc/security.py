"""CURVE keys of a run that spans hosts: only processes that hold them may connect to its sockets.

Invariants:
- The supervisor makes new keys at every start of the run and passes them to its processes in their environment.
- A guarded socket reads nothing from a peer that does not prove the run's client key, and counts the attempts that it refused.
- Without keys the run is on one host: sockets are plain, and bound to loopback.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

log = logging.getLogger(__name__)

VARIABLE = "SLIPSTREAM_KEYS"
# libzmq's events for a peer without CURVE, with another server's key, and with a client key that is not the run's.
HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
HANDSHAKE_MS = 10_000  # a peer that has not proved its key by then is disconnected
_numbers = itertools.count()


class Keys(msgspec.Struct, frozen=True):
    """Two CURVE key pairs in Z85: of the processes that bind, and of those that connect."""

    server: str
    server_secret: str
    client: str
    client_secret: str

    def __repr__(self) -> str:
        return "Keys(...)"  # logs must not show them

    def environment(self) -> dict[str, str]:
        """Environment variables for a process of the run."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def make_keys() -> Keys:
    """New keys."""
    pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
    return Keys(*(key.decode() for key in pairs))


def own_keys() -> Keys | None:
    """The keys of this process; None where the run is on one host."""
    text = os.environ.get(VARIABLE)
    return msgspec.json.decode(text, type=Keys) if text else None


def configure_client(socket: zmq.Socket | zmq.asyncio.Socket, keys: Keys | None = None) -> None:
    """Have `socket` prove `keys`, or those of this process, when it connects; does nothing without keys."""
    keys = keys or own_keys()
    if keys is not None:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.client)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.client_secret)


class CurveServer:
    """Guards sockets of one `context` with `keys`, or those of this process; does nothing without keys.

    `refused` counts refused attempts to connect; a peer may try often. Close it before the context is terminated. With keys it
    needs a running event loop.
    """

    def __init__(self, context: zmq.asyncio.Context, keys: Keys | None = None) -> None:
        self.refused = 0
        self._context = context
        self._keys = keys or own_keys()
        self._authenticator: AsyncioAuthenticator | None = None
        self._monitors: list[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket, asyncio.Task[None]]] = []

    def configure(self, socket: zmq.asyncio.Socket) -> None:
        """Let only peers that prove the run's client key connect to `socket`. Call before it is bound."""
        if self._keys is None:
            return
        if self._authenticator is None:
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.configure_curve_callback(credentials_provider=self)
            self._authenticator.start()
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self._keys.server)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self._keys.server_secret)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        address = f"inproc://refused-{next(_numbers)}"
        socket.monitor(address, HANDSHAKE_FAILURES)
        events = self._context.socket(zmq.PAIR)
        events.setsockopt(zmq.RCVHWM, 0)  # a full queue would block libzmq's own thread
        events.setsockopt(zmq.LINGER, 0)
        events.connect(address)
        self._monitors.append((socket, events, asyncio.create_task(self._count(events), name="refused connections")))

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether `key`, the public key that a peer proved, is the run's; called by the authenticator."""
        assert self._keys is not None
        return hmac.compare_digest(key, self._keys.client.encode())

    def close(self) -> None:
        """Stop guarding. The owners close the sockets."""
        for socket, events, task in self._monitors:
            task.cancel()
            if not socket.closed:
                socket.disable_monitor()
            events.close()
        self._monitors.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    async def _count(self, events: zmq.asyncio.Socket) -> None:
        while True:
            _, endpoint = await events.recv_multipart()
            self.refused += 1
            if (
                self.refused & (self.refused - 1) == 0
            ):  # at 1, 2, 4, ..., so that repeated attempts do not flood the log
                log.warning(
                    "refused %d connections at %s: peers without this run's keys", self.refused, endpoint.decode()
                )
