"""`slipstream tune RUN --live` on a real run: a synchronous one, whose learner waits, gets a higher bound while it goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.monitor.settings import SETTINGS, read_changes
from slipstream.tests.runs import SMALL, WAIT_S, Background, check_accounts, metrics, tiny_policy

FAST = ("rollout.engine.kind=transformers", "learner.backend.device=cpu", "buffer.max_staleness=0", "learner.steps=400")


@pytest.mark.full
def test_the_bound_of_a_run_whose_learner_waits_rises_and_the_command_ends_with_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("train", "quickstart", *SMALL, *FAST, f"model.path={tiny_policy(tmp_path / 'policy')}", f"run.dir={run}")
    command = [sys.executable, "-m", "slipstream.launch.cli", "tune", str(run), "--live"]
    command += ["--over", "buffer.max_staleness=0,1"]
    with Background(*words) as training:
        training.until_step(1)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tuning:
            try:
                training.until(lambda: bool(read_changes(run / SETTINGS)), "a change of the bound")
                (change,) = read_changes(run / SETTINGS)
                training.until_step(change.step + 3)
                training.process.terminate()
                training.output()
                shown, _ = tuning.communicate(timeout=WAIT_S)
            finally:
                tuning.kill()
    assert tuning.returncode == 0, shown
    first, moved, *_, last = shown.splitlines()
    assert first.startswith("buffer.max_staleness is 0, and may become 0 to 1")
    assert moved.startswith("buffer.max_staleness 0 -> 1: the learner waits ")
    assert last == "the run is over; buffer.max_staleness was 1"
    assert (change.key, change.old, change.new) == ("buffer.max_staleness", 0, 1)
    ages = {row["step"]: row["staleness_max"] for row in metrics(run)}
    assert not any(age for step, age in ages.items() if step < change.step)
    assert max(ages.values()) == 1
    check_accounts(run)
