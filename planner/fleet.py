"""The replicas of a simulation, who sends which request where, and how a push rolls over them. Pure.

    worker ──> its router ──> replica ──> its router ──> worker
                  ^
      push: cohort by cohort, transfer ─ pause ─ swap ──> every router learns the version, the run that all have it

Invariants:
- Up to `EXACT` replicas the product's own `RoutingTable` decides, one for each worker, as in a run. Beyond, a request goes to the
  better of two random replicas without its bookkeeping, as that table draws two in a large fleet (`routing.COMPARED`).
- A prefix is cached where the episode's last request was, as long as that replica serves the same version.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from ..rollout.concurrency import EngineLoad
from ..rollout.routing import AHEAD, RouteRequest, RoutingTable
from ..weightsync.fleet import Fleet, ReplicaInfo
from .engine import SimulatedReplica, SimulatedRequest
from .kernel import VirtualClock

EXACT = 16  # replicas up to which a request is compared on each of them; beyond it this would be most of the work
IDS = 2048  # most token ids of a request in a `RoutingTable`: of longer contexts each id stands for several tokens
ANY_LENGTH = 1 << 30  # no limit on a completion: the table expects the mean of those that it has seen


class SimulatedRouter(Protocol):
    """Sends one worker's requests; `waiting` of them have no replica yet."""

    @property
    def waiting(self) -> int: ...

    def send(self, episode: str, request: SimulatedRequest, oldest_version: int) -> None:
        """`request.complete` is called when it is done."""
        ...

    def completed(self, request: SimulatedRequest) -> None:
        """Call it for each, whole or cancelled, before the next request of its episode."""
        ...

    def cancel(self, request: SimulatedRequest) -> None: ...

    def end_episode(self, episode: str) -> None: ...

    def update(self, fleet: Fleet) -> None: ...


