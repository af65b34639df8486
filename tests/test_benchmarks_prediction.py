"""The benchmarks of prediction and recording: what they compute from runs, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from slipstream.benchmarks.prediction import PROBES, Measured, prediction, rows
from slipstream.benchmarks.recording import RUN
from slipstream.errors import ConfigError
from slipstream.launch.cli.main import main
from slipstream.planner.fit import profile_of
from slipstream.tests.runs import WAIT_S, tiny_policy
from slipstream.tests.simulated_runs import RecordedRun
from slipstream.tests.test_planner_profile import TRUTH

A_RUN = {"buffer.max_staleness": 2, "buffer.groups_per_batch": 4, "buffer.group_size": 4}


def measured(folder: Path, **change: int) -> Measured:
    settings = A_RUN | {"rollout.engine.max_concurrent": 32} | change
    RecordedRun(msgspec.structs.replace(TRUTH, settings=settings), folder).record(20)
    profile = profile_of(folder)
    assert profile.measured is not None
    return Measured(profile, profile.measured, 1.5)


def test_each_probe_is_predicted_from_the_runs_beside_it(tmp_path: Path) -> None:
    changes = [override.partition("=") for override in PROBES.values()]
    probes = [measured(tmp_path / f"probe-{n}", **{key: int(value)}) for n, (key, _, value) in enumerate(changes)]
    base = measured(tmp_path / "base")
    found = rows([base] * (len(probes) + 1), probes)
    assert [row.name for row in found] == [*(f"itself, run {n}" for n in (1, 2, 3, 4)), *PROBES]
    for row, run in zip(found, [base] * 4 + probes, strict=True):
        assert row.floor == run.figures.cycle_s
        assert row.ratio == pytest.approx(1.0, abs=0.15), row
        assert f"/{run.figures.staleness:.2f}; load 1.5" in row.note
    assert len({row.floor for row in found}) == 1 + len(probes)  # the settings make a difference


async def test_a_folder_with_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "base-0").mkdir()
    with pytest.raises(ConfigError, match="not empty"):
        await prediction(tmp_path, 12, lambda text: None)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("prediction", "--steps", "3"), "--steps: 3 is not allowed; allowed are 12 and more"),
        (("prediction", "--sizes", "1M"), "--sizes: only `slipstream bench rollout`"),
        (("recording", "--sizes", "1M"), "--sizes: only `slipstream bench rollout`"),
        (("recording", "--out", "x"), "`slipstream bench prediction`"),
    ],
    ids=str,
)
def test_wrong_options_are_one_line(words: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


@pytest.mark.full
def test_a_run_without_recording_writes_no_timeline(tmp_path: Path) -> None:
    model, run = tiny_policy(tmp_path / "policy"), tmp_path / "run"
    words = (*RUN, f"model.path={model}", f"run.dir={run}", "learner.steps=3")
    command = [sys.executable, "-m", "slipstream.benchmarks.recording", "off", *words]
    subprocess.run(command, check=True, timeout=WAIT_S)
    assert (run / "metrics.jsonl").read_text().count("\n") == 3
    assert [(run / folder).exists() for folder in ("spans", "series")] == [False] * 2
