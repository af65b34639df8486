"""Simulations for the command line: where a profile comes from, which settings are compared, and how well the profile's own run is
met."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..configs import load
from ..errors import ConfigError
from ..monitor.charts import SettingPoint, save_png, settings
from ..monitor.metrics import METRICS
from ..planner.closed_form import ClosedForm, estimate
from ..planner.figures import RunFigures
from ..planner.fit import profile_of
from ..planner.plan import SimulationPlan
from ..planner.profile import PROFILE, RunProfile, read_profile, write_profile
from ..planner.proposals import splits_of
from ..planner.run import simulate
from ..planner.tune.choice import on_frontier
from .run_lock import is_locked

PICTURE = "simulate.png"
MOST = 64  # points of one command


class SimulatedPoint(msgspec.Struct, frozen=True):
    """One combination of settings."""

    changes: dict[str, str]  # key -> value, as the user wrote it; empty for the settings of the profile
    gpus: int  # ranks of the learner and of all replicas
    figures: RunFigures
    closed_form: ClosedForm

    @property
    def labels(self) -> list[str]:
        """`max_staleness=1`: the last parts of the keys differ."""
        return [f"{key.rpartition('.')[2]}={value}" for key, value in self.changes.items()]


class Comparison(msgspec.Struct, frozen=True):
    """All points, those of the profile's own settings first; `measured` is the run that the profile is of, where its settings are
    still those."""

    measured: RunFigures | None
    engine: str  # `EngineProfile.source`
    points: tuple[SimulatedPoint, ...]
    events: int
    cpu_s: float

    @property
    def missed(self) -> float | None:
        """By which share the simulation of the run itself misses its cycle; None without a run."""
        if self.measured is None:
            return None
        return self.points[0].figures.cycle_s / self.measured.cycle_s - 1


def find_profile(source: str, profile: str | None) -> tuple[RunProfile, Path]:
    """The profile of a run folder, of a file, or of a config with the run or the file that `profile` names; and the folder that
    results go to. Raises ConfigError or StoreError."""
    path = Path(source)
    if profile is not None and (path.is_dir() or path.suffix == ".json"):
        raise ConfigError(f"--profile: {source} has its own times and lengths; --profile gives them to a config")
    if path.is_dir():
        return profile_of(path, active=is_locked(path)), path
    if path.suffix == ".json":
        return read_profile(path), Path()
    config = load(source)
    if profile is not None:
        found, _ = find_profile(profile, None)
        return found.with_settings(config), Path()
    run = Path(config.run.dir)
    if not (run / METRICS).is_file():
        raise ConfigError(
            f"{source}: nothing says how long its episodes and steps take; run `slipstream train {source} learner.steps=20 "
            "run.dir=runs/probe` and then `slipstream simulate runs/probe`, or name a run or a profile of another config by "
            "--profile"
        )
    return profile_of(run, active=is_locked(run)).with_settings(config), run


def sweep_of(text: str) -> list[dict[str, str]]:
    """`key=a,b` as one dictionary for each value. Raises ConfigError."""
    key, equals, values = text.partition("=")
    found = [value.strip() for value in values.split(",")]
    if not equals or not key.strip() or not all(found):
        raise ConfigError(
            f"--sweep {text!r} is not of the form key=value,value, for example buffer.max_staleness=0,1,2"
        )
    return [{key.strip(): value} for value in dict.fromkeys(found)]


def require_splits(profile: RunProfile, gpus: int) -> list[dict[str, str]]:
    """`splits_of` so many. Raises ConfigError where there is none."""
    if found := splits_of(profile, gpus):
        return found
    copy, replica = profile.learner.ranks_per_copy, profile.engine.ranks
    raise ConfigError(
        f"--gpus {gpus}: a replica needs {replica} and the learner {copy}; allowed are {copy + replica} and more"
    )


def compare(
    profile: RunProfile, overrides: Sequence[str], dimensions: Sequence[Sequence[dict[str, str]]], steps: int
) -> Comparison:
    """Simulate the profile with `overrides`, and every combination of `dimensions`. `steps` of each, 0 for as many as take some
    seconds. Raises ConfigError before the first where one of them is not allowed."""
    changed = [{k: v for part in parts for k, v in part.items()} for parts in itertools.product(*dimensions)]
    if len(changed) > MOST:
        raise ConfigError(f"{len(changed)} combinations; allowed are {MOST}: leave values out")
    base = dict(_split(override) for override in overrides)
    every = [base, *(base | changes for changes in changed if changes)]
    plans = [SimulationPlan.of(profile, tuple(f"{k}={v}" for k, v in changes.items())) for changes in every]
    points: list[SimulatedPoint] = []
    events, cpu_s, seen = 0, 0.0, list[SimulationPlan]()
    for changes, plan in zip(every, plans, strict=True):
        if plan in seen:
            continue  # a value that is the profile's own
        seen.append(plan)
        result = simulate(plan, steps)
        events, cpu_s = events + result.events, cpu_s + result.cpu_s
        points.append(SimulatedPoint(changes, plan.gpus, result.figures, estimate(plan)))
    return Comparison(None if base else profile.measured, profile.engine.source, tuple(points), events, cpu_s)


def _split(override: str) -> tuple[str, str]:
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"override {override!r} is not of the form key=value")
    return key.strip(), value.strip()


def frontier(points: Sequence[SimulatedPoint]) -> list[bool]:
    """Of each point whether no other trains more tokens per second with no more staleness, or as many with less."""
    return on_frontier([(point.figures.trained_tokens_per_s, point.figures.staleness) for point in points])


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture. Raises ConfigError where it cannot be written."""
    rows = [(" ".join(point.labels) or "simulated", point.figures, False) for point in comparison.points]
    if comparison.measured is not None:
        rows.insert(0, ("measured", comparison.measured, True))
    points = [
        SettingPoint(label, one.trained_tokens_per_s, one.staleness, one.learner_wait, one.rollout_idle, measured)
        for label, one, measured in rows
    ]
    try:
        save_png(settings(points), path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}; --out names another folder") from None


def save(profile: RunProfile, folder: Path) -> Path:
    """Write the profile into `folder`, and return its path."""
    path = folder / PROFILE
    write_profile(profile, path)
    return path
