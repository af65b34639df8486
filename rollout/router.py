"""The router: takes requests of many episodes to the replicas of a fleet that changes under it.

    episodes ──generate──> Routing (who goes where, pure) ──> one engine client per incarnation of a replica
                              ^        ^
              fleet feed ─────┘        └── completions, failures, probes of suspect replicas

    who waits            for what                                       until
    a request            a replica with room and a recent version       rollout.request_s, its retries included
    a probe              a replica that failed a request                it computes again, is fenced, restarted or gone
    a retired replica    its last completions to end or break           GRACE_S, then they continue elsewhere

Invariants:
- Nobody looks again and again: a waiting request is woken by the fleet, by a completion that made room, or by a probe.
- A request that loses its replica continues elsewhere from the tokens it has: they go back to the session as a completion that
  ended by `abort`, and the session asks for the rest. Without any token it is tried again right here. The same goes for one
  whose replica was fenced, or let its deadline pass.
- A replica that failed or fell silent gets nothing before it has computed something: a server may say that it is well while the
  process that computes hangs.
- A request that a server refuses is its caller's fault, and no other replica is asked.
- A request whose caller was cancelled is no longer on any server when the caller hears of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence

from ..agents.base import Completion
from ..configs.schema import Partial
from ..errors import DeadlineExceeded, EngineError, within
from ..weightsync.fleet import Fleet, Seat
from .engine import Broken, Engine, Growing, Pressure, Refused, Sampling
from .routing import Ask, Grant, Routing

log = logging.getLogger(__name__)

AHEAD = 4
"""Requests of one worker on a replica beyond those that it decodes at once, so that a place that falls free is filled without a
round trip."""

PROBE_S = 0.25
"""Pause before the second probe in a row of one replica; the first is made at once, and each further pause is twice as long."""

BACKOFF_S = 8.0
"""Longest pause between two probes; and how long a replica must have been well for its next failure to count as its first."""

PROBE_IDS = (0, 0)
"""What a probe has scored: any prompt will do."""

GRACE_S = 0.4
"""How long the requests of a replica that left the fleet, or was fenced, may take to end or break by themselves. A process that
ends breaks its connections at once; only a host that vanished says nothing. Then they go on elsewhere with what has arrived."""

PRESSURE_S = 2.0
"""Longest wait for a replica to say how busy it is; a sample that is older says nothing."""

MakeEngine = Callable[[Seat], Engine]
"""A new client of the replica in this seat; the router closes it."""


class Link:
    """The client of one incarnation of one replica. `gone` is set when it is too late for its answers."""

    def __init__(self, seat: Seat, engine: Engine) -> None:
        self.seat = seat
        self.engine = engine
        self.calls: set[asyncio.Task[Completion]] = set()
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.probe: asyncio.Task[None] | None = None
        self.probes = 0
        self.well_at = 0.0

    def same(self, seat: Seat) -> bool:
        """Whether `seat` is still this process, and has not been fenced."""
        return (self.seat.incarnation, self.seat.url) == (seat.incarnation, seat.url) and seat.state != "starting"


class Flight:
    """A request on its way: the replica that has it, and what has arrived from there."""

    def __init__(self, ask: Ask, sampling: Sampling) -> None:
        self.ask = ask
        self.sampling = sampling
        self.link: Link | None = None
        self.growing = Growing()


class Router:
    """Spreads requests over the fleet. Use as an async context manager, and give it every new fleet by `update`.

    Args:
        make_engine: makes the client of a seat; called in the event loop when a seat serves for the first time.
        max_concurrent: sequences that a replica decodes at once. It gets at most `AHEAD` requests more, from each worker: routers
            of several workers know nothing of each other, and what is too much together queues in the server.
        request_s: longest wait for one completion, retries on other replicas included.
        start_s: longest wait in one probe for a replica to answer.
        partial: what a push does to requests under way. Only with `abort_resume` is one that was cut short no sign of trouble.
    """

    def __init__(
        self, make_engine: MakeEngine, *, max_concurrent: int, request_s: float, start_s: float, partial: Partial
    ) -> None:
        self.max_concurrent = max_concurrent
        self._make_engine = make_engine
        self._request_s = request_s
        self._start_s = start_s
        self._partial: Partial = partial
        self._routing = Routing(max_concurrent + AHEAD)
        self._links: dict[str, Link] = {}
        self._granted: dict[int, asyncio.Future[tuple[Grant, Link]]] = {}
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Router:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.update(Fleet(0, ()))
        self._closed = True
        await asyncio.gather(*self._closing)

    # --- the fleet ------------------------------------------------------------------------------------------------

    def update(self, fleet: Fleet) -> None:
        """The fleet is now this. Call in the event loop, with every snapshot of the feed in its order; returns at once."""
        if self._closed:
            return
        seats = {seat.name: seat for seat in fleet.seats}
        for name, link in list(self._links.items()):
            if name in seats and link.same(seats[name]):
                link.seat = seats[name]
            else:
                self._retire(self._links.pop(name))
        for name, seat in seats.items():
            if seat.state == "serving" and name not in self._links:
                self._links[name] = Link(seat, self._make_engine(seat))
        self._routing.follow(fleet)
        self._send()

    @property
    def serving(self) -> int:
        """Replicas that take requests."""
        return sum(place.serving for place in self._routing.places.values())

    @property
    def waiting(self) -> int:
        """Requests that wait here because no replica has room for them."""
        return self._routing.waiting

    async def pressure(self) -> list[Pressure]:
        """How busy each serving replica is that says so in time; one that cannot be reached is probed."""
        links = [link for name, link in self._links.items() if self._routing.places[name].serving]
        samples = await asyncio.gather(*(self._sample(link) for link in links))
        return [sample for sample in samples if sample is not None]

    async def _sample(self, link: Link) -> Pressure | None:
        try:
            async with asyncio.timeout(PRESSURE_S):
                return await link.engine.pressure()
        except (TimeoutError, DeadlineExceeded):
            return None  # a machine that is busy is slow to say so
        except EngineError as error:
            self._distrust(link, error)
            return None

    def _retire(self, link: Link) -> None:
        if link.probe is not None:
            link.probe.cancel()
        task = asyncio.create_task(self._close(link), name=f"closing {link.engine.name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, link: Link) -> None:
        if link.calls:
            await asyncio.wait(link.calls, timeout=GRACE_S)
        link.gone.set_result(None)
        if link.calls:
            await asyncio.wait(link.calls)  # each was cancelled by its request, which does not wait for it
        if link.probe is not None:
            await asyncio.wait({link.probe})
        with contextlib.suppress(EngineError):
            await link.engine.close()

    # --- the requests ---------------------------------------------------------------------------------------------

    def forget(self, episode_id: str) -> None:
        """The episode is over; nothing sticks to its replica any more."""
        self._routing.forget(episode_id)

    async def generate(
        self,
        episode_id: str,
        token_ids: Sequence[int],
        sampling: Sampling,
        oldest_version: int,
        *,
        lost: Callable[[Completion], None] = lambda completion: None,
    ) -> Completion:
        """One completion, or the beginning of one (`abort`, one token or more), from a replica at `oldest_version` or later.

        `lost` is given what had arrived when the caller was cancelled: it will never see it.

        Raises:
            DeadlineExceeded: not one token came within `request_s`.
            Refused: a server does not take such a request.
            PolicyError: no engine would take such a request.
        """
        ask = Ask(next(self._numbers), episode_id, tuple(token_ids), sampling.max_tokens, oldest_version)
        flight = Flight(ask, sampling)
        try:
            return await within(
                self._request_s,
                self._generate(flight),
                who=f"episode {episode_id}",
                waits_for=f"a completion at version {oldest_version} or later",
                hint=lambda: f"replicas: {self._describe()}; see their logs, or raise rollout.request_s",
            )
        except DeadlineExceeded as error:
            if flight.link is not None:
                self._distrust(flight.link, error)
            if not flight.growing.partial.token_ids:
                raise
            return flight.growing.partial
        except asyncio.CancelledError:
            lost(flight.growing.partial)
            raise

    async def _generate(self, flight: Flight) -> Completion:
        while True:
            flight.link, flight.growing = None, Growing()
            grant, link = await self._grant(flight.ask)
            flight.link = link
            try:
                completion = await self._call(link, flight, grant.version)
                self._account(link, flight.ask, completion)
            except Refused:
                raise
            except Broken as error:
                self._distrust(link, error)
                completion = error.partial
            except DeadlineExceeded as error:
                self._distrust(link, error)
                completion = flight.growing.partial
            except EngineError as error:  # nothing that came with an impossible answer is to be trusted
                self._distrust(link, error)
                continue
            finally:
                self._routing.leave(flight.ask.number)
                self._send()
            if completion.token_ids or completion.finish_reason != "abort":
                return completion

    async def _grant(self, request: Ask) -> tuple[Grant, Link]:
        """Wait for a replica."""
        granted = asyncio.get_running_loop().create_future()
        self._granted[request.number] = granted
        self._routing.ask(request)
        self._send()
        try:
            return await granted
        except asyncio.CancelledError:
            self._routing.leave(request.number)  # also when it was granted and nobody came to fetch it
            self._send()
            raise
        finally:
            self._granted.pop(request.number, None)

    def _send(self) -> None:
        """Grant what can be granted."""
        for grant in self._routing.grants():
            granted = self._granted.pop(grant.number)
            if not granted.done():
                granted.set_result((grant, self._links[grant.replica]))

    async def _call(self, link: Link, flight: Flight, version: int) -> Completion:
        """Have `link` generate; Broken when it left the fleet or was fenced."""
        call = asyncio.create_task(
            link.engine.generate(flight.ask.token_ids, flight.sampling, version=version, growing=flight.growing)
        )
        link.calls.add(call)
        call.add_done_callback(link.calls.discard)
        call.add_done_callback(_look)
        try:
            await asyncio.wait({call, link.gone}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            call.cancel()
            await asyncio.wait({call})
            raise
        if call.done():
            return call.result()
        call.cancel()
        raise Broken(f"{link.engine.name} left the fleet", flight.growing.partial)

    def _account(self, link: Link, request: Ask, completion: Completion) -> None:
        """Remember what `completion` tells about its replica."""
        cut = completion.finish_reason == "abort"
        version = completion.version_spans[-1].version if completion.version_spans else None
        self._routing.finished(request.number, completion.token_ids, version, cut=cut)
        if cut and (self._partial != "abort_resume" or not completion.token_ids):
            self._distrust(link, "it cut a request short")

    # --- replicas that failed -------------------------------------------------------------------------------------

    def _distrust(self, link: Link, why: object) -> None:
        """Send nothing there until a probe finds it well; a replica that is on its way out is nobody's worry."""
        name = link.seat.name
        if self._links.get(name) is not link or link.seat.state == "draining":
            return
        self._routing.suspect(name)
        if link.probe is None or link.probe.done():
            log.warning("%s failed: %s", name, why)
            if asyncio.get_running_loop().time() > link.well_at + BACKOFF_S:
                link.probes = 0
            link.probe = asyncio.create_task(self._probe(link), name=f"probe of {name}")

    async def _probe(self, link: Link) -> None:
        while True:
            if link.probes:
                await asyncio.sleep(min(BACKOFF_S, PROBE_S * 2 ** (link.probes - 1)))
            link.probes += 1
            try:
                await link.engine.wait_ready(self._start_s)
                version = await link.engine.version()
                well = version is not None and (link.seat.version is None or version >= link.seat.version)
                if well:
                    await link.engine.score(PROBE_IDS)
            except (EngineError, DeadlineExceeded) as error:
                log.warning("%s is away: %s", link.seat.name, error)
                continue
            if well:
                link.well_at = asyncio.get_running_loop().time()
                self._routing.recovered(link.seat.name)
                self._send()
                return

    def _describe(self) -> str:
        states = [
            f"{name} {'fails' if p.suspect else p.seat.state} at version {p.seat.version} with {len(p.tokens)} requests"
            for name, p in self._routing.places.items()
        ]
        return f"{', '.join(states) or 'none'}; {self.waiting} requests wait"


def _look(call: asyncio.Task[Completion]) -> None:
    """Take note of an error that nobody waits for any more."""
    if not call.cancelled():
        call.exception()
