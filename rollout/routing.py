"""Which replica serves which request: a pure state machine that owns no task, clock or socket.

    enqueue ──> waiting, in order of arrival ──assign──> in flight on a replica ──complete──> its tokens are in that cache
                   ^                                          │
                   └───────────── enqueued again ─────────────┴──remove (cancelled, failed)

Cost of a replica = tokens in flight there + prompt tokens that it would have to prefill. The least cost wins. In a fleet of more
than `COMPARED` replicas it is the least of two drawn at random and the one that has the request's prefix (power of two choices:
Mitzenmacher, IEEE TPDS 12(10), 2001), so that a request costs the same in every fleet.

Invariants:
- A request goes only to a replica that is `serving`, is healthy, and has proven at least the request's oldest version.
- Each false reply of a replica adds 1 to its level of suspicion, each true one takes `SUSPICION_LEAK` off. Each incarnation has a
  level of its own, also where a push left it out meanwhile. One that has reached `SUSPICION_LIMIT` gets no requests any more.
- At most `max_in_flight` of this worker's requests are in flight on a replica.
- First come, first served: a free slot of a replica goes to the oldest request that may use it.
- A replica that aborted requests to take weights gets new ones only where no other has a free slot; they queue in its server.
- A cached prefix counts only at the version it was filled under: engines salt prefixes by version, and drop them at a swap.
"""

from __future__ import annotations

import bisect
import operator
import random
import zlib
from collections.abc import Iterable

import msgspec

from ..weightsync.fleet import Fleet, ReplicaInfo

AHEAD = 4  # requests of a worker beyond those that a replica decodes at once: free slots fill without a round trip
INITIAL_LENGTH = 64  # expected completion length, in tokens, before any completion was seen
COMPARED = 32  # replicas up to which all are compared: fewer tokens in flight on the fullest, at 16 us a request
DRAWS = 8  # replicas that are drawn at most to find two that may serve a request; then all are compared
LENGTH_DECAY = 0.05  # weight of the newest completion in the expected length, a moving average over about twenty

SUSPICION_LIMIT = 5.0
"""The level at which a replica is drained. One false reply proves little: a bit flipped, or a proxy cut an answer. Five within
fifty replies are a server that computes wrongly; a restart costs less than what it wastes, and than what the checks may miss."""

SUSPICION_LEAK = 0.02
"""What a true reply takes off: a replica of which less than one reply in fifty is false is kept, however long it runs. Its false
ones are computed again elsewhere, which costs less than to go without it."""


_number = operator.attrgetter("number")


class RouteRequest(msgspec.Struct, frozen=True):
    """A request; `number` is its position in the order of arrival."""

    number: int
    episode_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    oldest_version: int
    avoided: frozenset[str] = (
        frozenset()
    )  # replicas that answered it falsely; they get it only where no other may serve it


class Assignment(msgspec.Struct, frozen=True):
    """Request `number` goes to `replica`, which serves `version` as far as is known."""

    number: int
    replica: str
    version: int


class ReplicaSuspicion:
    """How much the false replies of one incarnation of a replica weigh. `count` are its false replies, `why` is what was wrong with
    the last; one that is `proven` to lie stays so."""

    def __init__(self) -> None:
        self.count = 0
        self.level = 0.0
        self.why = ""
        self.proven = False

    def add_false(self, why: str) -> None:
        """A false reply came; `why` is what was wrong with it."""
        self.count += 1
        self.level += 1.0
        self.why = why
        self.proven = self.proven or self.level >= SUSPICION_LIMIT

    def add_true(self) -> bool:
        """A true reply came. Whether the level has fallen below a whole number or to 0, which the supervisor is to know."""
        if self.proven or not self.level:
            return False
        before, self.level = self.level, max(0.0, self.level - SUSPICION_LEAK)
        return int(before) != int(self.level) or not self.level


