"""The fleet: which replicas there are, where they listen, which policy version each serves, and how everybody knows.

    engine starts ──> supervisor: starting ──> the learner pushes and proves ──> supervisor: serving, version v
                                                                                     │
    workers and learner <──────────── every change, as a whole fleet ────────────────┘

Invariants:
- One process, the supervisor, decides what the fleet is; everybody else follows its feed and is never told a difference, always
  the whole.
- `serving` means proven: the learner has seen the replica's canary at `version` since its process started.
- A follower may miss snapshots, never the newest: it is sent to whoever begins to listen, and again every `REPEAT_S`.
- A frame that is no fleet, or an older one, changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from ..curve import Guard, Keys, join

log = logging.getLogger(__name__)

REPEAT_S = 5.0
"""Between repetitions of an unchanged fleet: one small frame, for a follower whose connection swallowed one."""

FAREWELL_MS = 500
"""How long the last snapshot may take to leave when the supervisor closes."""


class Seat(msgspec.Struct, frozen=True):
    """One replica.

    Attributes:
        name: `engine-0`, ...; never used again for another.
        url: `http://host:port`.
        incarnation: how often its process was started before; what was learnt of an earlier one is void.
        state: `starting`: no work yet. `serving`: takes requests. `draining`: takes none and will leave.
        version: the policy version served, None while starting.
        answers: its process has answered, so that weights can be pushed to it.
    """

    name: str
    url: str
    incarnation: int = 0
    state: Literal["starting", "serving", "draining"] = "starting"
    version: int | None = None
    answers: bool = False


class Fleet(msgspec.Struct, frozen=True):
    """All replicas; `revision` rises with every change."""

    revision: int
    seats: tuple[Seat, ...]

    def seat(self, name: str) -> Seat | None:
        """The replica called `name`."""
        return next((s for s in self.seats if s.name == name), None)


class FleetBoard:
    """The supervisor's end: shows the newest fleet to everybody who listens at `address`. Binds to a free port of `host`; `keys`
    are of the run, where it has any."""

    def __init__(self, host: str, keys: Keys | None = None) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._guard = Guard(self._context, keys)
        self._guard.protect(self._socket)
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # every new listener is heard of, not only the first
        self._socket.setsockopt(zmq.LINGER, FAREWELL_MS)
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._fleet = Fleet(0, ())
        self._changed = asyncio.Event()

    def show(self, fleet: Fleet) -> None:
        """From now on this is the fleet."""
        self._fleet = fleet
        self._changed.set()

    async def serve(self) -> None:
        """Send every change at once; runs until it is cancelled."""
        listener = asyncio.ensure_future(self._socket.recv())
        changed = asyncio.create_task(self._changed.wait(), name="fleet changed")
        try:
            while True:
                if changed.done():
                    self._changed.clear()
                    changed = asyncio.create_task(self._changed.wait(), name="fleet changed")
                if listener.done():
                    listener = asyncio.ensure_future(self._socket.recv())
                await self._socket.send(msgspec.json.encode(self._fleet))
                await asyncio.wait({listener, changed}, timeout=REPEAT_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listener.cancel()
            changed.cancel()

    async def close(self) -> None:
        """Say that nobody is left, and stop listening."""
        await self._socket.send(msgspec.json.encode(Fleet(self._fleet.revision + 1, ())))
        self._guard.close()
        self._socket.close()
        await asyncio.to_thread(self._context.term)


class FleetFeed:
    """Follows the fleet that the board at `address` shows. Use as an async context manager; `fleet` is the newest known,
    revision 0 before the first. `keys` are those of the run, if not this process's own."""

    def __init__(self, address: str, keys: Keys | None = None) -> None:
        self.fleet = Fleet(0, ())
        self._address = address
        self._keys = keys
        self._news = asyncio.Condition()

    async def __aenter__(self) -> FleetFeed:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.CONFLATE, 1)  # only the newest counts
        join(self._socket, self._keys)
        self._socket.connect(self._address)
        self._socket.subscribe(b"")
        self._reader = asyncio.create_task(self._read(), name="fleet feed")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.cancel()
        await asyncio.wait({self._reader})
        self._socket.close()
        self._context.term()

    async def changed(self, since: int) -> Fleet:
        """The newest fleet, as soon as its revision is above `since`. The caller sets the deadline."""
        return await self.until(lambda fleet: fleet.revision > since)

    async def until(self, condition: Callable[[Fleet], bool]) -> Fleet:
        """The first fleet seen from now on, the present one included, for which `condition` holds. The caller sets the deadline."""
        async with self._news:
            await self._news.wait_for(lambda: condition(self.fleet))
            return self.fleet

    async def __aiter__(self) -> AsyncIterator[Fleet]:
        """Every newest fleet, beginning with the present one; those in between are skipped."""
        fleet = await self.changed(0)
        while True:
            yield fleet
            fleet = await self.changed(fleet.revision)

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                fleet = msgspec.json.decode(frame, type=Fleet)
            except msgspec.MsgspecError as error:
                log.warning("dropped a frame that is no fleet: %s", error)
                continue
            if fleet.revision > self.fleet.revision:
                async with self._news:
                    self.fleet = fleet
                    self._news.notify_all()
