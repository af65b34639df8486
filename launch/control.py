"""The control channel of a running run: what `slipstream replicas` and `slipstream waits` ask and the supervisor answers.

Invariants:
- It listens on loopback only, and answers only who can read `control.json` of the run folder, which is the owner's alone.
- One request at a time: two commands never change the fleet together.
- No request can end a run.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import zmq
import zmq.asyncio

from ..curve import Keys
from ..errors import ConfigError, SlipstreamError, within
from .folder import in_use
from .roster import Listed
from .watchdog import RoleWait

if TYPE_CHECKING:
    from .replicas import Replicas

log = logging.getLogger(__name__)

FILE = "control.json"

ANSWER_S = 150.0
"""Longest wait for an answer: Ray may take its time to find room for a replica."""

T = TypeVar("T")


class Contact(msgspec.Struct, frozen=True):
    """What `control.json` holds.

    Attributes:
        pid: the supervisor's.
        address: ZeroMQ address of the channel.
        fleet: ZeroMQ address of the fleet's feed.
        key: what a request must know.
        keys: of the run, where it has any.
    """

    pid: int
    address: str
    fleet: str
    key: str
    keys: Keys | None = None


class Add(msgspec.Struct, frozen=True, tag=True):
    """Start `count` more replicas. Answered by `Accepted`."""

    count: int


class Remove(msgspec.Struct, frozen=True, tag=True):
    """Let replica `name` go. Answered by `Accepted`."""

    name: str


class Show(msgspec.Struct, frozen=True, tag=True):
    """What replicas are there? Answered by `Shown`."""


class Waits(msgspec.Struct, frozen=True, tag=True):
    """Who waits for what? Answered by `Told`."""


Wish = Add | Remove | Show | Waits


class Request(msgspec.Struct, frozen=True):
    key: str
    wish: Wish


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """It has begun: it concerns replicas `names`, and is in the fleet from `revision` on."""

    names: tuple[str, ...]
    revision: int


class Shown(msgspec.Struct, frozen=True, tag=True):
    replicas: tuple[Listed, ...]


class Told(msgspec.Struct, frozen=True, tag=True):
    """The oldest first."""

    waits: tuple[RoleWait, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why not, in one line."""

    why: str


Reply = Accepted | Shown | Told | Refused


class Control:
    """The supervisor's end; `waits` says what all roles wait for."""

    def __init__(
        self,
        run_dir: Path,
        replicas: Replicas,
        fleet_address: str,
        waits: Callable[[], Sequence[RoleWait]] = tuple,
        keys: Keys | None = None,
    ) -> None:
        self._keys = keys
        self._path = run_dir / FILE
        self._replicas = replicas
        self._fleet = fleet_address
        self._waits = waits

    async def serve(self) -> None:
        """Answer until it is cancelled; the contact lies in the run folder for as long."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.REP)
        socket.setsockopt(zmq.LINGER, 0)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        contact = Contact(os.getpid(), f"tcp://127.0.0.1:{port}", self._fleet, secrets.token_hex(16), self._keys)
        try:
            _write(self._path, contact)
            while True:
                frames = await socket.recv_multipart()
                await socket.send(msgspec.json.encode(await self._answer(frames[0], contact.key)))
        finally:
            self._path.unlink(missing_ok=True)
            socket.close()
            context.term()

    async def _answer(self, frame: bytes, key: str) -> Reply:
        try:
            request = msgspec.json.decode(frame, type=Request)
        except msgspec.MsgspecError as error:
            return Refused(f"not a request of this version of Slipstream: {error}")
        if not hmac.compare_digest(request.key.encode(), key.encode()):
            return Refused("that is not this run's key")
        try:
            return await self._carry_out(request.wish)
        except SlipstreamError as error:
            return Refused(str(error))
        except Exception as error:  # a wish that fails in a way that nobody foresaw must not end the run
            log.exception("%s failed", request.wish)
            return Refused(f"{type(error).__name__}: {error}")

    async def _carry_out(self, wish: Wish) -> Reply:
        match wish:
            case Add(count=count):
                if count < 1:
                    return Refused(f"{count} replicas cannot be added; allowed are 1 and more")
                names = await self._replicas.add(count)
            case Remove(name=name):
                await self._replicas.remove(name)
                names = [name]
            case Show():
                return Shown(tuple(self._replicas.listed()))
            case Waits():
                return Told(tuple(self._waits()))
        return Accepted(tuple(names), self._replicas.fleet.revision)


def contact(run_dir: Path) -> Contact:
    """How to reach the supervisor of the run in `run_dir`.

    Raises:
        ConfigError: there is no such run, or it does not run now.
    """
    held = in_use(run_dir)
    if not held and not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir} holds no run: there is no {run_dir / 'config.yaml'}")
    path = run_dir / FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Contact)
    except FileNotFoundError:
        raise ConfigError(
            f"{run_dir} is only starting or just ending; try again in a moment"
            if held
            else f"{run_dir} is not running; if it has not finished, `slipstream resume {run_dir}` continues it"
        ) from None
    except PermissionError:
        raise ConfigError(f"{path} may be read only by who started the run") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not of this version of Slipstream: {error}") from None
    if not held:
        raise ConfigError(
            f"{run_dir} is not running: its supervisor, process {found.pid}, was killed; "
            f"continue the run with `slipstream resume {run_dir}`"
        )
    return found


async def ask(where: Contact, wish: Wish, expected: type[T], *, who: str = "slipstream replicas") -> T:
    """The supervisor's answer to command `who`.

    Raises:
        ConfigError: it refused.
        DeadlineExceeded: it is silent.
    """
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(where.address)
    try:
        await socket.send(msgspec.json.encode(Request(where.key, wish)))
        frame = await within(
            ANSWER_S,
            asyncio.ensure_future(socket.recv()),
            who=who,
            waits_for=f"the supervisor, process {where.pid}",
            hint="is it stopped, or the run on another host?",
        )
    finally:
        socket.close()
        context.term()
    reply = msgspec.json.decode(frame, type=Reply)
    if isinstance(reply, expected):
        return reply
    raise ConfigError(reply.why if isinstance(reply, Refused) else f"the supervisor answered {type(reply).__name__}")


def _write(path: Path, contact: Contact) -> None:
    """The whole contact or none, readable by its owner alone."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(contact))
    new.replace(path)
