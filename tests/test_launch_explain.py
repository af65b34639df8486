"""`slipstream explain` as its users call it, on folders of runs whose times are known."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import msgspec
import pytest
from slipstream.configs import load
from slipstream.launch import explain as explaining
from slipstream.launch.cli.main import main
from slipstream.launch.explain import explain_or_say_why, follow, hardware_of
from slipstream.launch.run_lock import run_lock
from slipstream.planner.explain import gains
from slipstream.planner.explain.evidence import Hardware
from slipstream.planner.explain.explain import explain
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.profile import RunProfile
from slipstream.planner.run import simulate
from slipstream.tests.simulated_runs import RecordedRun
from slipstream.tests.test_planner_explain import run_of

WAIT_S = 60.0


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose bound is too low."""
    folder = tmp_path_factory.mktemp("tight") / "run"
    RecordedRun(run_of(bound=0), folder).record(20)
    return folder


@pytest.fixture
def few_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gains, "SEEDS", (3, 3))


def with_last_rows(folder: Path, **changes: object) -> None:
    """Change the last 10 rows of a run."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = [line | (changes if i >= len(lines) - 10 else {}) for i, line in enumerate(lines)]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))


@pytest.mark.usefixtures("few_seeds")
def test_it_says_what_to_change_and_what_that_gains(tight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tight), "--fail-on", "critical"]) == 0
    shown = capsys.readouterr().out
    assert "hint: each side waits for the other" in shown
    assert "-> buffer.max_staleness=1: trained tok/s +" in shown
    assert "(since step" in shown  # the learner is idle, which is an alert of its own
    assert "slipstream explain" not in shown  # its advice is to look here
    assert main(["explain", str(tight), "--json", "--fail-on", "hint"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["findings"][0]["change"] == "buffer.max_staleness=1"
    assert {one["rule"] for one in found["alerts"]} <= {"learner_idle", "rollout_idle"}
    assert abs(found["missed"]) < 0.15


def test_an_alert_comes_alone_and_fails_what_asks_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RecordedRun(run_of(bound=0), tmp_path / "run").record(20)
    with_last_rows(tmp_path / "run", ess=0.2)
    assert main(["explain", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("critical: the importance weights explode")
    assert "->" not in shown
    assert main(["explain", str(tmp_path / "run"), "--json", "--fail-on", "critical"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"] == []


def test_what_cannot_be_explained_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
    RecordedRun(run_of(), tmp_path / "run").record(6)
    assert main(["explain", str(tmp_path / "run"), "--gpus", "0"]) == 2
    assert "--gpus 0: allowed are 1 and more" in capsys.readouterr().err
    assert main(["explain", str(tmp_path / "run")]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    command = f"`slipstream resume {tmp_path / 'run'}`"
    assert line == f"6 steps so far: what to change is said from 9 on; {command} continues the run"
    (tmp_path / "run" / "metrics.jsonl").write_text("no row\n")
    assert "not explained: " in explain_or_say_why(tmp_path / "run", active=False).note


def test_the_hardware_is_this_machine_or_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("quickstart")
    here = hardware_of(config)
    assert here.devices == here.cores or here.kind == "GPUs"
    assert hardware_of(config, 16).devices == 16
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert hardware_of(load("quickstart", ["launch.kind=ray"])).devices is None


@pytest.mark.usefixtures("few_seeds")
def test_a_run_that_goes_on_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOOK_S": 0.2, "LEAST_S": 0.0, "AGAIN": 0.0}.items():
        monkeypatch.setattr(explaining, name, value)
    folder = tmp_path / "run"
    RecordedRun(run_of(bound=0), folder).record(12)
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:10]))
    explanations = follow(folder)
    with run_lock(folder):
        assert next(explanations).steps == (4, 10)
        (folder / "metrics.jsonl").write_text("".join(rows))
        assert next(explanations).steps == (4, 12)
    assert next(explanations).steps == (4, 12)  # it has ended
    assert list(explanations) == []


@pytest.mark.full
def test_watching_ends_with_an_interrupt(tmp_path: Path) -> None:
    RecordedRun(run_of(), tmp_path / "run").record(6)
    command = [sys.executable, "-m", "slipstream.launch.cli", "explain", str(tmp_path / "run"), "--watch"]
    with (
        run_lock(tmp_path / "run"),
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            assert "6 steps so far" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "", "")


@pytest.mark.full
@pytest.mark.parametrize(
    "truth",
    [run_of(bound=0), run_of(max_concurrent=3, bound=2), run_of(bound=6)],
    ids=["bound too low", "few sequences", "bound too high"],
)
def test_a_change_gives_at_least_half_of_what_is_promised(truth: RunProfile, tmp_path: Path) -> None:
    """The run is known by its files only; the change is made in what it really was. A loss is at most 2 points greater."""
    RecordedRun(truth, tmp_path / "run", seed=5).record(50)
    finding, *_ = explain(tmp_path / "run", Hardware("cores", 2, 0, 2), active=False).findings
    assert finding.gain is not None
    promised, trained, staleness = finding.gain.trained_tokens_per_s.mean, list[float](), list[float]()
    for seed in range(7, 12):
        before, after = (
            simulate(SimulationPlan.of(truth, overrides), 60, seed=seed).figures
            for overrides in ((), (finding.change,))
        )
        trained.append(after.trained_tokens_per_s / before.trained_tokens_per_s - 1)
        staleness.append(after.staleness - before.staleness)
    assert fmean(trained) >= (0.5 * promised if promised > 0 else promised) - 0.02
    if finding.rule == "lower_bound":
        assert fmean(staleness) <= 0.5 * finding.gain.staleness.mean
    assert msgspec.json.decode(msgspec.json.encode(finding))["change"] == finding.change