class ReplicaState:
    """One incarnation of one replica at one address; `suspicion` is that of the same incarnation at an earlier address."""

    def __init__(self, info: ReplicaInfo, suspicion: ReplicaSuspicion | None = None) -> None:
        self.info = info
        self.suspicion = suspicion or ReplicaSuspicion()
        # By request in flight, its prompt tokens and expected completion tokens.
        self.tokens_in_flight: dict[int, int] = {}
        self.load = 0  # their sum
        # The newest version that its completions reported; after a push it is ahead of the fleet's state.
        self.reported_version = -1
        self.failed = False  # it failed a request and has passed no probe since
        self.position = -1  # in `RoutingTable`'s list of replicas with a free slot; -1 where it is not there
        # It aborted requests to take weights, and has shown neither another version nor a whole completion since.
        self.paused = False

    @property
    def version(self) -> int:
        """The newest version known to be served; -1 when none is known."""
        return max(self.reported_version, -1 if self.info.version is None else self.info.version)

    @property
    def serving(self) -> bool:
        """Whether it may get requests."""
        info = self.info
        return info.state == "serving" and info.version is not None and not self.failed and not self.suspicion.proven


class Pin(msgspec.Struct, frozen=True):
    """An episode's prefix: the replica that caches it, and under which version."""

    replica: ReplicaState
    version: int
    token_ids: tuple[int, ...]


