"""Laws of the simulated run: what must hold whatever the profile, and what others have measured."""

from __future__ import annotations

import msgspec
import pytest
from slipstream.benchmarks.simulator import cluster, laptop
from slipstream.buffer.admission import Admission
from slipstream.errors import ConfigError, StateError
from slipstream.planner.closed_form import estimate
from slipstream.planner.engine import DecodeCurve
from slipstream.planner.figures import RunFigures
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.profile import EngineProfile, LearnerProfile, PushProfile, RunProfile
from slipstream.planner.run import SimulatedRun, simulate
from slipstream.planner.workload import EpisodeShape, Lognormal, Observed, TurnShape

TAILED = Lognormal(mean=200.0, sigma=0.9, most=2000, prompt=20, turns=2, environment_s=0.5)


def profile_of(workload: Lognormal | Observed = TAILED, **settings: int | str) -> RunProfile:
    """Four replicas of 32, batches of eight groups of four; keys of `settings` have `__` for the dot."""
    chosen = {
        "buffer.max_staleness": 1,
        "buffer.groups_per_batch": 8,
        "buffer.group_size": 4,
        "rollout.engine.replicas": 4,
        "rollout.engine.max_concurrent": 32,
    }
    return RunProfile(
        settings=chosen | {key.replace("__", "."): value for key, value in settings.items()},
        environments=(workload,),
        engine=EngineProfile(DecodeCurve(((0.0, 0.01), (32.0, 0.02))), prefill_s=1e-4),
        learner=LearnerProfile((4.4e-4, 4.6e-4)),
        push=PushProfile(0.1, 0.05),
    )


def plan_of(workload: Lognormal | Observed = TAILED, **settings: int | str) -> SimulationPlan:
    return SimulationPlan.of(profile_of(workload, **settings))


@pytest.mark.parametrize("workers", [1, 3])
def test_a_seed_decides_everything(workers: int) -> None:
    plan = plan_of(rollout__workers=workers)
    one, again, other = (simulate(plan, 12, seed) for seed in (3, 3, 4))
    assert (one.figures, one.samples, one.events) == (again.figures, again.samples, again.events)
    assert one.figures != other.figures


class WatchedRun(SimulatedRun):
    """Looks at the ledger and at the ages of trained tokens after every commit."""

    commits = 0
    trained = 0

    def _commit(self) -> None:
        super()._commit()
        self.commits += 1
        ledgers, bound = self.replay.table.ledgers, self.plan.admission.max_staleness
        assert ledgers.gap() == ""
        assert ledgers.total.balances
        assert max(self._lags, default=0) <= bound
        assert min(self._lags, default=0) >= 0
        self.trained += sum(self._lags.values())
        assert ledgers.total.trained == self.trained
        assert sum(self.replay.leases.outstanding()) <= (bound + 1) * self.plan.admission.groups_per_batch


@pytest.mark.parametrize(
    "settings",
    [
        {"buffer__max_staleness": 0},
        {"buffer__max_staleness": 1, "rollout__workers": 3},
        {"buffer__max_staleness": 4, "buffer__groups_per_batch": 2},
        {"buffer__min_members": 3},
        {"buffer__on_deadline": "drop", "buffer__groups_per_batch": 2},
        {"buffer__on_deadline": "wait", "buffer__groups_per_batch": 2},
        {"rollout__partial": "keep_kv", "weightsync__cohort": 4},
        {"rollout__engine__replicas": 20, "rollout__engine__max_concurrent": 4},
        {"buffer__filter": "best_worst"},
    ],
    ids=str,
)
def test_the_ledger_balances_and_no_trained_token_is_too_old(settings: dict[str, int | str]) -> None:
    run = WatchedRun(plan_of(**settings), 0)
    result = run.run(15)
    assert run.commits >= 15
    assert len(result.samples) == 15
    if "drop" in settings.values() or "buffer__min_members" in settings:
        assert run.replay.table.ledgers.total.discarded  # episodes were cancelled
    if settings.get("buffer__max_staleness") == 0:
        assert result.figures.staleness == 0


@pytest.mark.parametrize(("turns", "alone_s"), [(1, 0.01), (3, 0.0125)])
def test_without_run_ahead_and_with_equal_lengths_arithmetic_gives_the_cycle(turns: int, alone_s: float) -> None:
    """Eight episodes on each replica. With several turns some replica may have nine for a while, so that a step takes the same
    time with any number there."""
    equal = Lognormal(mean=300.0, sigma=0.0, most=300, prompt=0, turns=turns, environment_s=0.25)
    decode = DecodeCurve(((0.0, alone_s), (8.0, 0.0125)))
    plan = msgspec.structs.replace(plan_of(equal, buffer__max_staleness=0), decode=decode, prefill_s=0.0)
    cycle_s = simulate(plan, 40).figures.cycle_s
    assert cycle_s == pytest.approx(300 * 0.0125 + turns * 0.25 + 32 * 300 * 4.5e-4 + 4 * 0.1, rel=0.01)
    assert cycle_s == pytest.approx(estimate(plan).cycle_s, rel=0.01)


