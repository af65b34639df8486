"""Profiles: fitted to the folder of a run whose times are known, written, read and refused."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path

import msgspec
import pytest
from slipstream.buffer.ledger_report import ledger_report
from slipstream.buffer.schema import DATABASE
from slipstream.buffer.trajectory import BatchRow, Turn, VersionSpan
from slipstream.configs import changed, dump, load
from slipstream.errors import ConfigError, StoreError
from slipstream.launch.simulation import find_profile
from slipstream.planner.engine import DecodeCurve
from slipstream.planner.fit import _shape, profile_of
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.profile import (
    EngineProfile,
    LearnerProfile,
    PushProfile,
    RunProfile,
    read_profile,
    write_profile,
)
from slipstream.planner.run import simulate
from slipstream.planner.workload import EpisodeShape, Lognormal, Observed, TurnShape
from slipstream.tests.episodes import row_of, trajectory
from slipstream.tests.simulated_runs import RecordedRun

TRUTH = RunProfile(
    settings={
        "buffer.max_staleness": 1,
        "buffer.groups_per_batch": 4,
        "buffer.group_size": 4,
        "rollout.engine.max_concurrent": 24,
    },
    environments=(Lognormal(mean=60.0, sigma=0.7, most=400, prompt=30, turns=2, environment_s=0.1),),
    engine=EngineProfile(DecodeCurve(((0.0, 0.01), (32.0, 0.02))), prefill_s=5e-5),
    learner=LearnerProfile((3e-4, 4e-4), take_s=0.02),
    push=PushProfile(0.15, 0.05, once_s=0.05, canary_s=0.02),
    deliver_s=0.03,
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    RecordedRun(TRUTH, folder).record(60)
    return folder


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run without the times of its turns, and without spans."""
    folder = tmp_path_factory.mktemp("unrecorded") / "run"
    RecordedRun(TRUTH, folder, times=False).record(60)
    return folder


@pytest.mark.parametrize("folder", ["recorded", "unrecorded"])
def test_a_profile_of_a_run_predicts_the_run(folder: str, request: pytest.FixtureRequest) -> None:
    """The limits are those for real runs; the numbers here have no noise of a machine."""
    profile = profile_of(request.getfixturevalue(folder))
    measured, predicted = profile.measured, simulate(SimulationPlan.of(profile)).figures
    assert measured is not None
    assert predicted.cycle_s == pytest.approx(measured.cycle_s, rel=0.05)
    assert predicted.trained_tokens_per_s == pytest.approx(measured.trained_tokens_per_s, rel=0.07)
    assert predicted.learner_wait == pytest.approx(measured.learner_wait, abs=0.05)
    assert predicted.rollout_idle == pytest.approx(measured.rollout_idle, abs=0.06)
    assert predicted.staleness == pytest.approx(measured.staleness, abs=0.1)
    assert predicted.episode_s == pytest.approx(measured.episode_s, rel=0.05)


def test_a_profile_has_what_the_run_was(recorded: Path) -> None:
    profile = profile_of(recorded)
    assert profile.settings.items() >= TRUTH.settings.items()
    (workload,) = profile.environments
    assert isinstance(workload, Observed)
    shapes = [episode for group in workload.groups for episode in group]
    assert {len(group) for group in workload.groups} == {4}
    assert {(len(shape.turns), shape.turns[0].prompt, shape.turns[0].environment_s) for shape in shapes} == {
        (2, 30, 0.1)
    }
    assert sum(shape.sampled for shape in shapes) / len(shapes) == pytest.approx(60, rel=0.1)
    assert {shape.shared for shape in shapes} == {0, 29}  # the first member of a group brings the prompt into the cache
    assert {round(seconds, 6) for seconds in profile.learner.seconds_per_token} == {3e-4, 4e-4}
    assert profile.learner.take_s == pytest.approx(0.02)
    push = profile.push
    assert (push.once_s, push.cohort_s, push.pause_s, push.canary_s) == pytest.approx((0.05, 0.15, 0.05, 0.02))
    assert profile.deliver_s == pytest.approx(0.03, abs=1e-3)


