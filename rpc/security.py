"""CURVE keys: each process of a run has a pair of its own, and a guarded socket knows which role each key is of.

    launcher, on the role's host: new pair ──> private folder ──> role       the public key of the pair ──> supervisor ──> all

Invariants:
- A private key stays on its host, in a folder that only its user can read and that goes away with the process. Public keys travel.
- An address is `tcp://host:port#KEY`: KEY is the public key of the process that listens there, which a client demands of it. It is
  empty where the client learns it later, and again when that process is restarted (`RpcClient.trust`). Without `#` the socket is
  plain: of tests and benchmarks on one host.
- A guarded socket reads nothing from a peer that does not prove a key of its `PeerTable`, and counts the attempts that it refused.
  A message of a peer whose key has left the table since is dropped.
- A key that is not in the table yet has `GRACE_S` to get there; afterwards its process is refused, and tries again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from zmq.utils import z85

from ..common.owned_folders import PRIVATE_VARIABLE as VARIABLE
from ..errors import ConfigError, StateError

log = logging.getLogger(__name__)

FILE = "curve.json"  # the key pair, in a private folder
# libzmq's events for a peer without CURVE, with another server's key, and with a key that is not in the table.
HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
HANDSHAKE_MS = 10_000  # a peer that has not proved its key by then is disconnected, and connects again
GRACE_S = (
    2.0  # between a role's key and its first connection: the supervisor publishes the key before it starts the role
)
HELD = 1024  # connections with unknown keys that have this grace at once; more are refused at once
# Replies of ZAP (rfc.zeromq.org/spec/27). After 400 libzmq's client would never try again.
ACCEPTED, TRY_AGAIN = b"200", b"300"
ZAP_ADDRESS, ZAP_VERSION = "inproc://zeromq.zap.01", b"1.0"
_numbers = itertools.count()


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair in Z85."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"KeyPair({self.public!r}, ...)"  # logs must not show the secret


def make_pair() -> KeyPair:
    """A new pair."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def write_pair(folder: Path) -> KeyPair:
    """A new pair in the private folder `folder`, for the process whose `VARIABLE` names it."""
    pair = make_pair()
    file = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(msgspec.json.encode(pair))
    return pair


@functools.lru_cache(8)
def read_pair(folder: str) -> KeyPair:
    """The pair in a private folder. Raises ConfigError where it cannot be read."""
    try:
        return msgspec.json.decode(Path(folder, FILE).read_bytes(), type=KeyPair)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{VARIABLE}: {folder} holds no key pair of this user: {error}") from None


def own_pair() -> KeyPair | None:
    """The pair of this process; None where no launcher has made one."""
    folder = os.environ.get(VARIABLE)
    return read_pair(folder) if folder else None


def split_address(address: str) -> tuple[str, str | None]:
    """What ZeroMQ connects to, and the key of the process there: empty where it is not known yet, None where the socket is
    plain."""
    endpoint, guarded, key = address.partition("#")
    return endpoint, key if guarded else None


