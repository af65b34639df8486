"""Who may connect to the sockets of a run that spreads over hosts: whoever holds the keys that were made for it.

Invariants:
- The supervisor makes the keys, new ones at every start of the run; they travel in the environment of its processes.
- A guarded socket reads nothing of a peer that does not prove the run's client key; it counts those that it turned away.
- Where a process has no keys the run is on one host: sockets are plain, and bound to loopback.
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

TURNED_AWAY = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
"""What libzmq says of a peer without CURVE, with keys of another server, and with a client key that is not ours."""

HANDSHAKE_MS = 10_000
"""A peer that has not proven itself by then is cut off."""

_numbers = itertools.count()


class Keys(msgspec.Struct, frozen=True):
    """Two CURVE key pairs in Z85: of the processes that listen, and of those that connect."""

    server: str
    server_secret: str
    client: str
    client_secret: str

    def __repr__(self) -> str:
        return "Keys(...)"  # not for logs

    def environment(self) -> dict[str, str]:
        """What to add to the environment of a process of the run."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def make_keys() -> Keys:
    """New keys."""
    pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
    return Keys(*(key.decode() for key in pairs))


def own_keys() -> Keys | None:
    """The keys of this process; None where the run is on one host."""
    text = os.environ.get(VARIABLE)
    return msgspec.json.decode(text, type=Keys) if text else None


def join(socket: zmq.Socket | zmq.asyncio.Socket, keys: Keys | None = None) -> None:
    """Have `socket`, before it connects, prove itself by `keys`, or else by those of this process; nothing where there are none."""
    keys = keys or own_keys()
    if keys is not None:
        socket.setsockopt_string(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, keys.client)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, keys.client_secret)


class Guard:
    """Guards sockets of one `context` by `keys`, or else by those of this process; does nothing where there are none.

    `refused` counts the attempts to connect that were turned away; a peer may try often. Close it before the context ends. Where
    there are keys it needs a running event loop.
    """

    def __init__(self, context: zmq.asyncio.Context, keys: Keys | None = None) -> None:
        self.refused = 0
        self._context = context
        self._keys = keys or own_keys()
        self._authenticator: AsyncioAuthenticator | None = None
        self._watches: list[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket, asyncio.Task[None]]] = []

    def protect(self, socket: zmq.asyncio.Socket) -> None:
        """From here on only who proves the run's client key gets through to `socket`. Call before it is bound."""
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
        address = f"inproc://turned-away-{next(_numbers)}"
        socket.monitor(address, TURNED_AWAY)
        watch = self._context.socket(zmq.PAIR)
        watch.setsockopt(zmq.RCVHWM, 0)  # a full queue would hold up libzmq's own thread
        watch.setsockopt(zmq.LINGER, 0)
        watch.connect(address)
        self._watches.append((socket, watch, asyncio.create_task(self._count(watch), name="strangers")))

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the peer that proved the public key `key` is of the run; the authenticator asks."""
        assert self._keys is not None
        return hmac.compare_digest(key, self._keys.client.encode())

    def close(self) -> None:
        """Guard no longer. The sockets stay to their owners."""
        for socket, watch, task in self._watches:
            task.cancel()
            if not socket.closed:
                socket.disable_monitor()
            watch.close()
        self._watches.clear()
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    async def _count(self, watch: zmq.asyncio.Socket) -> None:
        while True:
            _, endpoint = await watch.recv_multipart()
            self.refused += 1
            if self.refused & (self.refused - 1) == 0:  # at 1, 2, 4, ...: whoever knocks all the time fills no log
                log.warning(
                    "turned away %d times at %s: peers without this run's keys", self.refused, endpoint.decode()
                )