def test_the_curve_of_a_run_that_recorded_its_completions_holds_at_other_loads(recorded: Path) -> None:
    engine = profile_of(recorded).engine
    assert engine.source == "recorded"
    assert engine.prefill_s == pytest.approx(TRUTH.engine.prefill_s, rel=0.5)
    for running in (4.0, 8.0, 16.0, 24.0):
        assert engine.decode.step_s(running) == pytest.approx(TRUTH.engine.decode.step_s(running), rel=0.1)
    assert engine.request_steps < 0.5


def test_a_run_that_did_not_record_them_has_one_point_and_says_so(unrecorded: Path) -> None:
    engine = profile_of(unrecorded).engine
    assert engine.source == "fitted"
    truth = TRUTH.engine.decode.step_s(engine.running)
    assert engine.decode.step_s(engine.running) == pytest.approx(truth, rel=0.15)  # prefill is a part of it


@pytest.mark.parametrize(("key", "value"), [("buffer.max_staleness", 0), ("rollout.engine.max_concurrent", 6)])
def test_a_profile_predicts_runs_with_other_settings(key: str, value: int, recorded: Path) -> None:
    truth = msgspec.structs.replace(TRUTH, settings=TRUTH.settings | {key: value})
    happens = simulate(SimulationPlan.of(truth), seed=7).figures
    predicted = simulate(SimulationPlan.of(profile_of(recorded), (f"{key}={value}",))).figures
    assert predicted.cycle_s == pytest.approx(happens.cycle_s, rel=0.1)
    assert predicted.staleness == pytest.approx(happens.staleness, abs=0.15)


