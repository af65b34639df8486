"""Profiles: fitted to the folder of a run whose times are known, written, read and refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from slipstream.buffer.trajectory import BatchRow, Turn, VersionSpan
from slipstream.errors import ConfigError, StoreError
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
    engine=EngineProfile(DecodeCurve(((0.0, 0.01), (32.0, 0.02)))),
    learner=LearnerProfile((3e-4, 4e-4), take_s=0.02),
    push=PushProfile(0.2, 0.05),
)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded") / "run"
    RecordedRun(TRUTH, folder).record(60)
    return folder


def test_a_profile_of_a_run_predicts_the_run(recorded: Path) -> None:
    """The limits are those for real runs; the numbers here have no noise of a machine."""
    profile = profile_of(recorded)
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
    assert {round(seconds, 6) for seconds in profile.learner.seconds_per_token} == {3e-4, 4e-4}
    assert profile.push.cohort_s == pytest.approx(0.2)
    assert profile.engine.source == "fitted"
    truth = TRUTH.engine.decode.step_s(profile.engine.running)
    assert profile.engine.decode.step_s(profile.engine.running) == pytest.approx(truth, rel=0.1)


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
    assert texts <= {"observed", "fitted", "recompute", "withhold", "none"}


def test_a_run_that_goes_on_has_a_profile_and_one_that_has_just_begun_is_refused(tmp_path: Path) -> None:
    RecordedRun(TRUTH, tmp_path / "run").record(8)
    with pytest.raises(
        ConfigError, match=r"the run has 8 steps; a profile needs 9: continue it with `slipstream resume"
    ):
        profile_of(tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run"):
        profile_of(tmp_path)
    RecordedRun(TRUTH, tmp_path / "longer").record(9)
    profile_of(tmp_path / "longer")
    (tmp_path / "longer" / "buffer.sqlite").unlink()
    with pytest.raises(StoreError, match="no buffer"):
        profile_of(tmp_path / "longer")


def test_a_turn_of_an_earlier_branch_is_context_and_is_played_once() -> None:
    def branch(number: int, spans: list[tuple[int, int]], turns: list[tuple[int, int]], length: int) -> BatchRow:
        return msgspec.structs.replace(
            row_of(trajectory("3.0.1", number)),
            version_spans=tuple(VersionSpan(a, b, 0) for a, b in spans),
            turns=tuple(Turn(a, b, "stop") for a, b in turns),
            timings={"total": 9.0, "environment": 3.0},
            reward=0.5,
            length=length,
        )

    first = branch(0, [(10, 14), (20, 25)], [(10, 14), (20, 25)], 25)
    second = branch(1, [(30, 32)], [(10, 14), (30, 32)], 32)
    turns = (TurnShape(10, 4, 1.0), TurnShape(6, 5, 1.0), TurnShape(16, 2, 1.0))
    assert _shape([first, second]) == EpisodeShape(0.5, 57, turns)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"settings": {"learner.steps": 3}}, "settings: learner.steps: has no part in a simulation"),
        ({"environments": []}, "environments"),
        ({"environments": [{"kind": "lognormal", "mean": 0, "sigma": 1, "most": 5}]}, r"environments\[0\].mean"),
        ({"environments": [{"kind": "observed", "groups": [[[0.0, 5, []]]]}]}, "length >= 1"),
        ({"engine": {"decode": {"points": [[0, 0]]}}}, "decode curve needs"),
        ({"format": 2}, "format"),
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