def configure_client(socket: zmq.Socket | zmq.asyncio.Socket, key: str, pair: KeyPair | None) -> None:
    """Have `socket` prove `pair`, by default that of this process, to the process with the public key `key` when it next connects.
    Raises StateError: this process has no pair."""
    pair = pair or own_pair()
    if pair is None:
        raise StateError(f"the socket at the other end is guarded, and this process has no key: {VARIABLE} is not set")
    socket.setsockopt_string(zmq.CURVE_SERVERKEY, key)
    socket.setsockopt_string(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt_string(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)


class PeerTable:
    """Which role each public key is of: who may connect to the sockets of this process."""

    def __init__(self, keys: Mapping[str, str] | None = None) -> None:
        self._roles: dict[str, str] = {}
        self.on_change: list[Callable[[], None]] = []
        self.update(keys or {})

    def update(self, keys: Mapping[str, str]) -> None:
        """`keys` by role replace all that were known."""
        self._roles = {key: role for role, key in keys.items()}
        for call in self.on_change:
            call()

    def role(self, key: str) -> str | None:
        """The role with this public key; None where it is not, or no longer, one of the run."""
        return self._roles.get(key)


class CurveServer:
    """Guards sockets of one `context`: only roles of `peers` may connect. `pair` is by default that of this process; without
    `peers` it does nothing.

    `refused` counts refused attempts to connect; a peer may try often. Make it in a running event loop, close it before the context
    is terminated.
    """

    def __init__(self, context: zmq.asyncio.Context, peers: PeerTable | None, pair: KeyPair | None = None) -> None:
        self.refused = 0
        self.peers = peers
        self._context = context
        self._pair = pair or (own_pair() if peers is not None else None)
        if peers is not None and self._pair is None:
            raise StateError(f"a guarded socket needs a key pair, and {VARIABLE} is not set")
        self._held: dict[bytes, tuple[list[bytes], str, asyncio.TimerHandle]] = {}
        self._handler: asyncio.Task[None] | None = None
        self._requests: zmq.asyncio.Socket | None = None
        self._monitors: list[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket, asyncio.Task[None]]] = []

    def address(self, endpoint: str) -> str:
        """What clients of a socket that is bound to `endpoint` are given."""
        return f"{endpoint}#{self._pair.public}" if self.peers is not None and self._pair is not None else endpoint

    def configure(self, socket: zmq.asyncio.Socket) -> None:
        """Let only the roles of the table connect to `socket`. Call before it is bound."""
        if self.peers is None or self._pair is None:
            return
        if self._requests is None:
            self._requests = self._context.socket(zmq.ROUTER)
            self._requests.setsockopt(zmq.LINGER, 0)
            self._requests.setsockopt(zmq.RCVHWM, 0)  # a full queue would block libzmq's own thread
            self._requests.bind(ZAP_ADDRESS)
            self._handler = asyncio.create_task(self._authenticate(self._requests), name="keys of peers")
            self.peers.on_change.append(self._recheck)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt_string(zmq.CURVE_PUBLICKEY, self._pair.public)
        socket.setsockopt_string(zmq.CURVE_SECRETKEY, self._pair.secret)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        address = f"inproc://refused-{next(_numbers)}"
        socket.monitor(address, HANDSHAKE_FAILURES)
        events = self._context.socket(zmq.PAIR)
        events.setsockopt(zmq.RCVHWM, 0)  # likewise
        events.setsockopt(zmq.LINGER, 0)
        events.connect(address)
        self._monitors.append((socket, events, asyncio.create_task(self._count(events), name="refused connections")))

    def close(self) -> None:
        """Stop guarding. The owners close the sockets."""
        for socket, events, task in self._monitors:
            task.cancel()
            if not socket.closed:
                socket.disable_monitor()
            events.close()
        self._monitors.clear()
        for _, _, timer in self._held.values():
            timer.cancel()
        self._held.clear()
        if self._requests is not None and self._handler is not None and self.peers is not None:
            self._handler.cancel()
            self.peers.on_change.remove(self._recheck)
            self._requests.close()
            self._requests = None

    async def _authenticate(self, requests: zmq.asyncio.Socket) -> None:
        """Answer libzmq's questions about the keys that peers have proved."""
        while True:
            *route, version, number, _, _, _, mechanism, key = await requests.recv_multipart()
            assert version == ZAP_VERSION
            assert mechanism == b"CURVE"
            self._hold([*route, version, number], z85.encode(key).decode())

    def _hold(self, envelope: list[bytes], key: str) -> None:
        assert self.peers is not None
        if self.peers.role(key) is not None:
            self._answer(envelope, ACCEPTED, key)
        elif len(self._held) >= HELD:
            self._answer(envelope, TRY_AGAIN, key)
        else:
            name = b"".join(envelope)
            timer = asyncio.get_running_loop().call_later(GRACE_S, self._refuse, name)
            self._held[name] = envelope, key, timer

    def _recheck(self) -> None:
        """The table has changed: accept those that were early."""
        assert self.peers is not None
        for name, (envelope, key, timer) in list(self._held.items()):
            if self.peers.role(key) is not None:
                timer.cancel()
                del self._held[name]
                self._answer(envelope, ACCEPTED, key)

    def _refuse(self, name: bytes) -> None:
        envelope, key, _ = self._held.pop(name)
        self._answer(envelope, TRY_AGAIN, key)

    def _answer(self, envelope: list[bytes], status: bytes, key: str) -> None:
        """Messages of an accepted peer carry its key as their user id."""
        user = key.encode() if status == ACCEPTED else b""
        assert self._requests is not None
        self._requests.send_multipart(
            [*envelope, status, b"", user, b""]
        )  # at once: a ROUTER drops what it cannot send

    async def _count(self, events: zmq.asyncio.Socket) -> None:
        while True:
            _, endpoint = await events.recv_multipart()
            self.refused += 1
            if (
                self.refused & (self.refused - 1) == 0
            ):  # at 1, 2, 4, ..., so that repeated attempts do not flood the log
                log.warning("refused %d connections at %s: no role of this run", self.refused, endpoint.decode())