def test_a_profile_holds_numbers_only_and_comes_back_as_it_was(recorded: Path, tmp_path: Path) -> None:
    profile = profile_of(recorded)
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    texts: set[str] = set()

    def collect(value: object) -> None:
        if isinstance(value, str):
            texts.add(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(item)

    collect(msgspec.json.decode((tmp_path / "profile.json").read_bytes()))
    assert texts <= {"observed", "recorded", "recompute", "withhold", "none"}


def test_a_run_that_goes_on_has_a_profile_and_one_that_has_just_begun_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    RecordedRun(TRUTH, run).record(8)
    with pytest.raises(
        ConfigError,
        match=r"the run has 8 steps; a profile needs 9; where it has ended, `slipstream resume '\S+ run'` continues it",
    ):
        profile_of(run)
    config = run / "config.yaml"
    config.write_text(dump(changed(load(str(config)), ["learner.steps=8"])))
    with pytest.raises(ConfigError, match=r"`slipstream resume '\S+ run' learner.steps=9` continues it"):
        profile_of(run)
    with pytest.raises(ConfigError, match="holds no run"):
        profile_of(tmp_path)
    RecordedRun(TRUTH, tmp_path / "longer").record(9)
    profile_of(tmp_path / "longer")
    (tmp_path / "longer" / "buffer.sqlite").unlink()
    with pytest.raises(StoreError, match="no buffer"):
        profile_of(tmp_path / "longer")


@pytest.mark.parametrize("times", [True, False])
def test_a_run_whose_steady_groups_were_dropped_is_refused(times: bool, tmp_path: Path) -> None:
    """As `buffer.keep` drops them."""
    RecordedRun(TRUTH, tmp_path / "run", times=times).record(9)
    with contextlib.closing(sqlite3.connect(tmp_path / "run" / DATABASE)) as db, db:
        db.execute("DELETE FROM trajectories")
    with pytest.raises(ConfigError, match=r"run: the buffer holds no sampled token .* buffer\.keep") as refused:
        profile_of(tmp_path / "run")
    assert "\n" not in str(refused.value)


def test_a_run_that_is_over_is_read_without_a_file_beside_it(tmp_path: Path) -> None:
    """As in a folder that cannot be written."""
    RecordedRun(TRUTH, tmp_path / "run").record(9)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    profile, _ = find_profile(str(tmp_path / "run"), None)
    assert ledger_report(tmp_path / "run" / DATABASE, active=False).total.generated > 0
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    assert profile_of(tmp_path / "run", active=True) == profile


def test_a_profile_has_the_replicas_that_served_and_not_those_of_the_config(tmp_path: Path) -> None:
    """A run whose number of replicas was changed while it went on keeps the number that it began with in its config."""
    served = msgspec.structs.replace(TRUTH, settings=TRUTH.settings | {"rollout.engine.replicas": 3})
    RecordedRun(served, tmp_path / "run", overrides=["rollout.engine.replicas=1"]).record(9)
    assert profile_of(tmp_path / "run").settings["rollout.engine.replicas"] == 3


def test_groups_of_one_are_simulated_whatever_allows_them(tmp_path: Path) -> None:
    alone = msgspec.structs.replace(TRUTH, settings=TRUTH.settings | {"buffer.group_size": 1})
    for kind in ("gae", "reinforce_pp"):
        RecordedRun(alone, tmp_path / kind, overrides=[f"learner.algorithm.advantage.kind={kind}"]).record(9)
        plan = SimulationPlan.of(profile_of(tmp_path / kind), ("buffer.max_staleness=0",))
        assert (plan.replay.group_size, plan.admission.max_staleness) == (1, 0)


def branch_of(number: int, spans: list[tuple[int, int]], turns: list[Turn], length: int) -> BatchRow:
    return msgspec.structs.replace(
        row_of(trajectory("3.0.1", number)),
        version_spans=tuple(VersionSpan(a, b, 0) for a, b in spans),
        turns=tuple(turns),
        started=100.0,
        timings={"total": 9.0, "environment": 3.0},
        reward=0.5,
        length=length,
    )


def test_a_turn_of_an_earlier_branch_is_context_and_is_played_once() -> None:
    opening, more, other = Turn(10, 14, "stop"), Turn(20, 25, "stop"), Turn(30, 32, "stop")
    first = branch_of(0, [(10, 14), (20, 25)], [opening, more], 25)
    second = branch_of(1, [(30, 32)], [opening, other], 32)
    turns = (TurnShape(10, 4, 1.0), TurnShape(6, 5, 1.0), TurnShape(16, 2, 1.0))
    assert _shape([first, second], 99.0, {}) == EpisodeShape(0.5, 57, turns)


def test_the_time_between_two_completions_is_that_of_the_first() -> None:
    first = Turn(10, 14, "stop", asked=100.5, queued_s=0.25, first_s=0.25, decode_s=1.0, cached=8)
    second = Turn(20, 25, "stop", asked=104.0, queued_s=0.0, first_s=0.5, decode_s=1.5, cached=0)
    turns = (TurnShape(10, 4, 2.0), TurnShape(6, 5, 3.0))  # the episode ends at 109
    branch = branch_of(0, [(10, 14), (20, 25)], [first, second], 25)
    assert _shape([branch], 99.75, {}) == EpisodeShape(0.5, 25, turns, 8, 0.5, lease_s=0.25)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"settings": {"learner.steps": 3}}, "settings: learner.steps: has no part in a simulation"),
        ({"environments": []}, "environments"),
        ({"environments": [{"kind": "lognormal", "mean": 0, "sigma": 1, "most": 5}]}, r"environments\[0\].mean"),
        ({"environments": [{"kind": "observed", "groups": [[[0.0, 5, []]]]}]}, "length >= 1"),
        ({"engine": {"decode": {"points": [[0, 0]]}}}, "decode curve needs"),
        (
            {"format": 2, "push": {"beside_s": 1}},
            "format: 2 is another release's, this one reads 4; `slipstream simulate RUN`",
        ),
        ({"colour": 1}, "colour"),
    ],
    ids=str,
)
def test_what_is_no_profile_is_refused_by_its_key(change: dict[str, object], why: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    values = msgspec.to_builtins(TRUTH) | change
    path.write_bytes(msgspec.json.encode(values))
    with pytest.raises(ConfigError, match=f"profile.json.*{why}"):
        read_profile(path)
    path.write_bytes(b"\xff{")
    with pytest.raises(ConfigError, match="not a profile"):
        read_profile(path)


def test_the_profile_in_the_documentation_can_be_simulated(tmp_path: Path) -> None:
    page = (Path(__file__).parent.parent / "docs" / "operation.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "profile.json").write_text(text)
    profile = read_profile(tmp_path / "profile.json")
    assert simulate(SimulationPlan.of(profile, ("buffer.groups_per_batch=16",)), 8).figures.trained_tokens_per_s > 0
