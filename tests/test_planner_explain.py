"""What explain finds: planted runs, whose truth is known, get the right change first; a balanced one gets none."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import pytest
from slipstream.configs import changed, load
from slipstream.planner.closed_form import estimate
from slipstream.planner.engine import DecodeCurve
from slipstream.planner.explain import gains
from slipstream.planner.explain.evidence import Evidence, Hardware, SlowestCall, tail_of
from slipstream.planner.explain.explain import find, in_order, possible
from slipstream.planner.explain.findings import Candidate, Explanation, Finding, Gain, Interval, Suspicion
from slipstream.planner.explain.gains import GainSimulator, interval
from slipstream.planner.explain.rules import suspicions
from slipstream.planner.figures import RunFigures
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.profile import EngineProfile, LearnerProfile, PushProfile, RunProfile
from slipstream.planner.run import simulate
from slipstream.planner.workload import EpisodeShape, Lognormal, Observed, TurnShape
from slipstream.tests.episodes import row_of, trajectory
from slipstream.tests.simulated_runs import config_of

LAPTOP = Hardware("cores", 2, 0, 2)


@functools.cache
def run_of(
    *,
    max_concurrent: int = 24,
    bound: int = 1,
    replicas: int = 1,
    step: float = 1e-3,
    environment_s: float = 0.0,
    push: tuple[float, float] = (0.05, 0.02),
    curve: tuple[tuple[float, float], ...] = ((0.0, 0.007), (24.0, 0.012)),
    workload: Observed | None = None,
) -> RunProfile:
    """A profile of a run that was simulated under its own settings: 2 groups of 4 episodes of about 60 tokens. By default playing a
    batch takes about as long as a step, so that a bound of 1 is right."""
    profile = RunProfile(
        settings={
            "buffer.max_staleness": bound,
            "buffer.groups_per_batch": 2,
            "buffer.group_size": 4,
            "rollout.engine.max_concurrent": max_concurrent,
            "rollout.engine.replicas": replicas,
        },
        environments=(workload or Lognormal(mean=60.0, sigma=0.3, most=400, prompt=30, environment_s=environment_s),),
        engine=EngineProfile(DecodeCurve(curve)),
        learner=LearnerProfile((step, 1.1 * step)),
        push=PushProfile(*push),
    )
    return msgspec.structs.replace(profile, measured=simulate(SimulationPlan.of(profile), 30, seed=99).figures)


def evidence_of(profile: RunProfile, hardware: Hardware = LAPTOP, **changes: Any) -> Evidence:
    """As `read_evidence` would read it, with `changes`."""
    measured, (workload,) = profile.measured, profile.environments
    assert measured is not None
    waited = workload.environment_s if isinstance(workload, Lognormal) else 0.0
    found = Evidence(
        run="runs/x",
        config=config_of(profile),
        hardware=hardware,
        steps=(5, 40),
        measured=measured,
        replicas=int(profile.settings["rollout.engine.replicas"]),
        replica_ranks=1,
        rank_copy=1,
        running=None,
        kv=None,
        worker_cpu=None,
        environment=waited / measured.episode_s if measured.episode_s else 0.0,
        tool=SlowestCall("tool search", 2.5, 100) if waited else None,
        tail=None,
        alike=0.0,
        alike_all=0.0,
        ess={0: 1.0},
        unseen=0,
    )
    return msgspec.structs.replace(found, **changes)


def found_in(profile: RunProfile, hardware: Hardware = LAPTOP, **changes: Any) -> list[Finding]:
    findings, missed, note = find(profile, evidence_of(profile, hardware, **changes))
    assert note == ""
    assert missed is None or abs(missed) < 0.1
    return findings


@pytest.fixture(autouse=True)
def _few_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gains, "SEEDS", (3, 3))
    monkeypatch.setattr("slipstream.planner.plan.COUNTED", 10)


def test_a_balanced_run_needs_nothing() -> None:
    assert found_in(run_of()) == []


def test_a_bound_that_is_too_high_comes_down_to_where_the_learner_never_waits() -> None:
    (finding,) = found_in(run_of(bound=6))
    assert (finding.rule, finding.cost, finding.live) == ("lower_bound", "free", True)
    assert finding.change in ("buffer.max_staleness=1", "buffer.max_staleness=2")
    assert finding.gain is not None
    assert finding.gain.staleness.high < -2
    assert finding.gain.trained_tokens_per_s.mean >= -gains.PRICE


def test_a_bound_that_is_too_low_goes_up() -> None:
    first, *_ = found_in(run_of(bound=0))
    assert (first.rule, first.change, first.cost) == ("higher_bound", "buffer.max_staleness=1", "age")
    assert first.gain is not None
    assert first.gain.trained_tokens_per_s.low > 0.2


def test_servers_that_are_full_decode_more_at_once_or_get_another_beside_them() -> None:
    first, *_ = found_in(run_of(max_concurrent=3, bound=2))
    assert first.rule == "more_sequences"
    assert first.change in ("rollout.engine.max_concurrent=6", "rollout.engine.max_concurrent=12")
    assert first.gain is not None
    assert first.gain.trained_tokens_per_s.low > 0.2
    # A step takes as much longer as it decodes more: only another server helps.
    busy = run_of(max_concurrent=8, bound=2, step=2e-4, curve=((0.0, 1e-5), (8.0, 0.016)))
    assert found_in(busy) == []  # two cores, both in use
    more = found_in(busy, Hardware("cores", 3, 0, 3))[0]
    assert (more.rule, more.change, more.live) == ("more_replicas", "rollout.engine.replicas=2", True)
    assert more.command("runs/a b", active=True) == "slipstream replicas 'runs/a b' add"
    theirs = changed(config_of(busy), ["rollout.engine.replicas={https://box1:8000: keys.json}"])
    found = found_in(busy, Hardware("cores", 3, 0, 3), config=theirs)
    assert {one.rule for one in found}.isdisjoint({"more_replicas", "other_split"})  # the run starts no server


def test_slow_tools_come_before_what_hides_them() -> None:
    first, *others = found_in(run_of(environment_s=2.0))
    assert (first.rule, first.change) == ("slow_environment", "make tool search faster")
    assert "95 % of its calls take less than 2.5 s" in first.text
    assert first.gain is not None
    assert first.gain.assuming == "environments take half the time"
    assert first.gain.trained_tokens_per_s.low > 0.2
    assert "higher_bound" in {one.rule for one in others}


def test_a_slow_push_is_the_first_to_change() -> None:
    first, *_ = found_in(run_of(push=(1.5, 0.05)))
    assert (first.rule, first.change) == ("slow_push", "weightsync.transport=shared")
    cohorts = found_in(run_of(push=(0.5, 0.05), replicas=8, step=6e-4), Hardware("cores", 9, 0, 9))[0]
    assert (cohorts.rule, cohorts.change) == ("slow_push", "weightsync.cohort=8")
    assert cohorts.gain is not None
    assert cohorts.gain.assuming == ""


def groups_of(alike: int, others: int) -> Observed:
    shape = [EpisodeShape(reward, 90, (TurnShape(30, 60, 0.0),)) for reward in (0.0, 1.0)]
    return Observed((*[(shape[1],) * 4] * alike, *[(shape[0], shape[1]) * 2] * others))


def test_groups_that_teach_nothing_are_a_warning_and_so_first() -> None:
    profile = run_of(workload=groups_of(6, 4), bound=6)
    first, *_ = found_in(profile, alike=0.6, alike_all=0.6)
    assert (first.rule, first.severity, first.change) == ("alike", "warning", "buffer.dynamic_sampling=true")
    assert first.gain is not None
    assert first.gain.of_signal
    slow = run_of(workload=groups_of(9, 1), step=1e-5, max_concurrent=2, curve=((0.0, 1e-5), (2.0, 0.004)))
    first, *_ = found_in(slow, alike=0.9, alike_all=0.9)  # servers are the limit: others would cost what they give
    assert (first.rule, first.change) == ("alike", "harder or more varied tasks")


def test_a_learner_that_compares_nothing_is_blind() -> None:
    first, *_ = found_in(run_of(bound=2, step=1.6e-3), unseen=20)
    assert (first.rule, first.severity) == ("blind", "warning")
    assert first.change in ("buffer.max_staleness=1", "buffer.max_staleness=0")
    assert first.gain is not None  # what it costs
    assert found_in(run_of(), unseen=19) == []


def test_no_change_needs_more_than_the_hardware() -> None:
    """Whatever waits for whom, and however many devices there are."""
    for profile in (run_of(bound=2, step=2e-4), run_of(bound=2, step=4e-3)):
        for devices in (1, 2, 3, 5):
            evidence = evidence_of(profile, Hardware("cores", devices, 0, devices), worker_cpu=0.95)
            for one in suspicions(evidence, SimulationPlan.of(profile), estimate(SimulationPlan.of(profile))):
                for candidate in one.candidates:
                    config = profile.config(candidate.overrides)
                    used = config.rollout.engine.replicas + config.learner.backend.ranks
                    assert used <= max(devices, 2), candidate
                    assert not candidate.change.startswith("rollout.workers") or devices >= used + 2


def test_devices_that_are_not_known_are_not_offered() -> None:
    profile = run_of(bound=2, step=4e-3)
    rules = {one.rule for one in suspected(profile, hardware=Hardware("GPUs", None, 0, 64))}
    assert not rules & {"more_ranks", "more_replicas"}
    assert "more_ranks" in {one.rule for one in suspected(profile, hardware=Hardware("GPUs", 3, 0, 64))}
    assert "more_ranks" not in {one.rule for one in suspected(profile, hardware=Hardware("GPUs", 3, 1, 64))}


# --- rules whose numbers come from other files than a profile -----------------------------------------------------


def suspected(profile: RunProfile | None = None, hardware: Hardware = LAPTOP, **changes: Any) -> list[Suspicion]:
    profile = profile or run_of()
    plan = SimulationPlan.of(profile)
    return list(suspicions(evidence_of(profile, hardware, **changes), plan, estimate(plan)))


def figures(**changes: Any) -> RunFigures:
    measured = run_of().measured
    assert measured is not None
    return msgspec.structs.replace(measured, **changes)


def only(rule: str, **changes: Any) -> Suspicion:
    return next(one for one in suspected(**changes) if one.rule == rule)


WAITING = {"learner_wait": 0.4, "rollout_idle": 0.02}


def test_a_full_cache_wants_memory_and_not_more_sequences() -> None:
    rules = {one.rule for one in suspected(measured=figures(**WAITING, slots=10.0), kv=0.96, running=0.8)}
    assert "full_cache" in rules
    assert "more_sequences" not in rules
    one = only("full_cache", measured=figures(**WAITING, slots=10.0), kv=0.96)
    assert one.candidates[0].change == "rollout.engine.memory=256MiB"
    assert not any(one.rule == "full_cache" for one in suspected(measured=figures(**WAITING, slots=10.0)))


def test_a_worker_that_fills_its_core_gets_another_where_a_core_is_free() -> None:
    busy = {"measured": figures(**WAITING), "worker_cpu": 0.95}
    assert only("full_worker", **busy, hardware=Hardware("GPUs", 8, 0, 32)).candidates[0].change == "rollout.workers=2"
    assert not any(one.rule == "full_worker" for one in suspected(**busy))
    (found,) = [one for one in found_in(run_of(), Hardware("GPUs", 8, 0, 32), **busy) if one.rule == "full_worker"]
    assert found.command("runs/x", active=True) == "slipstream workers runs/x add"
    assert found.command("runs/x", active=False) == "rollout.workers=2"


def test_a_long_tail_wants_fewer_members() -> None:
    assert only("long_tail", measured=figures(**WAITING), tail=0.6).candidates[0].change == "buffer.min_members=3"
    for chosen in (
        "buffer.filter=best",
        "buffer.min_members=3",
        "buffer.group_size=2",
        "learner.algorithm.advantage.kind=remax",
    ):
        config = load("quickstart", [chosen])
        assert not any(
            one.rule == "long_tail" for one in suspected(measured=figures(**WAITING), tail=0.6, config=config)
        )


def test_withheld_tokens_want_room_or_smaller_batches() -> None:
    changes = [one.change for one in only("withheld", measured=figures(withheld=0.2)).candidates]
    assert changes == ["buffer.max_staleness=2", "buffer.groups_per_batch=1"]
    for chosen in ("buffer.filter=best", "buffer.min_members=2"):
        config = load("quickstart", [chosen])
        assert not any(one.rule == "withheld" for one in suspected(measured=figures(withheld=0.2), config=config))


def test_tokens_that_do_not_count_are_a_warning() -> None:
    one = only("low_ess", ess={0: 0.99, 1: 0.9, 2: 0.6, 3: 0.4})
    assert (one.candidates[0].change, one.warning) == ("buffer.max_staleness=1", True)
    assert only("low_ess", ess={0: 0.5}).candidates[0].change == "learner.optimizer.lr=0.00015"


def test_a_teacher_judges_groups_of_equal_rewards_too() -> None:
    taught = load("quickstart", ["learner.algorithm.kl={kind: distillation, reference: teacher}"])
    assert "alike" not in {one.rule for one in suspected(alike=0.6, alike_all=0.6, config=taught)}
    assert "alike" in {one.rule for one in suspected(alike=0.6, alike_all=0.6)}


@pytest.mark.parametrize(
    ("rule", "evidence", "words", "left"),
    [
        ("withheld", {"withheld": 0.2}, ["learner.algorithm.minibatches=2"], ["buffer.max_staleness=2"]),
        ("withheld", {"withheld": 0.2}, ["buffer.shards=2"], ["buffer.max_staleness=2"]),
        ("withheld", {"withheld": 0.2}, [], ["buffer.max_staleness=2", "buffer.groups_per_batch=1"]),
        (
            "withheld",
            {"withheld": 0.2},
            ["buffer.max_staleness=0", "learner.algorithm.correction.kind=none"],
            ["buffer.groups_per_batch=1"],
        ),
        ("slow_push", {"push_s": 5.0}, ["rollout.engine.replicas={https://box1:8000: keys.json}"], []),
        ("slow_push", {"push_s": 5.0}, [], ["weightsync.transport=shared"]),
    ],
    ids=lambda value: "",
)
def test_a_change_that_the_runs_own_config_refuses_is_not_offered(
    rule: str, evidence: dict[str, Any], words: list[str], left: list[str]
) -> None:
    config = config_of(run_of(), *words)
    one = possible(only(rule, measured=figures(**evidence), config=config), config)
    assert [candidate.change for candidate in one.candidates] == left


def test_devices_move_to_the_side_that_lacks_them() -> None:
    four = run_of(replicas=4, bound=2, step=4e-3)
    idle = {"measured": figures(learner_wait=0.0, rollout_idle=0.5), "hardware": Hardware("GPUs", 5, 0, 32)}
    (candidate,) = next(one for one in suspected(four, **idle) if one.rule == "other_split").candidates
    assert candidate.overrides == ("rollout.engine.replicas=3", "learner.backend.ranks=2")
    assert candidate.change == "rollout.engine.replicas=3 learner.backend.ranks=2"


def test_the_last_members_share_of_a_group() -> None:
    def member(number: int, started: float, seconds: float) -> Any:
        row = row_of(trajectory(f"3.0.{number}", 0))
        return [msgspec.structs.replace(row, started=started, timings={"total": seconds})]

    assert tail_of([[member(i, 100.0, 4.0 if i else 10.0) for i in range(8)]]) == pytest.approx(0.6)
    assert tail_of([[member(i, 0.0, 4.0) for i in range(8)]]) is None  # of an older release
    assert tail_of([[member(0, 100.0, 4.0)]]) is None


# --- gains --------------------------------------------------------------------------------------------------------


def test_no_gain_is_claimed_by_a_simulation_that_misses_the_run() -> None:
    profile = run_of(bound=0)
    assert profile.measured is not None
    other = msgspec.structs.replace(profile, measured=figures(cycle_s=1.3 * profile.measured.cycle_s, **WAITING))
    findings, missed, note = find(other, evidence_of(profile))
    assert missed == pytest.approx(1 / 1.3 - 1, abs=0.05)
    assert note.startswith("no gain is claimed: the simulation of the run itself misses its cycle by -2")
    assert findings
    assert all(one.gain is None and one.rule != "lower_bound" for one in findings)


def test_gains_are_of_pairs_and_repeat_themselves() -> None:
    profile = run_of(bound=0)
    simulator = GainSimulator(profile, 1)
    nothing = simulator.figures(Candidate("", ("buffer.max_staleness=0",)))
    assert nothing == simulator.base
    gain = simulator.gain(Candidate(""), nothing)
    assert (gain.trained_tokens_per_s, gain.staleness) == (Interval(0, 0, 0), Interval(0, 0, 0))
    assert find(profile, evidence_of(profile)) == find(profile, evidence_of(profile))
    assert simulator.figures(Candidate("", ("buffer.max_staleness=-1",))) is None
    assert interval([1.0, 2.0, 3.0]).spread == pytest.approx(4.303 / 3**0.5)


def test_findings_are_in_the_order_of_what_they_cost() -> None:
    def finding(rule: str, severity: Any, cost: Any, gain: float | None) -> Finding:
        of = None if gain is None else Gain(Interval(gain, gain, gain), Interval(0, 0, 0), 3)
        return Finding(rule=rule, severity=severity, text="", evidence=(), change="", live=False, cost=cost, gain=of)

    rows = [
        finding("age", "hint", "age", 2.0),
        finding("devices", "hint", "devices", 1.0),
        finding("small", "hint", "free", 0.1),
        finding("large", "hint", "free", 0.5),
        finding("warning", "warning", "age", None),
    ]
    assert [one.rule for one in in_order(rows)] == ["warning", "large", "small", "devices", "age"]


def test_what_is_said_is_one_line_where_nothing_is_wrong() -> None:
    balanced = Explanation(run="runs/x", alerts=(), steps=(5, 40), measured=figures())
    (line,) = balanced.lines()
    assert line.startswith("balanced: steps 5–40: ")
    assert balanced.worst == ""
