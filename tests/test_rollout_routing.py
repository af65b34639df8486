"""Routing: bound, order, version floor and conservation under any sequence of events, and what a cached prefix is worth;
when false replies prove that a replica lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.rollout import routing
from slipstream.rollout.routing import (
    INITIAL_LENGTH,
    SUSPICION_LEAK,
    SUSPICION_LIMIT,
    Assignment,
    ReplicaState,
    ReplicaSuspicion,
    RouteRequest,
    RoutingTable,
)
from slipstream.tests.tiers import examples
from slipstream.weightsync.fleet import Fleet, ReplicaInfo

LIMIT = 3


def serving(*versions: int | None, incarnation: int = 0) -> Fleet:
    """A fleet of `a`, `b`, ... that serve these versions; None is one that starts."""
    return Fleet(
        1,
        tuple(
            ReplicaInfo(name, f"http://{name}", incarnation, "starting" if v is None else "serving", v)
            for name, v in zip("abcdef", versions, strict=False)
        ),
    )


def ask(
    number: int, tokens: int = 10, *, episode: str | None = None, oldest: int = 0, max_tokens: int = 8
) -> RouteRequest:
    return RouteRequest(number, episode or f"{number}.0.0", tuple(range(tokens)), max_tokens, oldest)


def routed(fleet: Fleet, *requests: RouteRequest, limit: int = LIMIT) -> tuple[RoutingTable, dict[int, Assignment]]:
    routing = RoutingTable(limit)
    routing.update(fleet)
    for request in requests:
        routing.enqueue(request)
    return routing, {g.number: g for g in routing.assign()}


# --- under any sequence of events -------------------------------------------------------------------------------------

REPLICA_INFOS = st.lists(
    st.tuples(
        st.sampled_from("abcd"),
        st.integers(0, 1),
        st.sampled_from(["starting", "serving", "serving", "draining"]),
        st.one_of(st.none(), st.integers(0, 3)),
    ),
    unique_by=lambda replica_info: replica_info[0],
    max_size=4,
)


@pytest.mark.parametrize("compared", [routing.COMPARED, 0], ids=["all compared", "two drawn"])
@given(data=st.data())
@settings(max_examples=examples(300), deadline=None)
def test_bound_order_floor_and_conservation(data: st.DataObject, compared: int) -> None:
    with mock.patch.object(routing, "COMPARED", compared):
        check_any_sequence(data)


def check_any_sequence(data: st.DataObject) -> None:
    routing = RoutingTable(LIMIT)
    asked: dict[int, RouteRequest] = {}
    waiting: set[int] = set()
    flying: dict[int, tuple[str, int]] = {}
    replica_infos: dict[str, ReplicaInfo] = {}
    suspects: set[str] = set()

    def takes(name: str, request: RouteRequest) -> bool:
        replica_info = replica_infos[name]
        proven = (
            replica_info.state == "serving"
            and replica_info.version is not None
            and replica_info.version >= request.oldest_version
        )
        return proven and name not in suspects

    for step in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["ask", "ask", "ask", "finish", "fail", "cancel", "fleet", "suspect", "well"]))
        if what == "ask":
            asked[step] = ask(step, data.draw(st.integers(1, 50)), oldest=data.draw(st.integers(0, 3)))
            waiting.add(step)
            routing.enqueue(asked[step])
        elif what == "finish" and flying:
            number = data.draw(st.sampled_from(sorted(flying)))
            del flying[number]
            routing.complete(number, [1, 2], data.draw(st.integers(0, 3)), aborted=data.draw(st.booleans()))
        elif what == "fail" and flying:  # enqueued again under its own number
            number = data.draw(st.sampled_from(sorted(flying)))
            del flying[number]
            waiting.add(number)
            routing.remove(number)
            routing.enqueue(asked[number])
        elif what == "cancel" and (waiting or flying):
            number = data.draw(st.sampled_from(sorted(waiting | flying.keys())))
            waiting.discard(number)
            flying.pop(number, None)
            routing.remove(number)
        elif what == "fleet":
            drawn = data.draw(REPLICA_INFOS)
            found = {n: ReplicaInfo(n, f"http://{n}", i, s, v) for n, i, s, v in drawn}
            same = {n for n in found if n in replica_infos and found[n].incarnation == replica_infos[n].incarnation}
            suspects &= {n for n in same if found[n].state != "starting"}
            flying = {
                number: (name, incarnation if name in found and found[name].incarnation == incarnation else -1)
                for number, (name, incarnation) in flying.items()
            }
            replica_infos.clear()
            replica_infos.update(found)
            routing.update(Fleet(step, tuple(replica_infos.values())))
        elif what in ("suspect", "well") and replica_infos:
            name = data.draw(st.sampled_from(sorted(replica_infos)))
            (suspects.add if what == "suspect" else suspects.discard)(name)
            routing.set_failed(name, what == "suspect")

        granted = routing.assign()
        for grant in granted:
            assert grant.number in waiting
            assert takes(grant.replica, asked[grant.number])
            waiting.remove(grant.number)
            flying[grant.number] = (grant.replica, replica_infos[grant.replica].incarnation)
        load = {
            n: sum(flight == (n, replica_info.incarnation) for flight in flying.values())
            for n, replica_info in replica_infos.items()
        }
        assert all(count <= LIMIT for count in load.values())
        assert routing.waiting == len(waiting)
        for number in waiting:  # no request waits while a replica could take it, and none overtook it
            assert not any(takes(n, asked[number]) and load[n] < LIMIT for n in replica_infos)
            assert not any(g.number > number and takes(g.replica, asked[number]) for g in granted)
    for name, place in routing.replicas.items():
        here = [n for n, flight in flying.items() if flight == (name, replica_infos[name].incarnation)]
        assert sorted(place.tokens_in_flight) == sorted(here)
        assert place.load == sum(place.tokens_in_flight.values())


# --- in a large fleet -------------------------------------------------------------------------------------------------


def large(replicas: int, version: int = 0) -> Fleet:
    return Fleet(1, tuple(ReplicaInfo(f"engine-{i}", f"http://{i}", 0, "serving", version) for i in range(replicas)))


class CountedRanks(RoutingTable):
    """Counts how many replicas are compared."""

    compared = 0

    def cost(self, request: RouteRequest, replica: ReplicaState) -> int:
        self.compared += 1
        return super().cost(request, replica)


def test_a_request_is_compared_on_no_more_replicas_in_a_larger_fleet() -> None:
    requests = 200
    for replicas, most in ((8, 8), (64, 3), (1000, 3)):
        counted = CountedRanks(LIMIT)
        counted.update(large(replicas))
        for number in range(requests):
            counted.enqueue(ask(number, episode=f"{number % 20}.0.0"))
            counted.assign()
            counted.complete(number, [1], 0, aborted=False)
        assert counted.compared <= most * requests, replicas


def test_the_better_of_two_spreads_far_better_than_one_at_random() -> None:
    """400 replicas with 40 requests each: at random the fullest would have about 60."""
    table, granted = routed(large(400), *(ask(i) for i in range(16_000)), limit=1000)
    loads = Counter(assignment.replica for assignment in granted.values())
    assert len(loads) == 400
    assert 40 <= max(loads.values()) <= 45
    assert table.waiting == 0


def test_a_large_fleet_fills_to_its_last_slot() -> None:
    table, granted = routed(large(40), *(ask(i) for i in range(40 * LIMIT + 5)))
    assert len(granted) == 40 * LIMIT
    assert table.waiting == 5
    table.complete(17, [1], 0, aborted=False)
    assert [assignment.number for assignment in table.assign()] == [40 * LIMIT]


def test_in_a_large_fleet_a_later_turn_goes_where_its_prefix_is_and_no_request_to_an_older_version() -> None:
    table, granted = routed(large(100), ask(0, 1000, episode="e"))
    home = granted[0].replica
    table.complete(0, range(1000, 1020), 0, aborted=False)
    table.enqueue(ask(1, 1030, episode="e"))
    assert table.assign()[0].replica == home
    one_ahead = [*large(99).replicas, ReplicaInfo("engine-99", "http://99", 0, "serving", 1)]
    table.update(Fleet(2, tuple(one_ahead)))
    table.enqueue(ask(2, oldest=1))
    assert table.assign()[0].replica == "engine-99"


def test_workers_that_start_at_once_do_not_draw_the_same_replicas() -> None:
    first = Counter(routed(large(100), ask(0, episode=f"{i}.0.0"))[1][0].replica for i in range(100))
    assert max(first.values()) <= 6


@given(st.lists(st.integers(1, 400), min_size=1, max_size=60), st.integers(1, 5))
def test_load_is_spread_by_tokens(prompts: list[int], replicas: int) -> None:
    routing, _ = routed(
        serving(*[0] * replicas), *(ask(i, tokens) for i, tokens in enumerate(prompts)), limit=len(prompts)
    )
    loads = [place.load for place in routing.replicas.values()]
    assert max(loads) - min(loads) <= max(prompts) * 2 + 8  # they differ by at most one request's cost and weight


# --- what a cache is worth --------------------------------------------------------------------------------------------


def after_a_turn(fleet: Fleet) -> tuple[RoutingTable, str, Callable[[int], RouteRequest]]:
    """An episode after its first turn of 100 prompt and 20 sampled tokens; its replica, and the request of its next turn."""
    routing, granted = routed(fleet, ask(0, 100, episode="e"))
    routing.complete(0, range(100, 120), 0, aborted=False)
    return routing, granted[0].replica, lambda number: ask(number, 130, episode="e")


def fill(routing: RoutingTable, name: str, tokens: int) -> None:
    """Put a load of `tokens` on a replica."""
    place = routing.replicas[name]
    place.load += tokens


def test_a_later_turn_goes_where_its_prefix_is() -> None:
    routing, home, turn = after_a_turn(serving(0, 0, 0))
    fill(routing, home, 100)
    other = next(p for n, p in routing.replicas.items() if n != home)
    assert routing.cost(turn(1), routing.replicas[home]) == 100 + 10
    assert routing.cost(turn(1), other) == 130
    routing.enqueue(turn(1))
    assert routing.assign()[0].replica == home


def test_it_leaves_when_waiting_there_costs_more_than_its_cache_saves() -> None:
    routing, home, turn = after_a_turn(serving(0, 0))
    fill(routing, home, 121)
    routing.enqueue(turn(1))
    assert routing.assign()[0].replica != home


def test_a_new_version_a_new_process_and_a_rewritten_history_find_no_cache() -> None:
    for change in (serving(1, 1), serving(0, 0, incarnation=1)):
        routing, home, turn = after_a_turn(serving(0, 0))
        routing.update(change)
        assert routing.cost(turn(1), routing.replicas[home]) == 130
    routing, home, turn = after_a_turn(serving(0, 0))
    rewritten = RouteRequest(1, "e", (7, *range(1, 130)), 8, 0)
    assert routing.cost(rewritten, routing.replicas[home]) == 130
    assert routing.cost(turn(1), routing.replicas[home]) == 10
    routing.end_episode("e")
    assert routing.cost(turn(1), routing.replicas[home]) == 130


def test_a_version_seen_in_a_completion_ahead_of_the_fleet_is_what_the_next_request_is_salted_with() -> None:
    routing, granted = routed(serving(3), ask(0, episode="e"))
    assert granted[0].version == 3
    routing.complete(0, [1], 4, aborted=False)
    routing.enqueue(ask(1, 11, episode="e"))
    assert routing.assign()[0].version == 4
    routing.enqueue(ask(2, oldest=4))  # seen, but not proven yet
    assert routing.assign() == []
    routing.update(serving(4))
    assert [g.number for g in routing.assign()] == [2]


def test_a_replica_that_cuts_requests_short_is_avoided_until_it_is_back() -> None:
    def after_a_cut() -> tuple[RoutingTable, str, str]:
        routing, granted = routed(serving(0, 0), ask(0, 100, episode="e"))
        paused = granted[0].replica
        routing.complete(0, range(100, 110), 0, aborted=True)
        return routing, paused, "b" if paused == "a" else "a"

    rest = ask(1, 110, episode="e")
    routing, paused, other = after_a_cut()
    routing.enqueue(rest)
    assert routing.assign()[0].replica == other  # although its prefix is on the paused one

    routing, paused, other = after_a_cut()
    routing.set_failed(other, True)
    routing.enqueue(rest)
    assert routing.assign()[0].replica == paused  # no other replica: it waits in that server's queue

    routing, paused, other = after_a_cut()
    fill(routing, other, 1000)
    routing.update(serving(1, 1))  # it has its weights
    routing.enqueue(rest)
    assert routing.assign()[0].replica == paused


def test_a_replica_that_was_fenced_is_what_it_proves_and_not_what_was_seen_of_it() -> None:
    routing, _ = routed(serving(0), ask(0, 100), ask(1, 100))
    routing.complete(0, [1], 9, aborted=True)
    routing.set_failed("a", True)
    routing.update(Fleet(2, (ReplicaInfo("a", "http://a", 0, "starting", None, True),)))
    assert not routing.replicas["a"].serving
    routing.update(serving(1))
    a = routing.replicas["a"]
    assert (a.serving, a.version, a.paused) == (True, 1, False)
    assert list(a.tokens_in_flight) == [1]  # it still runs there


def test_equal_replicas_are_not_all_begun_at_the_first() -> None:
    first = {routed(serving(0, 0, 0, 0), ask(0, episode=f"{i}.0.0"))[1][0].replica for i in range(40)}
    assert first == set("abcd")


def test_how_long_completions_are_is_learnt() -> None:
    routing, _ = routed(serving(0), ask(0, 10, max_tokens=500))
    assert routing.replicas["a"].load == 10 + INITIAL_LENGTH
    for number in range(200):
        routing.complete(number, range(9), 0, aborted=False)
        routing.enqueue(ask(number + 1, 10, max_tokens=500))
        routing.assign()
    assert routing.replicas["a"].load == 10 + 9
    routing.enqueue(ask(900, 10, max_tokens=2))
    routing.assign()
    assert routing.replicas["a"].load == 10 + 9 + 10 + 2


# --- false replies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "ends"), [(1, True), (10, True), (40, True), (100, False), (1000, False)])
def test_a_share_of_lies_is_proof_however_long_it_takes(every: int, ends: bool) -> None:
    """One lie among `every` replies, for 20,000 replies."""
    seen = ReplicaSuspicion()
    for number in range(20_000):
        if number % every == 0:
            seen.add_false("a lie")
        else:
            seen.add_true()
    assert seen.proven is ends
    assert (seen.level < 2.0) is not ends


def test_a_proof_is_not_taken_back() -> None:
    seen = ReplicaSuspicion()
    for _ in range(int(SUSPICION_LIMIT)):
        seen.add_false("a lie")
    assert not any(seen.add_true() for _ in range(1000))
    assert (seen.proven, seen.level) == (True, SUSPICION_LIMIT)


def test_a_level_is_reported_where_it_has_fallen_by_one_and_to_nothing() -> None:
    seen = ReplicaSuspicion()
    seen.add_false("a lie")
    seen.add_false("a lie")
    reported = [number for number in range(1, 200) if seen.add_true()]
    assert len(reported) == 3
    assert reported[-1] == pytest.approx(2 / SUSPICION_LEAK, abs=1)


def lying(fleet: Fleet) -> RoutingTable:
    """Of a router to which `a` has been proven to lie."""
    routing, _ = routed(fleet)
    for _ in range(int(SUSPICION_LIMIT)):
        routing.replicas["a"].suspicion.add_false("a lie")
    routing.set_failed("a", True)
    return routing


def at(state: Literal["starting", "serving"], *, url: str = "http://a", incarnation: int = 0) -> Fleet:
    return Fleet(2, (ReplicaInfo("a", url, incarnation, state, 1 if state == "serving" else None),))


def test_a_replica_that_was_proven_to_lie_serves_again_as_another_process_alone() -> None:
    routing = lying(serving(0))
    routing.set_failed("a", False)
    assert not routing.replicas["a"].serving
    for fleet in (at("starting"), at("serving"), at("serving", url="http://elsewhere")):
        routing.update(fleet)
        assert not routing.replicas["a"].serving
        assert routing.replicas["a"].suspicion.count == SUSPICION_LIMIT
        routing.enqueue(ask(0))
        assert routing.assign() == []
        routing.remove(0)
    routing.update(at("serving", incarnation=1))
    assert routing.replicas["a"].serving
    assert routing.replicas["a"].suspicion.count == 0
