"""Which replica takes which request: a pure state machine that owns no task, clock or socket.

    ask ──> waiting, in order of arrival ──grants──> in flight on a replica ──finished──> its tokens lie in that cache
               ^                                          │
               └───────────── asked again ────────────────┴──left (cancelled, failed)

Cost of a replica = tokens in flight there + prompt tokens that it would have to prefill. The least cost wins.

Invariants:
- A request goes only to a replica that is `serving`, is not suspect, and serves at least the request's oldest version.
- At most `limit` of this worker's requests are in flight on a replica.
- Nobody overtakes: a replica's free place goes to the request that asked first among those that may use it.
- A replica that cut requests short to take weights gets one only where no other has room; it is queued there until it is back.
- A cache is worth something only at the version it was filled under: engines salt prefixes by it, and drop them at a swap.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Iterable

import msgspec

from ..weightsync.fleet import Fleet, Seat

TYPICAL_FIRST = 64
"""Completion length, in tokens, that is expected before any was seen."""

TYPICAL_MEMORY = 0.05
"""Weight of the newest completion in the expected length: about the last twenty count."""


class Ask(msgspec.Struct, frozen=True):
    """A request: `number` is its place in the order of arrival."""

    number: int
    episode_id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    oldest_version: int


class Grant(msgspec.Struct, frozen=True):
    """Request `number` goes to `replica`, which is believed to serve `version`."""

    number: int
    replica: str
    version: int


class Place:
    """One incarnation of one replica.

    Attributes:
        tokens: by request in flight, the tokens that it brings and is expected to add; `load` is their sum.
        seen: newest version that its completions reported; ahead of the fleet's word for a moment after a push.
        suspect: it failed a request and has not been found well since.
        paused: it cut requests short, to take weights, and has neither another version nor a whole completion since.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.tokens: dict[int, int] = {}
        self.load = 0
        self.seen = -1
        self.suspect = False
        self.paused = False

    @property
    def version(self) -> int:
        """What it serves now, as far as anybody has said; -1 when nobody has."""
        return max(self.seen, -1 if self.seat.version is None else self.seat.version)

    @property
    def serving(self) -> bool:
        """Whether it takes requests at all."""
        return self.seat.state == "serving" and self.seat.version is not None and not self.suspect

    def serves(self, oldest_version: int) -> bool:
        """Whether it has proven `oldest_version` or later."""
        return self.serving and self.seat.version is not None and self.seat.version >= oldest_version


class Held(msgspec.Struct, frozen=True):
    """An episode's prefix: where it is cached, and under which version."""

    place: Place
    version: int
    token_ids: tuple[int, ...]


class Routing:
    """The state. `limit` is how many requests may be in flight on one replica; other workers' are not counted."""

    def __init__(self, limit: int) -> None:
        self.places: dict[str, Place] = {}
        self._limit = limit
        self._waiting: list[Ask] = []
        self._in_flight: dict[int, tuple[Ask, Place, int]] = {}
        self._held: dict[str, Held] = {}
        self._typical = float(TYPICAL_FIRST)

    @property
    def waiting(self) -> int:
        """Requests that no replica could take yet."""
        return len(self._waiting)

    # --- what the replicas do -------------------------------------------------------------------------------------

    def follow(self, fleet: Fleet) -> None:
        """The fleet is now this. What was known of an earlier incarnation, or of one that was fenced since, is forgotten."""
        known, self.places = self.places, {}
        for seat in fleet.seats:
            place = known.get(seat.name)
            if place is None or place.seat.incarnation != seat.incarnation or place.seat.url != seat.url:
                place = Place(seat)
            elif seat.state == "starting":
                place.seen, place.suspect, place.paused = -1, False, False
            elif seat.version != place.seat.version:
                place.paused = False
            place.seat = seat
            self.places[seat.name] = place

    def suspect(self, name: str) -> None:
        """`name` failed a request: nothing more goes there until `recovered`."""
        if name in self.places:
            self.places[name].suspect = True

    def recovered(self, name: str) -> None:
        """`name` was found well, with the version that the fleet says it serves."""
        if name in self.places:
            self.places[name].suspect = False

    # --- what the requests do -------------------------------------------------------------------------------------

    def ask(self, request: Ask) -> None:
        """`request` wants a replica; one that asks again keeps its place in the order."""
        bisect.insort(self._waiting, request, key=_number)

    def grants(self) -> list[Grant]:
        """Everything that can go now, in order; it is in flight from here on."""
        granted, waiting = [], []
        for at, request in enumerate(self._waiting):
            if not any(self._free(place) for place in self.places.values()):
                waiting += self._waiting[at:]
                break
            place = self._cheapest(request)
            if place is None:
                waiting.append(request)
                continue
            place.tokens[request.number] = self._weight(request)
            place.load += place.tokens[request.number]
            self._in_flight[request.number] = (request, place, place.version)
            granted.append(Grant(request.number, place.seat.name, place.version))
        self._waiting = waiting
        return granted

    def finished(self, number: int, token_ids: Iterable[int], version: int | None, *, cut: bool) -> None:
        """A completion of `token_ids` came back, its last token sampled by `version`; `cut` when the replica ended it early."""
        request, place, under = self._in_flight[number]
        self.leave(number)
        sampled = tuple(token_ids)
        self._held[request.episode_id] = Held(place, under, request.token_ids + sampled)
        if version is not None:
            place.seen = max(place.seen, version)
        place.paused = cut and place.version == under
        if not cut:
            self._typical += TYPICAL_MEMORY * (len(sampled) - self._typical)

    def leave(self, number: int) -> None:
        """Request `number` waits and flies no more."""
        if number in self._in_flight:
            _, place, _ = self._in_flight.pop(number)
            place.load -= place.tokens.pop(number)
            return
        at = bisect.bisect_left(self._waiting, number, key=_number)
        if at < len(self._waiting) and self._waiting[at].number == number:
            del self._waiting[at]

    def forget(self, episode_id: str) -> None:
        """The episode is over: nobody will ask for its prefix again."""
        self._held.pop(episode_id, None)

    # --- the decision ---------------------------------------------------------------------------------------------

    def cost(self, request: Ask, place: Place) -> int:
        """Tokens in flight at `place` and prompt tokens that it would have to prefill."""
        return place.load + len(request.token_ids) - self._cached(request, place)

    def _cached(self, request: Ask, place: Place) -> int:
        held = self._held.get(request.episode_id)
        if held is None or held.place is not place or held.version != place.version:
            return 0
        # An agent that rewrote its history begins another way, and finds nothing.
        return len(held.token_ids) if request.token_ids[: len(held.token_ids)] == held.token_ids else 0

    def _cheapest(self, request: Ask) -> Place | None:
        able = [p for p in self.places.values() if self._free(p) and p.serves(request.oldest_version)]
        return min(able, key=lambda place: self._order(request, place), default=None)

    def _order(self, request: Ask, place: Place) -> tuple[bool, int, int]:
        # Of equals each episode prefers another one: many workers that begin at once must not all begin at the first.
        spread = zlib.crc32(f"{request.episode_id} {place.seat.name}".encode())
        return place.paused, self.cost(request, place), spread

    def _free(self, place: Place) -> bool:
        return place.serving and len(place.tokens) < self._limit

    def _weight(self, request: Ask) -> int:
        return len(request.token_ids) + min(request.max_tokens, round(self._typical))


def _number(request: Ask) -> int:
    return request.number
