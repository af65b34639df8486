"""`slipstream simulate` as its users call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from slipstream.benchmarks.simulator import laptop
from slipstream.launch.cli.main import main
from slipstream.planner.profile import write_profile
from slipstream.tests.simulated_runs import RecordedRun
from slipstream.tests.test_planner_profile import TRUTH


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    write_profile(laptop(), path)
    return path


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["simulate", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_run_its_profile_and_a_config_say_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    RecordedRun(TRUTH, tmp_path / "run", times=False).record(20)
    assert main(["simulate", "run", "--sweep", "buffer.max_staleness=0,1,2"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("measured", "simulated", "max_staleness=0", "max_staleness=2"))
    assert "max_staleness=1" not in shown  # the run's own
    assert "guessed elsewhere" in " ".join(shown.split())
    assert (tmp_path / "run" / "simulate.png").stat().st_size > 10_000
    points = []
    for words in (["run"], ["run/profile.json"], ["run/config.yaml", "--profile", "run"]):
        assert main(["simulate", *words, "--json"]) == 0
        points.append(json.loads(capsys.readouterr().out)["points"][0]["figures"])
    assert points[0] == points[1] == points[2]


def test_combinations_gpus_and_files(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sweep", "buffer.max_staleness=0,1", "--sweep", "buffer.groups_per_batch=4,8", "--steps", "8", "--json"]
    assert main(["simulate", str(profile), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured"] is None
    assert [point["changes"] for point in found["points"]][1:] == [
        {"buffer.max_staleness": bound, "buffer.groups_per_batch": groups} for bound in "01" for groups in "48"
    ]
    assert not (tmp_path / "simulate.png").exists()
    assert (
        main(
            ["simulate", str(profile), "buffer.max_staleness=1", "--gpus", "5", "--steps", "8", "--out", str(tmp_path)]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert shown.count("replicas=") == 4
    assert (tmp_path / "simulate.png").exists()


def test_what_cannot_be_simulated_is_one_line(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = str(profile)
    assert "`slipstream train quickstart learner.steps=20 run.dir=runs/probe`" in refusal(capsys, "quickstart")
    assert "no such preset" in refusal(capsys, "nonsense")
    assert "holds no run" in refusal(capsys, str(tmp_path))
    assert "cannot be read" in refusal(capsys, "missing.json")
    assert "key=value,value" in refusal(capsys, given, "--sweep", "buffer.max_staleness")
    assert "learner.steps: has no part" in refusal(capsys, given, "--sweep", "learner.steps=1,2")
    assert "max_staleness: -1 is not allowed" in refusal(capsys, given, "--sweep", "buffer.max_staleness=1,-1")
    assert "allowed are 64" in refusal(
        capsys, given, "--sweep", f"buffer.max_staleness={','.join(map(str, range(65)))}"
    )
    assert "--gpus 1: allowed are 2" in refusal(capsys, given, "--gpus", "1")
    assert "there is no such folder" in refusal(capsys, given, "--out", "nowhere")
    assert "has its own times" in refusal(capsys, given, "--profile", given)