class ExactRouter:
    """By a `RoutingTable`. `longest` is the longest context, in tokens."""

    def __init__(self, replicas: Sequence[SimulatedReplica], max_concurrent: int, longest: int) -> None:
        self._replicas = {replica.name: replica for replica in replicas}
        self._table = RoutingTable(max_concurrent + AHEAD)
        self._tokens_per_id = 1 + longest // IDS
        self._numbers = itertools.count()
        self._waiting: dict[int, SimulatedRequest] = {}
        self._cached: dict[str, tuple[SimulatedReplica, int, int]] = {}  # episode -> replica, its version, tokens there
        self._episodes: dict[int, str] = {}

    @property
    def waiting(self) -> int:
        return self._table.waiting

    def send(self, episode: str, request: SimulatedRequest, oldest_version: int) -> None:
        request.number = next(self._numbers)
        ids = (0,) * (request.context // self._tokens_per_id)
        self._waiting[request.number] = request
        self._episodes[request.number] = episode
        self._table.enqueue(RouteRequest(request.number, episode, ids, ANY_LENGTH, oldest_version))
        self._assign()

    def completed(self, request: SimulatedRequest) -> None:
        episode = self._episodes.pop(request.number)
        replica = request.replica
        assert replica is not None  # it was assigned, or `cancel` was called
        self._cached[episode] = replica, replica.version, request.context + request.sampled_tokens
        sampled = (0,) * (request.sampled_tokens // self._tokens_per_id)
        self._table.complete(request.number, sampled, replica.version, aborted=False)
        self._assign()

    def cancel(self, request: SimulatedRequest) -> None:
        self._episodes.pop(request.number)
        if self._waiting.pop(request.number, None) is None and request.replica is not None:
            request.replica.cancel(request)
        self._table.remove(request.number)
        self._assign()

    def end_episode(self, episode: str) -> None:
        self._cached.pop(episode, None)
        self._table.end_episode(episode)

    def update(self, fleet: Fleet) -> None:
        self._table.update(fleet)
        self._assign()

    def _assign(self) -> None:
        for assignment in self._table.assign():
            request, replica = self._waiting.pop(assignment.number), self._replicas[assignment.replica]
            known = self._cached.get(self._episodes[assignment.number])
            if known is not None and known[:2] == (replica, replica.version):
                request.cached = known[2]
            replica.submit(request)


class TwoChoicesRouter:
    """The better of two random replicas; the excess queues there, not here."""

    waiting = 0

    def __init__(self, replicas: Sequence[SimulatedReplica], rng: random.Random) -> None:
        self._replicas = replicas
        self._rng = rng
        self._cached: dict[str, tuple[SimulatedReplica, int, int]] = {}
        self._episodes: dict[SimulatedRequest, str] = {}

    def send(self, episode: str, request: SimulatedRequest, oldest_version: int) -> None:
        number, random_unit = len(self._replicas), self._rng.random
        one, other = self._replicas[int(random_unit() * number)], self._replicas[int(random_unit() * number)]
        known = self._cached.get(episode)
        if known is not None and known[0].version == known[1] and known[0].in_flight <= other.in_flight:
            one = known[0]  # its prefix is there
        replica = one if one.in_flight <= other.in_flight else other
        if known is not None and known[:2] == (replica, replica.version):
            request.cached = known[2]
        self._episodes[request] = episode
        replica.submit(request)

    def completed(self, request: SimulatedRequest) -> None:
        replica = request.replica
        assert replica is not None
        self._cached[self._episodes.pop(request)] = replica, replica.version, request.context + request.sampled_tokens

    def cancel(self, request: SimulatedRequest) -> None:
        del self._episodes[request]
        assert request.replica is not None
        request.replica.cancel(request)

    def end_episode(self, episode: str) -> None:
        self._cached.pop(episode, None)

    def update(self, fleet: Fleet) -> None:
        pass  # every replica serves a version that may be leased: versions only rise


class SimulatedFleet:
    """`once_s` seconds before the first cohort, and `cohort_s` for each, of which a replica pauses `pause_s`; then it serves the
    new version, and is checked for the last `canary_s`. With `drains` its replicas finish what they decode before they pause."""

    def __init__(
        self,
        clock: VirtualClock,
        replicas: Sequence[SimulatedReplica],
        cohort: int,
        once_s: float,
        cohort_s: float,
        pause_s: float,
        canary_s: float,
        *,
        drains: bool = False,
    ) -> None:
        self.replicas = replicas
        self.routers: list[SimulatedRouter] = []
        self._clock = clock
        self._cohorts = [replicas[i : i + cohort] for i in range(0, len(replicas), cohort)]
        self._once_s = once_s
        self._cohort_s = cohort_s
        self._pause_s = min(cohort_s, pause_s)
        self._canary_s = min(cohort_s - self._pause_s, canary_s)
        self._drains = drains
        self._revision = 0

    def make_router(self, max_concurrent: int, longest: int, rng: random.Random) -> SimulatedRouter:
        """The router of another worker."""
        exact = len(self.replicas) <= EXACT
        router = ExactRouter(self.replicas, max_concurrent, longest) if exact else TwoChoicesRouter(self.replicas, rng)
        self.routers.append(router)
        return router

    @property
    def works(self) -> bool:
        """Whether any replica has a request."""
        return any(replica.in_flight for replica in self.replicas)

    @property
    def in_flight(self) -> int:
        return sum(replica.in_flight for replica in self.replicas)

    def slow(self, slowness: float) -> None:
        """All replicas take `slowness` times as long from now on."""
        for replica in self.replicas:
            replica.slow(slowness)

    def loads(self) -> list[EngineLoad]:
        return [replica.load() for replica in self.replicas]

    def publish(self) -> None:
        """Tell the routers which versions the replicas serve."""
        if len(self.replicas) > EXACT:
            return
        self._revision += 1
        infos = (ReplicaInfo(r.name, "", state="serving", version=r.version, answers=True) for r in self.replicas)
        fleet = Fleet(self._revision, tuple(infos))
        for router in self.routers:
            router.update(fleet)

    def push(self, version: int, done: Callable[[], None], slowness: float = 1.0) -> None:
        """Roll `version` over the replicas, beginning now, in `slowness` times the seconds; `done` when the last serves it."""
        if self._drains:
            self._clock.after(slowness * self._once_s, self._push_drained, 0, version, done, slowness)
            return
        for index, cohort in enumerate(self._cohorts):
            begins = slowness * (self._once_s + index * self._cohort_s)
            ends = begins + slowness * self._cohort_s
            served = ends - slowness * self._canary_s
            self._clock.after(max(begins, served - slowness * self._pause_s), self._pause, cohort)
            self._clock.after(served, self._swap, cohort, version)
            last = index + 1 == len(self._cohorts)
            self._clock.after(ends, self._checked, done if last else None)

    def _push_drained(self, index: int, version: int, done: Callable[[], None], slowness: float) -> None:
        """Push to the cohort `index` and those after it. Each replica swaps when it has drained; the next cohort waits for all."""
        cohort, left = self._cohorts[index], len(self._cohorts[index])

        def swap(replica: SimulatedReplica) -> None:
            nonlocal left
            left -= 1
            last = not left and index + 1 == len(self._cohorts)
            self._swap([replica], version)
            if not left:
                self._clock.after(slowness * self._canary_s, checked, last)

        def checked(last: bool) -> None:
            self._checked(done if last else None)
            if not last:
                self._push_drained(index + 1, version, done, slowness)

        def drain() -> None:
            for replica in cohort:
                replica.drain(functools.partial(self._clock.after, slowness * self._pause_s, swap, replica))

        self._clock.after(slowness * (self._cohort_s - self._pause_s - self._canary_s), drain)

    def _pause(self, cohort: Sequence[SimulatedReplica]) -> None:
        for replica in cohort:
            replica.pause()

    def _swap(self, cohort: Sequence[SimulatedReplica], version: int) -> None:
        for replica in cohort:
            replica.swap(version)

    def _checked(self, done: Callable[[], None] | None) -> None:
        self.publish()
        if done is not None:
            done()
