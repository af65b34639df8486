"""The learner's view of the fleet: a client of every replica that answers, and what became of the pushes to it.

    feed ──> Targets ──update──> publisher ──proven, fenced──> Targets ──> supervisor, by heartbeat

Invariants:
- A push goes only to replicas that have answered and do not leave. A process that was started anew is another replica.
- What is told of a push names the incarnation that it went to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..errors import DeadlineExceeded, within
from ..rollout.engine import Engine
from ..weightsync.fleet import Fleet, Seat
from ..weightsync.publisher import Publisher
from .heart import Heart


class Targets:
    """Keeps a publisher's replicas those of the fleet. `joined` is set whenever one of them serves nothing yet."""

    def __init__(self, make_engine: Callable[[Seat], Engine], heart: Heart) -> None:
        self.joined = asyncio.Event()
        self._make_engine = make_engine
        self._heart = heart
        self._fleet = Fleet(0, ())
        self._news = asyncio.Event()
        self._known: dict[str, tuple[int, Engine]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, publisher: Publisher, fleet: Fleet) -> None:
        """The fleet is now this."""
        old, self._known = self._known, {}
        for seat in fleet.seats:
            if not seat.answers or seat.state == "draining":
                continue
            incarnation, engine = old.get(seat.name, (-1, None))
            if engine is None or incarnation != seat.incarnation:
                engine = self._make_engine(seat)
            self._known[seat.name] = (seat.incarnation, engine)
            if seat.state == "starting":
                self.joined.set()
        self._fleet = fleet
        self._news.set()
        publisher.update([engine for _, engine in self._known.values()])
        kept = {id(engine) for _, engine in self._known.values()}
        for _, engine in old.values():
            if id(engine) not in kept:
                closing = asyncio.create_task(engine.close(), name=f"closing {engine.name}")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def wait_ready(self, seconds: float) -> bool:
        """True as soon as every replica answers; after `seconds` it is enough if one does.

        Raises:
            DeadlineExceeded: none does.
        """

        async def all_answer() -> None:
            while not self._fleet.seats or self._silent():
                self._news.clear()
                await self._news.wait()

        try:
            await within(
                seconds,
                all_answer(),
                who="the learner",
                waits_for="every replica to answer",
                hint=lambda: f"{', '.join(self._silent()) or 'the fleet'} did not; see logs/engine-*.log",
            )
        except DeadlineExceeded:
            if not self._known:
                raise
        return True

    def _silent(self) -> list[str]:
        return [seat.name for seat in self._fleet.seats if not seat.answers]

    def served(self, name: str, version: int) -> None:
        """A replica has proven that it serves `version`."""
        if name in self._known:
            self._heart.served(name, version, self._known[name][0])

    def lost(self, name: str, why: str) -> None:
        """A push did not reach a replica."""
        if name in self._known:
            self._heart.lost(name, self._known[name][0], why)

    async def close(self) -> None:
        """Close all clients."""
        known, self._known = self._known, {}
        await asyncio.gather(*self._closing, *(engine.close() for _, engine in known.values()))