class RoutingTable:
    """The state. `max_in_flight` bounds this worker's requests on one replica; other workers' are not counted."""

    def __init__(self, max_in_flight: int) -> None:
        self.replicas: dict[str, ReplicaState] = {}
        self._max_in_flight = max_in_flight
        self._open: list[ReplicaState] = []  # those with a free slot, in any order
        self._random = random.Random(0)
        self._waiting: list[RouteRequest] = []
        self._in_flight: dict[int, tuple[RouteRequest, ReplicaState, int]] = {}
        self._pins: dict[str, Pin] = {}
        self._expected_length = float(INITIAL_LENGTH)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def update(self, fleet: Fleet) -> None:
        """Take over a new fleet state. What is known of an earlier incarnation is dropped; of a replica that was fenced, or has
        another address, all but its suspicion is."""
        known, self.replicas = self.replicas, {}
        for info in fleet.replicas:
            replica = known.get(info.name)
            if replica is None or replica.info.incarnation != info.incarnation:
                replica = ReplicaState(info)
            elif replica.info.url != info.url:
                replica = ReplicaState(info, replica.suspicion)
            elif info.state == "starting":
                replica.reported_version, replica.failed, replica.paused = -1, False, False
            elif info.version != replica.info.version:
                replica.paused = False
            replica.info = info
            self.replicas[info.name] = replica
        for replica in known.values():
            replica.position = -1
        self._open = []
        for replica in self.replicas.values():
            self._refresh(replica)

    def set_failed(self, name: str, failed: bool) -> None:
        """`name` failed a request and gets no more, or it passed a probe with the version that the fleet state names."""
        if name in self.replicas:
            self.replicas[name].failed = failed
            self._refresh(self.replicas[name])

    def enqueue(self, request: RouteRequest) -> None:
        """Queue `request`; one that is enqueued again keeps its position in the order."""
        bisect.insort(self._waiting, request, key=_number)

    def assign(self) -> list[Assignment]:
        """Assign every waiting request that can start now, in order; these are in flight from here on."""
        assigned, waiting = [], []
        for position, request in enumerate(self._waiting):
            if not self._open:
                waiting += self._waiting[position:]
                break
            replica = self._choose(request)
            if replica is None:
                waiting.append(request)
                continue
            weight = len(request.token_ids) + min(request.max_tokens, round(self._expected_length))
            replica.tokens_in_flight[request.number] = weight
            replica.load += weight
            self._refresh(replica)
            self._in_flight[request.number] = (request, replica, replica.version)
            assigned.append(Assignment(request.number, replica.info.name, replica.version))
        self._waiting = waiting
        return assigned

    def complete(self, number: int, token_ids: Iterable[int], version: int | None, *, aborted: bool) -> None:
        """A completion of `token_ids` arrived, its last token sampled by `version`; `aborted` when the replica ended it early."""
        request, replica, version_at_assignment = self._in_flight[number]
        self.remove(number)
        sampled = tuple(token_ids)
        self._pins[request.episode_id] = Pin(replica, version_at_assignment, request.token_ids + sampled)
        if version is not None:
            replica.reported_version = max(replica.reported_version, version)
        replica.paused = aborted and replica.version == version_at_assignment
        if not aborted:
            self._expected_length += LENGTH_DECAY * (len(sampled) - self._expected_length)

    def remove(self, number: int) -> None:
        """Drop request `number`, waiting or in flight."""
        if number in self._in_flight:
            _, replica, _ = self._in_flight.pop(number)
            replica.load -= replica.tokens_in_flight.pop(number)
            if self.replicas.get(replica.info.name) is replica:
                self._refresh(replica)
            return
        position = bisect.bisect_left(self._waiting, number, key=_number)
        if position < len(self._waiting) and self._waiting[position].number == number:
            del self._waiting[position]

    def end_episode(self, episode_id: str) -> None:
        self._pins.pop(episode_id, None)

    def cost(self, request: RouteRequest, replica: ReplicaState) -> int:
        """Tokens in flight on `replica` and prompt tokens that it would have to prefill."""
        cached, pin = 0, self._pins.get(request.episode_id)
        if pin is not None and pin.replica is replica and pin.version == replica.version:
            # A rewritten history has another prefix and finds nothing in the cache.
            cached = len(pin.token_ids) if request.token_ids[: len(pin.token_ids)] == pin.token_ids else 0
        return replica.load + len(request.token_ids) - cached

    def _choose(self, request: RouteRequest) -> ReplicaState | None:
        """A replica with a free slot that may serve `request`; None where there is none."""
        if len(self.replicas) > COMPARED and (drawn := self._draw(request)):
            return self._cheapest(request, drawn)
        able = [r for r in self.replicas.values() if self._may_serve(r, request)]
        able = [r for r in able if r.info.name not in request.avoided] or able
        return self._cheapest(request, filter(self._has_slot, able))

    def _draw(self, request: RouteRequest) -> list[ReplicaState]:
        """Two replicas with a free slot and the one with the prefix, of those that should serve `request`; none where two were not
        found."""
        # Routers start alike; their episodes differ, so that they do not all draw the same replicas.
        key, drawn = zlib.crc32(request.episode_id.encode()), list[ReplicaState]()
        for _ in range(DRAWS):
            replica = self._open[(self._random.getrandbits(32) ^ key) % len(self._open)]
            if self._should_serve(replica, request) and replica not in drawn:
                drawn.append(replica)
            if len(drawn) == 2:
                break
        else:
            return []
        pin = self._pins.get(request.episode_id)
        if pin is not None and pin.replica.position >= 0 and self._should_serve(pin.replica, request):
            drawn.append(pin.replica)
        return drawn

    def _cheapest(self, request: RouteRequest, replicas: Iterable[ReplicaState]) -> ReplicaState | None:
        def rank(replica: ReplicaState) -> tuple[bool, int, int]:
            # Equal replicas are ordered by a hash of the episode: workers that start at the same time spread over all of them.
            spread = zlib.crc32(f"{request.episode_id} {replica.info.name}".encode())
            return replica.paused, self.cost(request, replica), spread

        return min(replicas, key=rank, default=None)

    @staticmethod
    def _may_serve(replica: ReplicaState, request: RouteRequest) -> bool:
        return replica.serving and (replica.info.version or 0) >= request.oldest_version

    def _should_serve(self, replica: ReplicaState, request: RouteRequest) -> bool:
        """Whether `replica` may serve `request` and nothing speaks against it: it has not aborted requests, nor is it avoided."""
        return self._may_serve(replica, request) and not replica.paused and replica.info.name not in request.avoided

    def _has_slot(self, replica: ReplicaState) -> bool:
        return replica.serving and len(replica.tokens_in_flight) < self._max_in_flight

    def _refresh(self, replica: ReplicaState) -> None:
        """Have `replica`, one of the fleet, in the list of those with a free slot where it has one."""
        if self._has_slot(replica) == (replica.position >= 0):
            return
        if replica.position < 0:
            replica.position = len(self._open)
            self._open.append(replica)
            return
        last = self._open.pop()
        if last is not replica:
            self._open[replica.position], last.position = last, replica.position
        replica.position = -1
