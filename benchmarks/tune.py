"""`slipstream bench tune`: the settings that `slipstream tune` takes, beside those of an exhaustive sweep of the same six.

    tune, 10 minutes at most ──> chosen point        sweep: a whole run of each of the six points ──> the best of them
                                     └──────── both by their runs in the sweep ────────┘

Invariants:
- The search and the sweep have the same model and the same six points, one after the other on the same machine.
- Rates that are compared are of whole runs of the sweep, for the chosen point as for the best.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..launch.tune import TuneResult
from ..planner.fit import figures_of_rows
from ..planner.records import RunRecords
from ..planner.tune.search import TunedPoint
from .commands import Notify, make_empty, slipstream, warm_model
from .result import Result, Row

PRESET = "quickstart"
MINUTES = 10
STEPS = 60  # of each run of the sweep: those of the preset
LEAST_STEPS = 12
OVER = {"buffer.max_staleness": ("0", "1", "2"), "rollout.engine.max_concurrent": ("16", "64")}
OWN = {"buffer.max_staleness": "2", "rollout.engine.max_concurrent": "64"}  # of the preset


async def tuning(out: Path, steps: int, notify: Notify) -> tuple[Result, ...]:
    """Search and sweep in `out`, which must be empty or new. Raises ConfigError."""
    make_empty(out)
    model = await warm_model(out, PRESET, (), (), notify)
    words = (f"model.path={model}", f"run.dir={out / 'run'}")
    over = [word for key, values in OVER.items() for word in ("--over", f"{key}={','.join(values)}")]
    notify(f"the search, {MINUTES} minutes at most")
    began = time.monotonic()
    answer = await slipstream(
        *("tune", PRESET, *words, "--minutes", str(MINUTES), *over, "--json", "--out", str(out / "tune")),
        log=out / "tune.log",
    )
    search_s = time.monotonic() - began
    found = msgspec.json.decode(answer, type=TuneResult)
    rates, began = dict[str, float](), time.monotonic()
    for values in itertools.product(*OVER.values()):
        point = dict(zip(OVER, values, strict=True))
        folder = out / f"sweep-{len(rates)}"
        overrides = [f"{key}={value}" for key, value in point.items()]
        notify(f"the sweep: {' '.join(overrides)}")
        fixed = (f"model.path={model}", f"run.dir={folder}", f"learner.steps={steps}", "evaluation.tasks=0")
        await slipstream("train", PRESET, *overrides, *fixed, log=out / f"sweep-{len(rates)}.log")
        rates[name_of(point)] = figures_of_rows(RunRecords(folder).steady).trained_tokens_per_s
    return results(found, rates, search_s, time.monotonic() - began)


def name_of(changes: Mapping[str, str]) -> str:
    """The values of all keys in their order."""
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in (OWN | dict(changes)).items() if key in OWN)


def results(found: TuneResult, rates: Mapping[str, float], search_s: float, sweep_s: float) -> tuple[Result, ...]:
    """`rates` are the sweep's, in trained tokens per second, by `name_of` its points."""
    chosen, best = name_of(found.chosen.changes), max(rates, key=lambda name: rates[name])
    probed = {name_of(point.changes): point for point in found.points if point.measured}
    head = (
        Row("trained tokens per second", rates[chosen], rates[best], "tok/s", f"chosen: {chosen}; best: {best}"),
        Row("time", search_s, sweep_s, "s", f"{len(probed)} points run by the search, {len(rates)} by the sweep"),
    )
    return (
        Result(f"tune {PRESET} --minutes {MINUTES} over a sweep of {len(rates)} points", "tune", "sweep", head),
        Result("points that the search ran, over the sweep's runs of them", "tune", "sweep", _points(probed, rates)),
    )


def _points(probed: Mapping[str, TunedPoint], rates: Mapping[str, float]) -> tuple[Row, ...]:
    rows: list[Row] = []
    for name, point in probed.items():
        assert point.measured is not None
        runs = " + ".join(str(probe.figures.steps) for probe in point.probes)
        note = f"simulated {point.simulated.trained_tokens_per_s:,.0f}; steps {runs}"
        rows.append(Row(name, point.measured.tokens_per_s, rates[name], "tok/s", note))
    return tuple(rows)