@pytest.mark.parametrize(("turn_s", "start_s", "workers"), [(0.01, 0.0, 1), (0.0, 0.02, 1), (0.01, 0.02, 4)])
def test_a_worker_computes_for_one_episode_at_a_time(turn_s: float, start_s: float, workers: int) -> None:
    """Of 32 episodes that begin and end together, each worker plays as many as the others."""

    def cycle_s(turn_s: float, start_s: float) -> float:
        alike = (EpisodeShape(1.0, 300, (TurnShape(0, 300, 0.0, turn_s),), 0, 0.0, start_s),) * 4
        plan = plan_of(Observed((alike,)), buffer__max_staleness=0, rollout__workers=workers)
        return simulate(msgspec.structs.replace(plan, prefill_s=0.0, step_s=(4.5e-4,)), 20).figures.cycle_s

    longer = cycle_s(turn_s, start_s) - cycle_s(0.0, 0.0)
    assert longer == pytest.approx(32 / workers * (turn_s + start_s), rel=0.02)


def test_a_group_waits_for_its_request_and_its_lease_to_be_computed() -> None:
    """One group at a time: before each the worker computes one request and the lease of four members, while its slots are empty."""

    def figures(lease_work_s: float) -> RunFigures:
        alike = (EpisodeShape(1.0, 300, (TurnShape(0, 300, 0.0),), lease_work_s=lease_work_s),) * 4
        plan = plan_of(Observed((alike,)), buffer__max_staleness=0, rollout__max_episodes=4)
        return simulate(msgspec.structs.replace(plan, prefill_s=0.0, step_s=(4.5e-4,)), 20).figures

    at_once, found = figures(0.0), figures(0.02)
    longer = (8 * 5 - 1) * 0.02  # of the batch's eight groups the first was requested during the step
    assert found.cycle_s - at_once.cycle_s == pytest.approx(longer, rel=0.01)
    assert found.rollout_idle * found.cycle_s - at_once.rollout_idle * at_once.cycle_s == pytest.approx(
        longer, rel=0.01
    )


def test_a_worker_is_slower_while_the_learner_computes() -> None:
    """At a bound of 0 none works then."""
    alike = (EpisodeShape(1.0, 300, (TurnShape(0, 300, 0.0, 0.02),), 0, 0.0, 0.02),) * 4

    def episode_s(bound: int, contention: float) -> float:
        plan = plan_of(Observed((alike,)), buffer__max_staleness=bound)
        found = simulate(msgspec.structs.replace(plan, worker_contention=contention), 20).figures.episode_s
        assert found is not None
        return found

    assert episode_s(0, 3.0) == episode_s(0, 1.0)
    assert episode_s(2, 3.0) > episode_s(2, 1.0) + 0.1


def test_on_shared_cores_both_sides_are_slower_where_both_work() -> None:
    """At a bound of 0 they take turns. Beyond, the learner is the limit: its steps take twice as long, its pushes do not, since
    all that the bound allows has been played when they begin."""
    equal = Lognormal(mean=300.0, sigma=0.0, most=300, prompt=0)
    alone = msgspec.structs.replace(plan_of(equal, buffer__max_staleness=0), prefill_s=0.0, step_s=(9e-4,))
    shared = msgspec.structs.replace(alone, contention=2.0, learner_contention=2.0)
    assert simulate(shared, 20).figures == simulate(alone, 20).figures
    bound = Admission(2, alone.admission.groups_per_batch)
    ahead = (msgspec.structs.replace(plan, admission=bound) for plan in (alone, shared))
    one, two = (simulate(plan, 40) for plan in ahead)
    assert one.figures.learner_wait < 0.02
    assert two.figures.step_s == pytest.approx(2 * one.figures.step_s, rel=0.01)
    assert two.figures.push_s == pytest.approx(one.figures.push_s)


def test_the_closed_form_is_close_at_other_bounds() -> None:
    for bound in (1, 2, 4):
        plan = plan_of(buffer__max_staleness=bound)
        assert estimate(plan).cycle_s == pytest.approx(simulate(plan, 30).figures.cycle_s, rel=0.3)


def verl(bound: int, quarters: int, replicas: int, step_s: float) -> float:
    """Seconds for a batch of 1,024 answers of verl's published run of fully asynchronous training, at an eighth of its size:
    answers of 5,000 tokens on average, cut at 28,672, on H20 GPUs; `quarters` of a batch in each step."""
    workload = Lognormal(mean=5000.0, sigma=0.9, most=28672, prompt=300)
    settings = {
        "buffer.max_staleness": bound,
        "buffer.groups_per_batch": 64 // quarters,
        "buffer.group_size": 16,
        "rollout.engine.replicas": replicas,
        "rollout.engine.max_concurrent": 256,
        "weightsync.cohort": replicas,
    }
    tokens = 1024 * (4940 + 300)
    profile = RunProfile(
        settings=settings,
        environments=(workload,),
        engine=EngineProfile(DecodeCurve(((0.0, 5.6e-3), (100.0, 11.6e-3)))),
        learner=LearnerProfile((step_s / tokens,)),
        push=PushProfile(2.0, 1.0),
    )
    return quarters * simulate(SimulationPlan.of(profile), bound + 3 + 16).figures.cycle_s


