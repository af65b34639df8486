"""`slipstream explain` and `slipstream tune RUN --live` on a real run: a synchronous one, whose learner waits, gets a higher bound
while it goes on, and that gives what was promised."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from slipstream.benchmarks.asynchrony import PLAIN
from slipstream.benchmarks.emulated_run import PRESET, environment_of, settings_of
from slipstream.benchmarks.explanation import LAW
from slipstream.benchmarks.models import make_policy
from slipstream.monitor.alerts import SETTLING
from slipstream.monitor.settings import SETTINGS, read_changes
from slipstream.planner.fit import figures_of_rows
from slipstream.planner.records import RunRecords
from slipstream.tests.runs import WAIT_S, Background, check_accounts, metrics, slipstream

COUNTED = 10  # steps that are compared


@pytest.mark.full
def test_what_explain_promises_is_what_live_tuning_gives_and_the_command_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engine and learner sleep by a law, so that other work on this machine changes little."""
    run, model = tmp_path / "run", tmp_path / "model"
    make_policy(model, "1M")
    for name, value in environment_of(LAW).items():
        monkeypatch.setenv(name, value)
    settings = settings_of(LAW, 0, model) | {"run.dir": run, "learner.steps": 1_000_000}
    words = ("train", PRESET, *PLAIN, *(f"{key}={value}" for key, value in settings.items()))
    command = [sys.executable, "-m", "slipstream.launch.cli", "tune", str(run), "--live"]
    command += ["--over", "buffer.max_staleness=0,1"]
    with Background(*words) as training:
        training.until_step(SETTLING + COUNTED)
        before = figures_of_rows(RunRecords(run).steady)
        said = json.loads(slipstream("explain", str(run), "--json", "--gpus", "2").stdout)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as tuning:
            try:
                training.until(lambda: bool(read_changes(run / SETTINGS)), "a change of the bound")
                (change,) = read_changes(run / SETTINGS)
                training.until_step(change.step + 1 + SETTLING + COUNTED)
                after = figures_of_rows(RunRecords(run).steady)
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
    # Where other work makes pushes slow, that is a finding, too.
    (finding,) = (one for one in said["findings"] if one["rule"] == "higher_bound")
    assert (said["note"], finding["change"]) == ("", "buffer.max_staleness=1")
    assert (finding["live"], finding["severity"]) == (True, "hint")
    promised = finding["gain"]["trained_tokens_per_s"]["mean"]
    assert promised > 0.3
    assert after.trained_tokens_per_s / before.trained_tokens_per_s - 1 >= promised / 2
    ages = {row["step"]: row["staleness_max"] for row in metrics(run)}
    assert not any(age for step, age in ages.items() if step < change.step)
    assert max(ages.values()) == 1
    check_accounts(run)
