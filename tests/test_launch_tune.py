"""`slipstream tune`: whole searches, in a world whose truth is known and with real runs, and what it refuses."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from slipstream.benchmarks.emulated_run import PRESET, environment_of, settings_of
from slipstream.benchmarks.explanation import LAW
from slipstream.benchmarks.models import make_policy
from slipstream.configs import Config, check, load
from slipstream.errors import ConfigError
from slipstream.launch.cli.main import main
from slipstream.launch.probes import ProbeError, probe_config, run_probe
from slipstream.launch.tune import BEYOND_BOUND, Tuner, TuneRequest, TuneResult, draw
from slipstream.monitor.alerts import SETTLING
from slipstream.monitor.metrics import METRICS, read_metrics
from slipstream.planner.fit import LEAST_STEPS, figures_of_rows, profile_of
from slipstream.planner.plan import SimulationPlan
from slipstream.planner.profile import LearnerProfile, RunProfile
from slipstream.planner.profile import settings_of as simulated_settings
from slipstream.planner.records import RunRecords
from slipstream.planner.run import simulate
from slipstream.planner.tune.search import ProbeResult
from slipstream.planner.tune.space import BOUND, CONCURRENT, search_of
from slipstream.tests.runs import SMALL, WAIT_S, leftovers, tiny_policy
from slipstream.tests.simulated_runs import RecordedRun
from slipstream.tests.test_planner_explain import run_of

START_S = 40.0
WORLD = ("buffer.groups_per_batch=2", "buffer.group_size=4", f"{CONCURRENT}=24", f"{BOUND}=1")
OVER = (f"{BOUND}=0,1,2", f"{CONCURRENT}=3,24")
TRUTH = run_of()


class World:
    """Runs on virtual time, of `truth` under the settings of their configs; each takes `noise` more or less."""

    def __init__(self, truth: RunProfile = TRUTH, noise: float = 0.05, fails: tuple[str, ...] = ()) -> None:
        self.now = 0.0
        self.probes: list[tuple[Config, ProbeResult]] = []
        self._truth, self._noise, self._fails = truth, noise, fails
        self._rng = random.Random(7)

    def clock(self) -> float:
        return self.now

    def truth_of(self, config: Config) -> RunProfile:
        return msgspec.structs.replace(self._truth, settings=simulated_settings(config))

    def probe(self, config: Config, deadline: float) -> ProbeResult:
        folder, began = Path(config.run.dir), self.now
        if folder.name in self._fails:
            self.now += START_S
            raise ProbeError("EngineDied: out of memory")
        slower = self._rng.uniform(1 - self._noise, 1 + self._noise)
        truth = self.truth_of(config)
        times = tuple(slower * seconds for seconds in truth.learner.seconds_per_token)
        RecordedRun(
            msgspec.structs.replace(truth, learner=LearnerProfile(times)), folder, seed=len(self.probes)
        ).record(config.learner.steps)
        rows = read_metrics(folder / METRICS)
        self.now += START_S + sum(row["wait_s"] + row["step_s"] + row["push_s"] for row in rows)
        if self.now > deadline:
            self.now = deadline
            raise ProbeError("the time was over")
        figures = figures_of_rows(rows[config.buffer.max_staleness + SETTLING :])
        ess = {lag: 1.0 - 0.02 * lag for lag in figures.tokens_by_staleness}
        result = ProbeResult(folder.name, figures, ess, self.now - began, START_S)
        self.probes.append((config, result))
        return result


@pytest.fixture(autouse=True)
def _short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.planner.plan.COUNTED", 12)


def search(world: World, out: Path, minutes: float, *over: str) -> tuple[TuneResult, list[str]]:
    said: list[str] = []
    request = TuneRequest(
        source="quickstart", overrides=WORLD, minutes=minutes, over=search_of(over), gpus=2, out=out / "tune"
    )
    return Tuner(request, said.append, world.probe, world.clock).run(), said


def test_a_search_finds_what_an_exhaustive_one_finds(tmp_path: Path) -> None:
    world = World()
    result, said = search(world, tmp_path, 10, *OVER)
    assert world.now <= 600
    rates: dict[str, float] = {}
    for bound in "012":
        for concurrent in ("3", "24"):
            config = load("quickstart", [*WORLD, f"{BOUND}={bound}", f"{CONCURRENT}={concurrent}"])
            rates[f"{bound},{concurrent}"] = simulate(
                SimulationPlan.of(world.truth_of(config)), 60, seed=11
            ).figures.trained_tokens_per_s
    chosen = {BOUND: "1", CONCURRENT: "24"} | result.chosen.changes
    assert rates[f"{chosen[BOUND]},{chosen[CONCURRENT]}"] >= 0.9 * max(rates.values())
    assert sum(point.measured is not None for point in result.points) >= 3
    assert len(world.probes) <= len(rates)
    assert any(line.startswith("plan: of ") for line in said), said
    assert dict(one.split("=") for one in result.overrides) == dict(one.split("=") for one in WORLD) | chosen
    saved = msgspec.json.decode((tmp_path / "tune" / "tune.json").read_bytes(), type=TuneResult)
    assert saved == result
    draw(result, tmp_path / "tune" / "tune.png")
    assert (tmp_path / "tune" / "tune.png").stat().st_size > 10_000


@pytest.mark.full
def test_a_probe_that_fails_is_said_and_left_out(tmp_path: Path) -> None:
    world = World(fails=("probe-01",))
    result, said = search(world, tmp_path, 10, *OVER)
    (line,) = [line for line in said if "failed and left out" in line]
    assert line.endswith("EngineDied: out of memory")
    assert {probe.name for point in result.points for probe in point.probes} >= {"probe-00", "probe-02"}
    with pytest.raises(ProbeError, match="out of memory"):
        search(World(fails=("probe-00",)), tmp_path / "other", 10, *OVER)


@pytest.mark.full
@pytest.mark.parametrize("minutes", [1.5, 3])
def test_the_minutes_are_kept(minutes: float, tmp_path: Path) -> None:
    world = World()
    result, said = search(world, tmp_path, minutes, *OVER)
    assert result.seconds == world.now <= 60 * minutes
    assert result.chosen.measured is not None
    assert (len(world.probes) == 1) == any("plan: no more probes" in line for line in said)


def test_a_probe_that_takes_longer_than_expected_ends_with_the_time(tmp_path: Path) -> None:
    """The other settings are a hundred times slower than the simulation knows."""

    class Slow(World):
        def truth_of(self, config: Config) -> RunProfile:
            truth = super().truth_of(config)
            slow = 100 if config.buffer.max_staleness != 1 else 1
            times = tuple(slow * seconds for seconds in truth.learner.seconds_per_token)
            return msgspec.structs.replace(truth, learner=LearnerProfile(times))

    world = Slow()
    result, said = search(world, tmp_path, 4, f"{BOUND}=0,1,2")
    assert world.now <= 240
    assert any("the time was over" in line for line in said)
    assert result.chosen.changes == {}


def test_an_interrupt_ends_with_what_is_known(tmp_path: Path) -> None:
    class Interrupting(World):
        def probe(self, config: Config, deadline: float) -> ProbeResult:
            if len(self.probes) == 2:
                raise KeyboardInterrupt
            return super().probe(config, deadline)

    result, _ = search(Interrupting(), tmp_path, 10, *OVER)
    assert result.interrupted
    assert sum(point.measured is not None for point in result.points) == 2
    assert (tmp_path / "tune" / "tune.json").exists()


def test_settings_that_do_not_fit_together_are_not_probed(tmp_path: Path) -> None:
    world = World()
    result, said = search(world, tmp_path, 3, "buffer.min_members=0,3,9")
    assert any("skipped: 1 refused by the config" in line for line in said)
    assert all(point.changes.get("buffer.min_members") != "9" for point in result.points)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("nonsense", "--minutes", "5"), "no such preset"),
        (("quickstart",), "--minutes: must be given"),
        (("full", "--minutes", "5"), "full is a folder; a search takes a config"),
        (("full", "--live"), "full holds no run"),
        (("full", "--live", "--minutes", "5"), "--minutes: --live knows no such thing"),
        (("full", "--live", "buffer.max_staleness=1"), "buffer.max_staleness=1: --live knows no such thing"),
        (("full", "--live", "--over", "rollout.workers=1,2"), "--over rollout.workers=1,2: --live moves one key"),
        (("quickstart", "--minutes", "0.5"), "--minutes 0.5: allowed are 1 and more"),
        (("quickstart", "--minutes", "inf"), "--minutes inf: allowed are 1 and more, less than infinity"),
        (("quickstart", "--minutes", "nan"), "--minutes nan: allowed are 1 and more"),
        (("quickstart", "--minutes", "5", "--gpus", "1"), "--gpus 1: allowed are 2 and more"),
        (("quickstart", "--minutes", "5", "--over", "learner.steps=1,2"), "--over learner.steps: no simulation knows"),
        (("quickstart", "buffer.max_stalenes=1", "--minutes", "5"), "no such key; did you mean buffer.max_staleness"),
        (("quickstart", "--minutes", "5", "--out", "full"), "--out full: is not empty; name a new folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line(
    words: tuple[str, ...],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main(["tune", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


@pytest.mark.parametrize(("preset", "warmup"), [("vapo", 5), ("pf-ppo", 5), ("quickstart", 0)])
def test_a_probe_has_its_steps_after_the_critics_warm_up(preset: str, warmup: int, tmp_path: Path) -> None:
    probe = probe_config(load(preset, [f"{BOUND}=1"]), tmp_path / "probe-00", BEYOND_BOUND - SETTLING)
    assert probe.learner.steps == warmup + 1 + BEYOND_BOUND
    check(probe)
    RecordedRun(TRUTH, tmp_path / "probe-00").record(probe.learner.steps)
    path = tmp_path / "probe-00" / METRICS
    rows = [row | ({"grad_norm": None} if row["step"] <= warmup else {}) for row in read_metrics(path)]
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    run = RunRecords(tmp_path / "probe-00")
    assert len(run.steady) >= LEAST_STEPS
    assert profile_of(run.folder, resumable=False).measured is not None


def test_nobody_is_told_to_resume_a_probe(tmp_path: Path) -> None:
    RecordedRun(TRUTH, tmp_path / "probe-00").record(3)
    with pytest.raises(ConfigError, match=r"the run has 3 steps; a profile needs \d+$"):
        profile_of(tmp_path / "probe-00", resumable=False)


def test_a_run_that_cannot_start_fails_with_its_own_words(tmp_path: Path) -> None:
    config = load("quickstart", ["model.path=/nowhere", f"run.dir={tmp_path}/probe-00"])
    with pytest.raises(ConfigError, match=r"model\.path"):
        run_probe(config, time.monotonic() + WAIT_S)
    assert (tmp_path / "probe-00.yaml").exists()


REAL = ("tune", "quickstart", *SMALL, "rollout.engine.kind=transformers", "learner.backend.device=cpu", f"{BOUND}=1")


@pytest.mark.full
def test_a_real_search_measures_its_points_and_leaves_no_process(tmp_path: Path) -> None:
    model, out = tiny_policy(tmp_path / "policy"), tmp_path / "out"
    # A minute on a very busy machine for each run; where they take less, the search ends sooner.
    words = (*REAL, f"model.path={model}", "--minutes", "5", "--over", f"{BOUND}=0,1", "--json", "--out", str(out))
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.launch.cli", *words],
        capture_output=True,
        text=True,
        timeout=WAIT_S + 30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode(done.stdout, type=TuneResult)
    probed = {point.changes.get(BOUND, "1"): point for point in result.points if point.measured}
    assert set(probed) == {"0", "1"}
    assert probed["0"].probes[0].figures.staleness == 0
    for point in probed.values():
        for probe in point.probes:
            folder = out / probe.name
            assert len(read_metrics(folder / METRICS)) >= probe.figures.steps
            assert not any((folder / name).exists() for name in ("checkpoints", "model"))
            assert leftovers(folder) == []
    assert {path.name for path in out.iterdir()} >= {"tune.json", "tune.png", "profile.json", "probe-00.yaml"}
    assert json.loads((out / "tune.json").read_text())["overrides"]


@pytest.mark.full
def test_an_interrupt_ends_the_run_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an emulated engine and learner, which begin sooner than real ones."""
    model, out = tmp_path / "model", tmp_path / "out"
    make_policy(model, "1M")
    for name, value in environment_of(LAW).items():
        monkeypatch.setenv(name, value)
    settings = [f"{key}={value}" for key, value in settings_of(LAW, 1, model).items()]
    words = ("tune", PRESET, *settings, "--minutes", "3", "--out", str(out))
    command = [sys.executable, "-m", "slipstream.launch.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            deadline = time.monotonic() + WAIT_S
            while not (out / "probe-00" / METRICS).exists():  # a file of another process offers nothing to await
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            os.kill(process.pid, signal.SIGINT)
            shown, _ = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
    assert process.returncode == 130, shown
    assert leftovers(out / "probe-00") == []
    assert not (out / "probe-00" / "checkpoints").exists()