@pytest.mark.full
def test_the_gain_of_asynchrony_that_verl_published_comes_out() -> None:
    """356 s for a synchronous step, 151 s with half a batch of run-ahead (2.4 times), and nothing more beyond."""
    synchronous = verl(0, 1, 16, 53.92 + 113.81)
    half, whole = verl(5, 4, 8, 113.16), verl(7, 4, 8, 113.16)
    assert synchronous == pytest.approx(356, rel=0.1)
    assert 2.0 <= synchronous / half <= 3.0
    assert half / whole < 1.1


def test_a_larger_bound_trains_no_slower_and_on_older_tokens() -> None:
    found = [simulate(plan_of(buffer__max_staleness=bound), 30).figures for bound in (0, 1, 2)]
    assert found[0].cycle_s > found[1].cycle_s >= 0.97 * found[2].cycle_s
    assert found[0].staleness == 0 < found[1].staleness < found[2].staleness
    assert found[0].learner_wait > found[1].learner_wait


def test_groups_without_a_signal_are_replaced_and_a_run_of_nothing_else_is_named() -> None:
    turn = (TurnShape(10, 50, 0.1),)
    alike = tuple(EpisodeShape(1.0, 60, turn) for _ in range(4))
    mixed = (EpisodeShape(0.0, 60, turn), *alike[1:])
    half = profile_of(Observed((alike, mixed)), buffer__dynamic_sampling="true")
    once = simulate(SimulationPlan.of(half), 12).figures
    plain = simulate(SimulationPlan.of(half, ("buffer.dynamic_sampling=false",)), 12).figures
    assert once.generated_tokens_per_s / once.trained_tokens_per_s == pytest.approx(2, rel=0.25)
    assert plain.generated_tokens_per_s / plain.trained_tokens_per_s == pytest.approx(1, rel=0.15)
    with pytest.raises(StateError, match="equal rewards"):
        simulate(SimulationPlan.of(profile_of(Observed((alike,)), buffer__dynamic_sampling="true")), 12)


def test_environments_have_their_shares_of_a_batch() -> None:
    slow = Lognormal(mean=50.0, sigma=0.0, most=50, environment_s=5.0, share=1.0)
    quick = Lognormal(mean=400.0, sigma=0.0, most=400, share=3.0)
    profile = msgspec.structs.replace(profile_of(), environments=(slow, quick))
    for sample in simulate(SimulationPlan.of(profile), 12).samples:
        assert sum(sample.tokens_by_staleness.values()) + sample.withheld == 4 * (2 * 50 + 6 * 400)


def test_the_learner_computes_no_episode_that_has_nothing_to_train() -> None:
    tail = Lognormal(mean=200.0, sigma=1.2, most=2000)
    samples = simulate(plan_of(tail, buffer__max_staleness=1), 30).samples
    sampled = [(sum(one.tokens_by_staleness.values()), one.withheld, one.context) for one in samples]
    assert all(trained <= context <= trained + withheld for trained, withheld, context in sampled)
    assert any(context < trained + withheld for trained, withheld, context in sampled)
    assert any(trained < context for trained, _, context in sampled)


def test_ranks_divide_the_step_and_what_is_no_setting_of_a_simulation_is_refused() -> None:
    profile = profile_of()
    assert SimulationPlan.of(profile, ("learner.backend.ranks=2",)).step_s == pytest.approx((2.2e-4, 2.3e-4))
    for override, why in (
        ("learner.optimizer.lr=1e-3", "learner.optimizer.lr: has no part in a simulation; allowed are buffer.max"),
        ("buffer.max_stale=1", "buffer.max_stale: is no key of a config"),
        ("buffer.max_staleness=-1", "buffer.max_staleness: -1 is not allowed"),
        ("buffer.min_members=9", "buffer.min_members=9: allowed are 0"),
    ):
        with pytest.raises(ConfigError, match=why):
            SimulationPlan.of(profile, (override,))


@pytest.mark.full
def test_two_steps_of_ten_thousand_gpus_are_planned_in_a_minute() -> None:
    """The first of a plan's five. They have more than half of its events: before the first step the rollout plays the batches that
    it may be ahead."""
    result = simulate(SimulationPlan.of(cluster()), 2)
    assert len(result.samples) == 2
    assert result.events > 220_000
    assert result.cpu_s < 130  # 30 s on a machine that does nothing else


def test_what_the_benchmark_simulates_is_a_busy_run() -> None:
    figures = simulate(SimulationPlan.of(laptop()), 60).figures
    assert 0 < figures.rollout_idle < 1
    assert figures.trained_tokens_per_s > 0
