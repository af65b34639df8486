"""The router: sends the requests of many episodes to the replicas of a fleet that changes meanwhile.

    episodes ──generate──> RoutingTable (which replica, pure) ──> one engine client per incarnation of a replica
                              ^        ^
             fleet updates ───┘        └── completions, failures, probes of failed replicas

    waiter               waits for                                      until
    a request            a replica with a slot and a recent version     `request_s` of the config, its retries included
    a probe              a replica that failed a request                it computes again, is fenced, restarted or removed
    a removed replica    its last completions                           GRACE_S, then they continue elsewhere

Invariants:
- No polling: a waiting request is woken by a fleet update, by a completion that freed a slot, or by a probe.
- A request that loses its replica continues elsewhere from the tokens it has: they return to the session as a completion that ended
  by `abort`, and the session requests the remainder. Without any token the router retries. The same holds for a request whose
  replica was fenced or exceeded its deadline.
- A replica that failed or stopped responding gets no requests before it has computed something: a server may report health while
  its compute process hangs.
- Who is late to say which versions exist, the buffer, is no failure of the replica whose reply waits for that.
- A false reply (`engines.http_engine`) counts against its replica, and none of its tokens is used: the router sends the request to
  another replica. One that goes on lying (`routing`) gets no requests any more; the supervisor is told, and restarts it.
- A request that a server rejects is the caller's error; no other replica is tried.
- When a cancelled caller gets control back, its request no longer runs on any server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
from collections.abc import Callable, Sequence

import msgspec

from ..agents.base import Completion
from ..common.bounded import TEXT_LENGTH
from ..common.images import PromptImage
from ..common.spans import time_of_day
from ..configs.schema import Partial
from ..errors import DeadlineExceeded, EngineError, with_deadline
from ..weightsync.fleet import FalseReplies, Fleet, ReplicaInfo
from .engines.base import EngineFailure, EngineLoad, FalseReply, PartialCompletion, RequestRejected, SamplingParams
from .engines.http_engine import HttpEngine
from .routing import AHEAD, ReplicaSuspicion, RouteRequest, RoutingTable

log = logging.getLogger(__name__)

PROBE_S = 0.25  # pause before the second probe in a row; the first runs at once, and each further pause doubles
BACKOFF_S = 8.0  # longest pause of probes; a failure of a replica that was healthy for longer counts as its first
PROBE_IDS = (0, 0)  # prompt that a probe scores: any will do
# How long the requests of a removed or fenced replica may take to end or fail. A process that exits breaks its connections at
# once; only a host that vanished sends nothing. Then the requests continue elsewhere with the tokens that have arrived.
GRACE_S = 0.4
SAMPLED = 32  # replicas that a router asks for their load in one round; of more it asks so many others each time
LOAD_S = 2.0  # longest wait for a replica to report its load; an older sample means nothing
MakeEngine = Callable[[ReplicaInfo], HttpEngine]  # creates a client of a replica; the router closes it


class ReplicaConnection:
    """The client of one incarnation of one replica, from when it begins to serve until a push leaves it out. `idle` is set while it
    has no request in flight."""

    def __init__(self, info: ReplicaInfo, engine: HttpEngine, suspicion: ReplicaSuspicion) -> None:
        self.info = info
        self.engine = engine
        self.in_flight = 0
        self.idle = asyncio.Event()
        self.idle.set()
        self.probe: asyncio.Task[None] | None = None
        self.probes = 0
        self.healthy_since = 0.0
        self.suspicion = suspicion
        self.load: EngineLoad | None = None  # when it was asked last; None where it did not report one

    async def generate(self, request: InflightRequest, version: int) -> Completion:
        self.in_flight += 1
        self.idle.clear()
        try:
            ids, sampling, images = request.route.token_ids, request.sampling, request.images
            growing = request.growing
            return await self.engine.generate(ids, sampling, version=version, growing=growing, images=images)
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()


class InflightRequest(msgspec.Struct):
    """A request: its sampling and images, the replica that has it, and the tokens that have arrived from there."""

    route: RouteRequest
    sampling: SamplingParams
    images: Sequence[PromptImage] = ()
    connection: ReplicaConnection | None = None
    growing: PartialCompletion = msgspec.field(default_factory=PartialCompletion)


class Router:
    """Spreads requests over the fleet. Use as an async context manager, and pass every new fleet to `update`.

    Args:
        make_engine: creates the client of a replica; called in the event loop when the replica serves for the first time.
        max_concurrent: sequences that a replica decodes at once. It gets at most `AHEAD` requests more from each worker: the
            routers of several workers share no state, and the excess queues in the server.
        request_s: longest wait for one completion, retries on other replicas included.
        start_s: longest wait of one probe for a replica to answer.
        partial: what a push does to requests in flight. Only with `abort_resume` an aborted request is no sign of a failure.
        report: receives what is known of the replicas that gave false replies, whenever that changes.
    """

    def __init__(
        self,
        make_engine: MakeEngine,
        *,
        max_concurrent: int,
        request_s: float,
        start_s: float,
        partial: Partial,
        report: Callable[[tuple[FalseReplies, ...]], None] = lambda replies: None,
    ) -> None:
        self.max_concurrent = max_concurrent
        self._make_engine = make_engine
        self._request_s = request_s
        self._start_s = start_s
        self._partial: Partial = partial
        self._report = report
        self._routing = RoutingTable(max_concurrent + AHEAD)
        self._connections: dict[str, ReplicaConnection] = {}
        self._assigned: dict[int, asyncio.Future[tuple[int, ReplicaConnection]]] = {}
        self._sampled = random.randrange(1 << 30)  # routers that start at once ask different replicas
        self._numbers = itertools.count()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> Router:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.update(Fleet())
        self._closed = True
        await asyncio.gather(*self._closing)

    def update(self, fleet: Fleet) -> None:
        """Take over a new fleet state. Call in the event loop, with every snapshot in order; returns at once."""
        if self._closed:
            return
        infos = {info.name: info for info in fleet.replicas}
        self._routing.update(fleet)
        for name, connection in list(self._connections.items()):
            info, known = infos.get(name), connection.info
            if info and (info.incarnation, info.url) == (known.incarnation, known.url) and info.state != "starting":
                connection.info = info
            else:  # removed, restarted or fenced
                self._retire(self._connections.pop(name))
        for name, info in infos.items():
            if info.state == "serving" and name not in self._connections:
                suspicion = self._routing.replicas[name].suspicion
                self._connections[name] = ReplicaConnection(info, self._make_engine(info), suspicion)
        self._dispatch()

    @property
    def serving(self) -> int:
        return sum(replica.serving for replica in self._routing.replicas.values())

    @property
    def waiting(self) -> int:
        """Requests that wait here because no replica has a free slot for them."""
        return self._routing.waiting

    @property
    def per_sample(self) -> float:
        """Serving replicas for each that `engine_loads` asks."""
        return max(1.0, self.serving / SAMPLED)

    async def engine_loads(self) -> list[EngineLoad]:
        """The load of each serving replica that reports it in time, of more than `SAMPLED` those whose turn it is; one that cannot
        be reached is probed."""
        serving = [c for name, c in self._connections.items() if self._routing.replicas[name].serving]
        if len(serving) > SAMPLED:
            first = self._sampled = self._sampled % len(serving)
            serving = [*serving[first:], *serving[:first]][:SAMPLED]
            self._sampled += SAMPLED
        return [sample for sample in await asyncio.gather(*map(self._sample, serving)) if sample is not None]

    def gauges(self, share: int = 0, shares: int = 1) -> dict[str, dict[str, float | None]]:
        """Of each replica that reported its load last: what it said, its version, and the requests of this router there. Of several
        routers each takes its share of the replicas, from 0. From any thread."""
        loaded = [(c, c.load) for _, c in sorted(self._connections.copy().items())[share::shares]]
        return {
            c.info.name: {
                **load.gauges(),
                "version": c.info.version,
                "sent": c.in_flight,
                "false": c.suspicion.count,
            }
            for c, load in loaded
            if load is not None
        }

    async def _sample(self, connection: ReplicaConnection) -> EngineLoad | None:
        load = None
        try:
            async with asyncio.timeout(LOAD_S):
                load = await connection.engine.get_load()
        except (TimeoutError, DeadlineExceeded):
            log.debug("%s does not report its load", connection.info.name)  # it may be busy, which is no failure
        except FalseReply as error:
            self._count_false_reply(connection, error)
        except EngineError as error:
            self._mark_failed(connection, error)
        connection.load = load
        return load

    def _retire(self, connection: ReplicaConnection) -> None:
        if connection.probe is not None:
            connection.probe.cancel()
        task = asyncio.create_task(self._close(connection), name=f"closing {connection.engine.name}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, connection: ReplicaConnection) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await connection.idle.wait()
        if connection.probe is not None:
            await asyncio.wait({connection.probe})
        with contextlib.suppress(EngineError):
            await connection.engine.close()  # what is still in flight ends with EngineFailure

    def end_episode(self, episode_id: str) -> None:
        self._routing.end_episode(episode_id)

    async def generate(
        self,
        episode_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        oldest_version: int,
        *,
        images: Sequence[PromptImage] = (),
        on_cancelled: Callable[[Completion], None] = lambda completion: None,
    ) -> Completion:
        """One completion, or the beginning of one (`abort`, one token or more), from a replica at `oldest_version` or later. When
        the caller is cancelled, `on_cancelled` receives the tokens that had arrived.

        Raises:
            DeadlineExceeded: not one token arrived within `request_s`.
            RequestRejected: a server rejects the request.
            PolicyError: no engine would accept the request.
        """
        asked = time_of_day()
        route = RouteRequest(next(self._numbers), episode_id, tuple(token_ids), sampling.max_tokens, oldest_version)
        request = InflightRequest(route, sampling, images)
        try:
            completion = await with_deadline(
                self._request_s,
                self._generate(request),
                who=f"episode {episode_id}",
                waits_for=f"a completion at version {oldest_version} or later",
                hint=self._describe,
            )
            return _asked_at(asked, completion)
        except DeadlineExceeded as error:
            if request.connection is not None and not request.growing.ended:
                self._mark_failed(request.connection, error)
            if not request.growing.partial.token_ids:
                raise
            return _asked_at(asked, request.growing.partial)
        except asyncio.CancelledError:
            on_cancelled(_asked_at(asked, request.growing.partial))
            raise

    async def _generate(self, request: InflightRequest) -> Completion:
        while True:
            request.connection, request.growing = None, PartialCompletion()
            version, connection = await self._acquire(request.route)
            request.connection = connection
            try:
                completion = await connection.generate(request, version)
                self._record(connection, request.route, completion)
                if connection.suspicion.count and connection.suspicion.add_true():
                    self._report_false_replies()
            except RequestRejected:
                raise
            except FalseReply as error:
                self._count_false_reply(connection, error)
                avoided = request.route.avoided | {connection.info.name}
                request.route = msgspec.structs.replace(request.route, avoided=avoided)
                continue
            except (EngineFailure, DeadlineExceeded) as error:
                if not request.growing.ended:
                    self._mark_failed(connection, error)
                completion = error.partial if isinstance(error, EngineFailure) else request.growing.partial
            except EngineError as error:  # not one token came
                self._mark_failed(connection, error)
                continue
            finally:
                self._routing.remove(request.route.number)
                self._dispatch()
            if completion.token_ids or completion.finish_reason != "abort":
                return completion

    async def _acquire(self, route: RouteRequest) -> tuple[int, ReplicaConnection]:
        assigned = asyncio.get_running_loop().create_future()
        self._assigned[route.number] = assigned
        self._routing.enqueue(route)
        self._dispatch()
        try:
            return await assigned
        except asyncio.CancelledError:
            self._routing.remove(route.number)  # also when a replica was assigned and this task had not run yet
            self._dispatch()
            raise
        finally:
            self._assigned.pop(route.number, None)

    def _dispatch(self) -> None:
        """Assign every request that can start, and wake its task."""
        for assignment in self._routing.assign():
            assigned = self._assigned.pop(assignment.number)
            if not assigned.done():
                assigned.set_result((assignment.version, self._connections[assignment.replica]))

    def _record(self, connection: ReplicaConnection, route: RouteRequest, completion: Completion) -> None:
        aborted = completion.finish_reason == "abort"
        version = completion.version_spans[-1].version if completion.version_spans else None
        self._routing.complete(route.number, completion.token_ids, version, aborted=aborted)
        if aborted and (self._partial != "abort_resume" or not completion.token_ids):
            self._mark_failed(connection, "it aborted a request")

    def _count_false_reply(self, connection: ReplicaConnection, error: FalseReply) -> None:
        connection.suspicion.add_false(str(error)[:TEXT_LENGTH])
        self._mark_failed(connection, error)
        self._report_false_replies()

    def _report_false_replies(self) -> None:
        known = [(r.info, r.suspicion) for r in self._routing.replicas.values() if r.suspicion.count]
        self._report(tuple(FalseReplies(i.name, i.incarnation, s.count, s.level, s.why) for i, s in known))

    def _mark_failed(self, connection: ReplicaConnection, why: object) -> None:
        """Send no request there until a probe passes, or never again where it is proven to lie: a probe would find it well.
        Failures of a replica that is draining or was removed are ignored."""
        name = connection.info.name
        if self._connections.get(name) is not connection or connection.info.state == "draining":
            return
        self._routing.set_failed(name, True)
        if connection.suspicion.proven:
            if connection.probe is not None:
                connection.probe.cancel()
            log.error("%s gets no more requests, it goes on lying; the last: %s", name, why)
        elif connection.probe is None or connection.probe.done():
            log.warning("%s failed: %s", name, why)
            if asyncio.get_running_loop().time() > connection.healthy_since + BACKOFF_S:
                connection.probes = 0
            connection.probe = asyncio.create_task(self._probe(connection), name=f"probe of {name}")

    async def _probe(self, connection: ReplicaConnection) -> None:
        """Return once the replica has computed scores at the version that the fleet state names."""
        while True:
            if connection.probes:
                await asyncio.sleep(min(BACKOFF_S, PROBE_S * 2 ** min(connection.probes - 1, 16)))
            connection.probes += 1
            try:
                await connection.engine.wait_ready(self._start_s)
                version, expected = await connection.engine.version(), connection.info.version
                if version is None or (expected is not None and version < expected):
                    log.info("%s has version %s, and is to have %s", connection.info.name, version, expected)
                    continue
                try:
                    await connection.engine.score(PROBE_IDS)
                except FalseReply as error:
                    self._count_false_reply(connection, error)  # which cancels this task where it proves a liar
                    continue
            except (EngineError, DeadlineExceeded) as error:
                log.warning("%s is away: %s", connection.info.name, error)
                continue
            connection.healthy_since = asyncio.get_running_loop().time()
            self._routing.set_failed(connection.info.name, False)
            self._dispatch()
            return

    def _describe(self) -> str:
        states = [
            f"{name} {'fails' if r.failed or r.suspicion.proven else r.info.state} at version {r.info.version}"
            f" with {len(r.tokens_in_flight)} requests"
            for name, r in self._routing.replicas.items()
        ]
        known = ", ".join(states) or "none"
        return f"replicas: {known}; {self.waiting} requests wait; see their logs, or raise rollout.episode_s"


def _asked_at(asked: float, completion: Completion) -> Completion:
    """With the time that it waited for a replica, requests that failed before included."""
    if completion.timing is None:
        return completion
    waited = max(0.0, completion.timing.asked - asked)
    timing = msgspec.structs.replace(completion.timing, asked=asked, queued_s=waited)
    return msgspec.structs.replace(completion, timing=timing)
