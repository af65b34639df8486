"""`slipstream tune CONFIG`: a baseline probe, simulations of other settings from its profile, real probes of the best of them.

    baseline ──profile──> grid ──closed form──> prune ──> simulate ──> promising points
                                                               ^             │ probes, rung by rung, the better half goes on
                                                               └──residual───┘

Invariants:
- The minutes are kept: what is expected not to fit is not begun, and a probe that takes longer than expected is ended.
- Probes run one after the other, each from the model as the config has it, in folders of this search alone.
- A probe that fails is said and left out; the baseline's failure is the search's.
- An interrupt, once there is a baseline, ends the search with what is known.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from ..common.fsio import write_atomic
from ..configs import Config, load
from ..configs.engine_checks import require_own_servers
from ..errors import ConfigError, StateError
from ..monitor.alerts import SETTLING
from ..monitor.charts import TuningPoint, save_png, tuning
from ..monitor.text import count, duration, share
from ..planner.closed_form import estimate
from ..planner.fit import profile_of, refuse_colocated
from ..planner.plan import SimulationPlan
from ..planner.profile import PROFILE, RunProfile, write_profile
from ..planner.run import simulate
from ..planner.tune.halving import STEPS, WIDEST, ExpectedProbe, Rung, expected_s, schedule
from ..planner.tune.search import ProbeResult, TunedPoint, TuneSearch
from ..planner.tune.space import (
    EstimatedPoint,
    Point,
    SearchLimits,
    affordable,
    estimate_point,
    grid_of,
    label_of,
    prune,
    simulated,
)
from .explain import hardware_of
from .preflight import writable
from .probes import ProbeError, probe_config, run_probe

RESULT, PICTURE = "tune.json", "tune.png"  # in the folder of a search
BEYOND_BOUND = 10  # steps of the baseline beyond its bound
ESTIMATING, SIMULATING = 0.03, 0.15  # shares of the minutes after which closed forms and simulations are over
REPORT_S = 3.0  # for the table, the picture and the files

Prober = Callable[[Config, float], ProbeResult]
Say = Callable[[str], None]


class TuneRequest(msgspec.Struct, frozen=True, kw_only=True):
    source: str  # a YAML file, or a preset
    overrides: tuple[str, ...] = ()
    minutes: float
    over: dict[str, tuple[str, ...]] = {}  # `search_of`; empty for all knobs
    gpus: int | None = None  # that replicas and learner may have; None for those of this machine
    out: Path  # a new or empty folder


class TuneResult(msgspec.Struct, frozen=True, kw_only=True):
    """`points` are those that were probed, by rate, then those that were only simulated."""

    config: str
    folder: str
    devices: str  # what `TunedPoint.devices` counts: GPUs or cores
    points: tuple[TunedPoint, ...]
    overrides: tuple[str, ...]  # of the chosen point, those of the command line included
    drift: float | None  # largest relative difference of the last and the first probe of the same settings
    seconds: float
    interrupted: bool = False

    @property
    def chosen(self) -> TunedPoint:
        return next(point for point in self.points if point.chosen)


class Tuner:
    """One search. Raises ConfigError where something is wrong with the request, ProbeError where the baseline fails.

    `prober` and `clock` (seconds) are the real ones unless a test has others.
    """

    def __init__(
        self, request: TuneRequest, say: Say, prober: Prober = run_probe, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request, self._say, self._prober, self._clock = request, say, prober, clock
        self._config = load(request.source, request.overrides)
        refuse_colocated(self._config)
        require_own_servers(self._config, "tune")
        if request.out.is_dir() and any(request.out.iterdir()):
            raise ConfigError(f"--out {request.out}: is not empty; name a new folder")
        writable("--out", str(request.out))
        self._hardware = hardware_of(self._config, request.gpus)
        self._began = clock()
        self._deadline = self._began + 60 * request.minutes
        self._number = 0  # of the next probe
        self._start_s = 0.0  # of a probe, without its steps
        self._finalists: list[Point] = []

    def run(self) -> TuneResult:
        """See the module."""
        request = self._request
        request.out.mkdir(parents=True, exist_ok=True)
        self._say(
            f"{duration(60 * request.minutes)} for {request.source} in {request.out}: first a short run (a probe) of its settings"
        )
        try:
            baseline = self._probe({}, BEYOND_BOUND - SETTLING)
        except ProbeError as error:
            raise ProbeError(f"the first probe, of the config's own settings, failed: {error}") from error
        profile = profile_of(request.out / baseline.name, resumable=False)
        write_profile(profile, request.out / PROFILE)
        search, interrupted = TuneSearch(profile), False
        try:
            self._simulate(search, profile, baseline)
            self._say_baseline(search, profile, baseline)
            self._climb(search)
        except KeyboardInterrupt:
            interrupted = True
            if not search.known:
                raise
        return self._result(search, interrupted)

    # --- simulations ----------------------------------------------------------------------------------------------

    def _simulate(self, search: TuneSearch, profile: RunProfile, baseline: ProbeResult) -> None:
        """Simulate the config's own settings and as many others as there is time for."""
        plan, hardware = SimulationPlan.of(profile), self._hardware
        devices = None if hardware.devices is None else hardware.devices - hardware.others
        limits = SearchLimits(self._config.learner.algorithm.minibatches, devices)
        every = grid_of(profile, estimate(plan), limits, self._request.over)
        grid = affordable(profile, every, limits)
        began, budget_s = self._clock(), min(60 * self._request.minutes, self._deadline - self._clock())
        own = simulate(plan, plan.compared_steps)
        each_s = max(1e-3, self._clock() - began)
        search.add({}, own.figures)
        search.probed({}, baseline)
        estimated, refused = self._estimate(profile, grid, began + ESTIMATING * budget_s)
        until = began + SIMULATING * budget_s
        done, stuck = 1, 0
        for point in prune(estimated, max(1, int((until - self._clock()) / each_s)))[1:]:
            if self._clock() > until:
                break
            try:
                other = SimulationPlan.of(profile, simulated(point))
                search.add(point, simulate(other, other.compared_steps).figures)
                done += 1
            except StateError:
                stuck += 1
        counts = {
            "that want more devices than there are": len(every) - len(grid),
            "refused by the config": refused,
            "in which no batch is ever full": stuck,
            "that are slower by an estimate, or for which no time was left": len(grid) - done - refused - stuck,
        }
        skipped = ", ".join(f"{number} {why}" for why, number in counts.items() if number)
        self._say(
            f"simulated {done} of {len(every)} combinations in {duration(self._clock() - began)}"
            + f"; skipped: {skipped}" * bool(skipped)
        )

    def _estimate(self, profile: RunProfile, grid: Sequence[Point], until: float) -> tuple[list[EstimatedPoint], int]:
        """The closed form of the config's own settings and of others in random order, until that time; how many of those the config
        refuses."""
        others = random.Random(0).sample(grid[1:], len(grid) - 1)
        found, refused = [estimate_point(profile, grid[0])], 0
        for point in others:
            if self._clock() > until:
                break
            try:
                self._load(point)
                found.append(estimate_point(profile, point))
            except ConfigError:
                refused += 1
        return found, refused

    def _load(self, point: Point) -> Config:
        """The config of a point. Raises ConfigError where its keys do not fit together."""
        overrides = [f"{key}={value}" for key, value in point.items()]
        return load(self._request.source, [*self._request.overrides, *overrides])

    def _say_baseline(self, search: TuneSearch, profile: RunProfile, baseline: ProbeResult) -> None:
        own = search.simulated_rate({})
        measured = baseline.figures.trained_tokens_per_s
        guessed = "" if profile.engine.source == "recorded" else "; its servers do not time completions: guessed"
        self._say(
            f"config's settings: {count(measured)} trained tok/s, the learner waits {share(baseline.figures.learner_wait)}, "
            f"simulated {count(own)} ({100 * (own / measured - 1):+.0f} %){guessed}"
        )

    # --- probes ---------------------------------------------------------------------------------------------------

    def _climb(self, search: TuneSearch) -> None:
        """The rungs, as far as the time goes, until one point is left."""
        points = search.promising(WIDEST)
        own, *probes = (search.expected_probe(point, self._start_s) for point in ({}, *points))
        left_s = self._deadline - self._clock() - REPORT_S
        rungs = schedule(probes, own, left_s)
        self._say(_plan_text(rungs, probes, own, left_s))
        field, known = points[: rungs[0].points] if rungs else [], [Point()]  # the own settings have their first probe
        for number, rung in enumerate(rungs):
            if number:
                field, known = search.survivors(known, rung.points), []
                self._finalists = list(field)
                if len(field) < 2:
                    self._say(
                        f"{' '.join(map(label_of, field))}: faster than the others by more than short runs are wrong"
                    )
                    return
            for point in field:
                if self._try(search, point, rung.steps):
                    known.append(point)
            between = not number or (len(known) == 2 and search.undecided(known))
            if rung.again and len(known) > 1 and between:
                self._try(search, known[0], rung.steps)
        self._finalists = known or self._finalists

    def _try(self, search: TuneSearch, point: Point, steps: int) -> bool:
        """Probe a point; whether there is a result."""
        expected_s = search.expected_probe(point, self._start_s).seconds(steps)
        if expected_s > self._deadline - self._clock() - REPORT_S:
            self._say(f"{label_of(point)}: left out, {duration(expected_s)} do not fit any more")
            return False
        try:
            result = self._probe(point, steps)
        except (ProbeError, ConfigError) as error:
            self._say(f"{label_of(point)}: failed and left out: {error}")
            search.failed(point)
            return False
        search.probed(point, result)
        rate, own = result.figures.trained_tokens_per_s, search.simulated_rate(point)
        self._say(
            f"{result.name}, {label_of(point)}, {steps} steps: {count(rate)} trained tok/s, simulated {count(own)} "
            f"({100 * (own / rate - 1):+.0f} %), staleness {result.figures.staleness:.2f}; took {duration(result.seconds)}"
        )
        return True

    def _probe(self, point: Point, steps: int) -> ProbeResult:
        """Run it. Raises ProbeError, and ConfigError where the keys of the point do not fit together."""
        folder = self._request.out / f"probe-{self._number:02d}"
        self._number += 1
        result = self._prober(probe_config(self._load(point), folder, steps), self._deadline)
        self._start_s = max(self._start_s, result.start_s) if point else result.start_s
        return result

    # --- the end --------------------------------------------------------------------------------------------------

    def _result(self, search: TuneSearch, interrupted: bool) -> TuneResult:
        points = search.results(self._finalists)
        chosen = next(point for point in points if point.chosen)
        own = dict(override.split("=", 1) for override in self._request.overrides) | chosen.changes
        result = TuneResult(
            config=self._request.source,
            folder=str(self._request.out),
            devices=self._hardware.kind,
            points=tuple(points),
            overrides=tuple(f"{key}={value}" for key, value in own.items()),
            drift=_drift(points),
            seconds=self._clock() - self._began,
            interrupted=interrupted,
        )
        write_atomic(self._request.out / RESULT, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        return result


def draw(result: TuneResult, path: Path) -> None:
    """Write the picture. Raises ConfigError where it cannot be written."""
    points = [
        TuningPoint(
            " ".join(one.labels),
            (one.simulated.staleness, one.simulated.trained_tokens_per_s),
            one.measured and (one.measured.staleness, one.measured.tokens_per_s),
            one.chosen,
        )
        for one in result.points
    ]
    try:
        save_png(tuning(points), path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}; --out names another folder") from None


def _plan_text(rungs: Sequence[Rung], probes: Sequence[ExpectedProbe], own: ExpectedProbe, left_s: float) -> str:
    if not probes:
        return "plan: no more probes, no other settings are left"
    if not rungs:
        shortest = min(probe.seconds(STEPS[0]) for probe in probes)
        return f"plan: no more probes, the shortest takes {duration(shortest)} of the {duration(left_s)} left"
    one = "one of them" if len(rungs) > 1 else "the config's settings"
    parts = [
        f"{r.points} with {r.steps} measured steps{f', {one} again' * r.again}"
        if r is rungs[0]
        else f"{r.points} with {r.steps}{f', {one} again' * r.again}"
        for r in rungs
    ]
    takes = f"about {duration(expected_s(rungs, probes, own))} of the {duration(left_s)} left"
    return f"plan: of {len(probes)} promising combinations try at most {', then '.join(parts)}: {takes}"


def _drift(points: Sequence[TunedPoint]) -> float | None:
    """The largest, of points that were probed more than once."""
    found = [
        probes[-1].figures.trained_tokens_per_s / probes[0].figures.trained_tokens_per_s - 1
        for probes in (point.probes for point in points)
        if len(probes) > 1
    ]
    return max(found, key=abs, default=None)
