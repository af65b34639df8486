"""What a search decides: its grid, what arithmetic rules out, how minutes are spent, what probes correct, and the choice."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream.errors import ConfigError
from slipstream.planner.closed_form import estimate
from slipstream.planner.figures import RunFigures
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.profile import LearnerProfile, RunProfile
from slipstream.planner.tune.choice import ALIKE, FRESH, EssCurve, PointRating, best_of, choose, on_frontier, promising
from slipstream.planner.tune.halving import STEPS, WIDEST, ExpectedProbe, expected_s, schedule
from slipstream.planner.tune.residual import ProbedRate, Residual
from slipstream.planner.tune.search import ProbeResult, TuneSearch
from slipstream.planner.tune.space import (
    BOUND,
    CONCURRENT,
    GROUPS,
    MARGIN,
    MINIBATCHES,
    RANKS,
    REPLICAS,
    EstimatedPoint,
    Point,
    SearchLimits,
    affordable,
    estimate_point,
    grid_of,
    prune,
    search_of,
    simulated,
)
from slipstream.tests.test_planner_profile import TRUTH

OWN = {BOUND: 1, GROUPS: 4, "buffer.group_size": 4, CONCURRENT: 24, "buffer.filter": "none"}
RATES = st.floats(10.0, 1e6)


def grid(profile: RunProfile = TRUTH, minibatches: int = 1, devices: int | None = 2, *over: str) -> list[Point]:
    guess = estimate(SimulationPlan.of(profile))
    return grid_of(profile, guess, SearchLimits(minibatches, devices), search_of(over))


# --- the grid -----------------------------------------------------------------------------------------------------


def test_the_grid_has_the_own_settings_first_and_every_other_once() -> None:
    points = grid()
    assert points[0] == {}
    assert len({frozenset(point.items()) for point in points}) == len(points) > 50
    assert {point.get(BOUND, "1") for point in points} >= {"0", "1", "2"}
    assert all(point.get(key) != str(OWN[key]) for point in points for key in point.keys() & OWN.keys())


@pytest.mark.parametrize("minibatches", [1, 2, 4])
def test_an_optimizer_step_keeps_its_episodes(minibatches: int) -> None:
    points = grid(TRUTH, minibatches, 2, GROUPS)
    assert len(points) > 1
    for point in points:
        groups, steps = int(point.get(GROUPS, "4")), int(point.get(MINIBATCHES, minibatches))
        assert groups * minibatches == 4 * steps


@pytest.mark.parametrize(("devices", "ways"), [(None, 1), (2, 1), (4, 4), (64, 10)])
def test_devices_are_all_used_and_never_more(devices: int | None, ways: int) -> None:
    points = grid(TRUTH, 1, devices, REPLICAS)
    assert len(points) == ways  # with the own ones, 1 and 1
    for point in points[1:]:
        assert int(point.get(REPLICAS, "1")) + int(point.get(RANKS, "1")) == devices


def test_a_learner_whose_copies_have_several_ranks_grows_by_whole_copies() -> None:
    two = msgspec.structs.replace(
        TRUTH,
        settings=TRUTH.settings | {RANKS: 2},
        learner=LearnerProfile((3e-4,), ranks=2, ranks_per_copy=2),
    )
    assert {point.get(RANKS, "2") for point in grid(two, 1, 8, RANKS)} == {"2", "4", "6"}


def test_values_of_the_user_are_the_ones_that_are_tried() -> None:
    points = grid(TRUTH, 1, 2, f"{BOUND}=0,1,3", "rollout.workers=1,2")
    assert len(points) == 6
    assert {point.get(BOUND, "1") for point in points} == {"0", "1", "3"}
    assert len(grid(TRUTH, 1, 2, f"{BOUND},{CONCURRENT}")) == len(grid(TRUTH, 1, 2, BOUND)) * len(
        grid(TRUTH, 1, 2, CONCURRENT)
    )


def test_values_of_the_user_that_want_more_devices_than_there_are_are_left_out() -> None:
    limits = SearchLimits(devices=4)
    points = grid(TRUTH, 1, 4, f"{REPLICAS}=1,3,4,x", f"{RANKS}=1,2", f"{BOUND}=0,1")
    left = affordable(TRUTH, points, limits)
    assert len(points) == 16
    placed = {(point.get(REPLICAS, "1"), point.get(RANKS, "1")) for point in left}
    assert placed == {("1", "1"), ("1", "2"), ("3", "1"), ("x", "1"), ("x", "2")}  # `x` is for the config to refuse
    assert all(SimulationPlan.of(TRUTH, simulated(one)).gpus <= 4 for one in left if one.get(REPLICAS) != "x")
    assert affordable(TRUTH, points, SearchLimits(devices=None)) == points
    wide = msgspec.structs.replace(TRUTH, settings=TRUTH.settings | {RANKS: 8})
    assert {} in affordable(wide, grid(wide, 1, 4, BOUND), limits)  # the config's own wants more


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("learner.steps=1,2", "no simulation knows this key"),
        ("rollout.workers", "name its values, as in --over rollout.workers=a,b"),
        (f"{BOUND}=1,", "a value is missing"),
    ],
)
def test_wrong_keys_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        search_of([text])


def test_too_large_a_grid_is_refused() -> None:
    values = ",".join(map(str, range(50)))
    with pytest.raises(ConfigError, match="2500 combinations of settings; allowed are 2000"):
        grid(TRUTH, 1, 2, f"{BOUND}={values}", f"rollout.workers={values.replace('0,', '50,', 1)}")


@given(st.lists(st.tuples(st.integers(0, 8), RATES, st.booleans()), min_size=1, max_size=40), st.integers(1, 50))
def test_pruning_keeps_the_own_settings_and_what_may_be_best(found: list[tuple[int, float, bool]], most: int) -> None:
    estimated = [
        EstimatedPoint({BOUND: str(i)} if i else {}, bound, rate, useless)
        for i, (bound, rate, useless) in enumerate(found)
    ]
    kept = prune(estimated, most)
    assert kept[0] == {}
    assert len(kept) <= most
    by_point = {tuple(one.point.items()): one for one in estimated}
    for point in kept[1:]:
        one = by_point[tuple(point.items())]
        assert not one.useless
        rivals = [other.tokens_per_s for other in estimated if other.bound <= one.bound]
        assert one.tokens_per_s * (1 + MARGIN) >= max(rivals)
    fastest = max(estimated, key=lambda one: one.tokens_per_s)
    if most >= len(estimated) and not fastest.useless:
        assert fastest.point in kept


def test_the_closed_form_of_a_point_is_that_of_its_plan() -> None:
    own, other = (estimate_point(TRUTH, point) for point in ({}, {BOUND: "4", MINIBATCHES: "2"}))
    plan = SimulationPlan.of(TRUTH, (f"{BOUND}=4",))
    assert (own.bound, other.bound) == (1, 4)
    assert other.tokens_per_s / own.tokens_per_s == pytest.approx(
        estimate(SimulationPlan.of(TRUTH)).cycle_s / estimate(plan).cycle_s
    )
    with pytest.raises(ConfigError, match="max_staleness: -1"):
        estimate_point(TRUTH, {BOUND: "-1"})


# --- how minutes are spent ----------------------------------------------------------------------------------------

PROBES = st.lists(
    st.builds(ExpectedProbe, st.floats(0.0, 60.0), st.integers(3, 20), st.floats(0.01, 30.0)), min_size=1, max_size=20
)


OWN_PROBE = ExpectedProbe(40.0, 5, 1.0)


@given(PROBES, st.floats(0.0, 5000.0))
def test_a_schedule_fits_its_budget_and_goes_from_many_short_to_few_long(
    probes: list[ExpectedProbe], budget_s: float
) -> None:
    rungs = schedule(probes, OWN_PROBE, budget_s)
    if not rungs:
        assert budget_s < probes[0].seconds(STEPS[0])
        return
    assert expected_s(rungs, probes, OWN_PROBE) <= budget_s
    assert [rung.steps for rung in rungs] == list(STEPS[: len(rungs)])
    widths = [rung.points for rung in rungs]
    assert widths[1:] == sorted(widths[1:], reverse=True)
    assert widths[0] <= min(WIDEST, len(probes))
    assert not any(rung.again for rung in rungs[:-1])
    assert not rungs[-1].again or rungs[-1].points == 2 or len(rungs) == 1


def test_more_minutes_buy_more_rungs_and_points() -> None:
    probes = [ExpectedProbe(40.0, 5, 1.0)] * 12
    shapes = [[rung.points for rung in schedule(probes, OWN_PROBE, 60 * m)] for m in (0.5, 1, 3, 5, 8, 60)]
    assert shapes == [[], [1], [3], [3, 2], [4, 2], [8, 4, 2]]
    assert schedule(probes, OWN_PROBE, 3600)[-1].again
    assert [rung.points for rung in schedule(probes[:1], OWN_PROBE, 3600)] == [1, 2]
    (rung,) = schedule(probes[:2], OWN_PROBE, 3 * OWN_PROBE.seconds(STEPS[0]) + 1)
    assert rung.again  # two points between two probes of the own settings


# --- what probes correct ------------------------------------------------------------------------------------------

POINTS = st.fixed_dictionaries(
    {},
    optional={
        BOUND: st.integers(0, 16).map(str),
        CONCURRENT: st.integers(1, 512).map(str),
        "buffer.on_deadline": st.just("wait"),
    },
)


@given(st.lists(POINTS, max_size=8), POINTS, st.floats(0.2, 5.0))
def test_a_common_factor_corrects_every_point(probed: list[Point], point: Point, factor: float) -> None:
    residual = Residual(OWN, [ProbedRate(one, 100.0 * factor, 100.0, 6) for one in probed])
    assert residual.factor(point) == pytest.approx(factor if probed else 1.0, rel=1e-6)


@given(st.permutations([0, 1, 2, 4, 8]))
def test_a_knob_that_the_simulation_has_wrong_is_learned_from_enough_probes(order: list[int]) -> None:
    def truth(bound: int) -> float:
        return 0.9 * ((1 + bound) / 2) ** 0.1

    probes = [ProbedRate({BOUND: str(b)} if b != 1 else {}, 100 * truth(b), 100.0, 24) for b in order]
    residual = Residual(OWN, probes)
    assert residual.factor({BOUND: "3"}) == pytest.approx(truth(3), rel=0.02)
    assert residual.factor({BOUND: "3"}) == pytest.approx(Residual(OWN, sorted(probes, key=str)).factor({BOUND: "3"}))
    assert residual.factor({CONCURRENT: "48"}) == pytest.approx(truth(1), rel=0.02)  # another knob is another matter


def test_one_short_probe_does_not_move_a_knob_far() -> None:
    own, other = ProbedRate({}, 100.0, 100.0, 7), ProbedRate({BOUND: "3"}, 70.0, 100.0, 6)
    factor = Residual(OWN, [own, other]).factor({BOUND: "3"})
    assert 0.71 < factor < 0.9
    assert abs(math.log(Residual(OWN, [own, *[other] * 8]).factor({BOUND: "3"}) / 0.7)) < abs(math.log(factor / 0.7))


# --- the choice ---------------------------------------------------------------------------------------------------


def rating(rate: float, staleness: float = 1.0, ess: float = 1.0, devices: int = 2, changes: int = 0) -> PointRating:
    return PointRating(rate, ess * rate, staleness, ess, devices, changes)


RATINGS = st.lists(
    st.builds(rating, RATES, st.floats(0.0, 8.0), st.floats(0.5, 1.0), st.integers(2, 8), st.integers(0, 3)),
    min_size=1,
    max_size=12,
)


@given(RATINGS, st.randoms(use_true_random=False))
def test_the_choice_is_fresh_and_as_fast_as_any_that_is(found: list[PointRating], rng: random.Random) -> None:
    chosen = found[choose(found)]
    fresh = [one for one in found if one.ess >= FRESH]
    if fresh:
        assert chosen.ess >= FRESH
        assert chosen.tokens_per_s >= (1 - ALIKE) * max(one.tokens_per_s for one in fresh)
        alike = [one for one in fresh if one.tokens_per_s >= (1 - ALIKE) * max(o.tokens_per_s for o in fresh)]
        assert chosen.staleness <= min(one.staleness for one in alike) + 0.1
    else:
        pairs = [(one.ess_tokens_per_s, one.staleness) for one in found]
        assert on_frontier(pairs)[found.index(chosen)]
    shuffled = rng.sample(found, len(found))
    again = shuffled[choose(shuffled)]
    assert (round(again.staleness, 1), again.devices, again.changes) == (
        round(chosen.staleness, 1),
        chosen.devices,
        chosen.changes,
    ) or not fresh


def test_the_knee_is_where_more_age_stops_paying() -> None:
    ages = [0.0, 1.0, 2.0, 4.0]
    rates = [100.0, 180.0, 190.0, 195.0]
    found = [rating(rate, age, ess=0.5) for rate, age in zip(rates, ages, strict=True)]
    assert choose(found) == 1
    assert choose([rating(100.0, 2.0, 0.5)]) == 0


@given(RATINGS)
def test_the_frontier_beats_the_others_and_none_of_itself(found: list[PointRating]) -> None:
    pairs = [(one.tokens_per_s, one.staleness) for one in found]
    front = on_frontier(pairs)
    for pair, on in zip(pairs, front, strict=True):
        beaten = any(o[0] >= pair[0] and o[1] <= pair[1] and o != pair for o in pairs)
        assert on != beaten
    order = promising(found)
    assert sorted(order) == list(range(len(found)))
    assert sorted(best_of(found, len(found))) == sorted(order)
    assert best_of(found, 1) == [choose(found)]


def test_of_points_that_are_alike_the_simplest_is_promising_alone() -> None:
    found = [rating(1000.0, 1.0, changes=2), rating(990.0, 1.02, changes=1), rating(400.0, 0.0)]
    order = promising(found)
    assert order.index(1) < order.index(0)
    assert order[-1] == 0


@given(st.dictionaries(st.integers(0, 8), st.floats(0.01, 1.0), max_size=6), st.integers(0, 30))
def test_ess_is_what_was_measured_and_falls_beyond(measured: dict[int, float], staleness: int) -> None:
    curve = EssCurve(measured)
    assert 0.0 <= curve.at(staleness) <= 1.0
    if staleness in measured:
        assert curve.at(staleness) == measured[staleness]
    beyond = max(measured, default=0) + 1
    assert curve.at(beyond + 1) <= curve.at(beyond)


# --- what a search knows ------------------------------------------------------------------------------------------


def figures(rate: float, lags: dict[int, float], steps: int = 6) -> RunFigures:
    return RunFigures(
        steps=steps,
        trained_tokens_per_s=rate,
        generated_tokens_per_s=rate,
        cycle_s=1.0,
        step_s=0.8,
        push_s=0.1,
        learner_wait=0.1,
        rollout_idle=0.1,
        slots=8.0,
        staleness=sum(lag * share for lag, share in lags.items()),
        tokens_by_staleness=lags,
        withheld=0.0,
    )


def test_probes_correct_the_others_and_only_what_was_probed_is_chosen() -> None:
    search = TuneSearch(TRUTH)
    points: list[Point] = [{}, {BOUND: "2"}, {BOUND: "3"}, {BOUND: "4"}]
    for i, point in enumerate(points):
        search.add(point, figures(100.0 + 50 * i, {i: 1.0}))
    search.add({CONCURRENT: "96"}, figures(100.0, {0: 1.0}))  # as {}: the key makes no difference
    search.probed({}, ProbeResult("probe-00", figures(80.0, {0: 1.0}, 7), {0: 1.0}, 50.0, 40.0))
    assert {BOUND: "4"} in search.promising(3)
    assert {} not in search.promising(9)
    assert {CONCURRENT: "96"} not in search.promising(9)
    search.probed({BOUND: "2"}, ProbeResult("probe-01", figures(120.0, {1: 1.0}), {1: 0.98}, 50.0, 40.0))
    search.probed({BOUND: "4"}, ProbeResult("probe-02", figures(200.0, {3: 1.0}), {3: 0.5}, 50.0, 40.0))
    search.failed({BOUND: "3"})
    assert search.promising(9) == []
    assert search.undecided([{}, {BOUND: "2"}]) is False
    assert search.survivors([{}, {BOUND: "2"}, {BOUND: "4"}], 3) == [{BOUND: "2"}]
    found = search.results()
    (chosen,) = [point for point in found if point.chosen]
    assert (chosen.changes, chosen.frontier) == ({BOUND: "2"}, True)
    assert search.survivors([{}, {BOUND: "4"}], 1) == [{}]  # the other is faster, and not fresh
    (other,) = [point for point in found if point.changes == {BOUND: "3"}]
    assert other.measured is None
    assert other.expected.tokens_per_s == pytest.approx(0.8 * 200.0, rel=0.05)
    assert 0.5 < other.expected.ess < 0.98
    assert found[0].measured is not None
    assert found[-1] == other


def test_a_point_is_rated_by_its_probes_by_their_steps() -> None:
    search = TuneSearch(TRUTH)
    search.add({}, figures(100.0, {1: 1.0}))
    (point,) = search.results()
    assert (point.steps, point.withheld) == (0, 0.0)
    for name, rate, steps, withheld in (("a", 50.0, 6, 0.27), ("b", 90.0, 24, 0.0), ("c", 110.0, 24, 0.0)):
        measured = msgspec.structs.replace(figures(rate, {1: 1.0}, steps), withheld=withheld)
        search.probed({}, ProbeResult(name, measured, {1: 0.9}, 50.0, 40.0))
    (point,) = search.results()
    assert (point.steps, point.withheld) == (54, pytest.approx(0.03))
    assert point.measured is not None
    mean = (6 * 50 + 24 * 90 + 24 * 110) / 54
    assert point.measured.tokens_per_s == pytest.approx(mean)
    assert point.measured.ess_tokens_per_s == pytest.approx(0.9 * mean)
    assert point.measured.device_hours == pytest.approx(2 * 1e6 / mean / 3600)
