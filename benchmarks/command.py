"""`slipstream bench NAME [--json]`: contender and floor side by side in one run, ratios first."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from ..launch.cli.options import CommandTable
from ..monitor.output import open_console, print_line

if TYPE_CHECKING:
    from .result import Result

NAMES = (
    "rollout",
    "weightsync",
    "buffer",
    "sandbox",
    "tools",
    "learner",
    "simulator",
    "prediction",
    "tune",
    "explain",
    "alerts",
    "recording",
    "dashboard",
    "learning",
    "distillation",
    "async",
    "cluster",
)

BENCHMARKS_OF_OPTION = {
    "sizes": ("rollout", "weightsync", "tools", "learner"),
    "seeds": ("learning", "distillation", "alerts"),
    "staleness": ("learning", "async"),
    "steps": ("learning", "distillation", "prediction", "tune", "explain", "alerts", "async"),
    "out": ("learning", "distillation", "prediction", "tune", "explain", "alerts", "async"),
    "browser": ("dashboard",),
    "config": ("async",),
}
"""The benchmarks that know an option, by its name: of those that not all know."""

Measure = Callable[[Path], Coroutine[Any, Any, "Result | tuple[Result, ...]"]]
"""Runs one measurement in the scratch folder given."""


def register(commands: CommandTable) -> None:
    parser = commands.add("bench", bench, "measure what Slipstream costs, as ratios of contender and floor in one run")
    parser.add_argument("name", metavar="NAME", choices=NAMES, help=" or ".join(NAMES))
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--sizes", metavar="SIZE", nargs="+", help="policies to measure, for example 3M 50M; default: all"
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="learning, distillation, alerts: seeds; default: 3, 3, 20"
    )
    text = "learning, async: bounds to try; default: 0 1 2 4 8"
    parser.add_argument("--staleness", type=int, metavar="N", nargs="+", help=text)
    text = "learning, distillation, prediction, tune, explain, alerts, async: steps; default: 60, 60, 30, 60, 16, 60, 8"
    parser.add_argument("--steps", type=int, metavar="N", help=text)
    text = "the same: where runs are kept; default: runs/bench-learning, runs/bench-distillation, and nowhere"
    parser.add_argument("--out", metavar="DIR", help=text)
    text = "dashboard: measure the page in Chromium, which must be installed"
    parser.add_argument("--browser", action="store_const", const=True, help=text)
    text = "async: measure runs of this config, with its engine and learner; default: both are emulated"
    parser.add_argument("--config", metavar="CONFIG", help=text)


def bench(arguments: argparse.Namespace) -> int:
    """Run one benchmark; returns the exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: servers and learner share the cores
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the servers end with it
    from ..errors import ConfigError, first_cause
    from .models import SHAPES
    from .result import Report, machine, render

    if unknown := sorted(set(arguments.sizes or ()) - SHAPES.keys()):
        raise ConfigError(f"--sizes: {unknown[0]} is not one of {', '.join(SHAPES)}")
    console = open_console(stderr=True)
    for option, names in BENCHMARKS_OF_OPTION.items():
        if getattr(arguments, option) is not None and arguments.name not in names:
            *first, last = (f"`slipstream bench {name}`" for name in names)
            known = f"{', '.join(first)} and {last} know" if first else f"{last} knows"
            raise ConfigError(f"--{option}: only {known} it; leave it out")
    measurements = _measurements(arguments, console)
    results: list[Result] = []
    try:
        with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
            for number, (what, measure) in enumerate(measurements):
                console.print(f"measuring {what}")
                scratch = Path(folder) / str(number)
                scratch.mkdir()
                measured = asyncio.run(measure(scratch))
                results += measured if isinstance(measured, tuple) else [measured]
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    finally:  # what was measured before an error, too
        report = Report(arguments.name, machine(), tuple(results))
        if arguments.json:
            print_line(msgspec.json.encode(report).decode())
        else:
            render(report, open_console())
    return 0


def _measurements(arguments: argparse.Namespace, console: Console) -> list[tuple[str, Measure]]:
    """What the benchmark measures, each with a text. Raises ConfigError."""
    name = arguments.name
    if name in BENCHMARKS_OF_OPTION["sizes"]:
        sized = {"rollout": _rollout, "weightsync": _weightsync, "tools": _tools, "learner": _learner}
        return sized[name](arguments.sizes)
    if name in BENCHMARKS_OF_OPTION["steps"]:
        runs = {
            "learning": _learning,
            "distillation": _distillation,
            "prediction": _prediction,
            "tune": _tune,
            "explain": _explain,
            "alerts": _alerts,
            "async": _async,
        }
        return runs[name](arguments, console)
    if name == "dashboard":
        return _dashboard(browser=bool(arguments.browser))
    others = {
        "buffer": _buffer,
        "sandbox": _sandbox,
        "simulator": _simulator,
        "recording": _recording,
        "cluster": _cluster,
    }
    return others[name]()


def _rollout(sizes: list[str] | None) -> list[tuple[str, Measure]]:
    from .gateway import gateway
    from .overhead import overhead
    from .pushes import partial, rolling

    parts: list[tuple[str, Measure]] = []
    for size in sizes or ["1M", "10M"]:
        parts.append((f"worker over bare engine, {size}", lambda folder, size=size: overhead(folder, size)))
    if not sizes:
        parts.append(("the gateway over the session", gateway))
    for size in sizes or ["3M"]:
        for replicas in (2, 4):
            what = f"rolling push over global stop, {size}, {replicas} replicas"
            parts.append((what, lambda folder, size=size, n=replicas: rolling(folder, size, n)))
        what = f"partial rollouts over restarts, {size}"
        parts.append((what, lambda folder, size=size: partial(folder, size)))
    return parts


def _weightsync(sizes: list[str] | None) -> list[tuple[str, Measure]]:
    from .transfers import delta, transfers

    parts: list[tuple[str, Measure]] = []
    for size in sizes or ["3M", "50M", "300M"]:
        parts.append((f"transfers, {size}", lambda folder, size=size: transfers(folder, size)))
    for size in sizes or ["50M"]:
        parts.append((f"delta over full, {size}", lambda folder, size=size: delta(folder, size)))
    return parts


def _buffer() -> list[tuple[str, Measure]]:
    from . import buffer
    from .buffer_engine import beside_an_engine

    return [
        ("the buffer over ZeroMQ and over SQLite", buffer.floors),
        ("latency to a batch", buffer.latency),
        ("the buffer beside Ray's queue", buffer.beside_ray),
        ("the buffer beside a busy engine", beside_an_engine),
        ("memory at a million trajectories", buffer.memory),
    ]


def _sandbox() -> list[tuple[str, Measure]]:
    from .sandbox import sandbox

    return [("sandboxes over bare processes", sandbox)]


def _tools(sizes: list[str] | None) -> list[tuple[str, Measure]]:
    from .tools import tools

    return [
        (f"a worker whose episodes call tools, {size}", lambda folder, size=size: tools(folder, size))
        for size in sizes or ["10M"]
    ]


def _simulator() -> list[tuple[str, Measure]]:
    from .simulator import simulator

    return [("the simulator", simulator)]


def _dashboard(*, browser: bool) -> list[tuple[str, Measure]]:
    from .dashboard import dashboard
    from .dashboard_browser import in_browser, required
    from .dashboard_live import looked_at

    if browser:
        required()
        return [("the page in Chromium", in_browser)]
    return [("the dashboard", dashboard), ("a buffer that the dashboard reads", looked_at)]


def _cluster() -> list[tuple[str, Measure]]:
    from .cluster_buffer import buffer
    from .cluster_publisher import publisher
    from .cluster_router import router
    from .cluster_shards import shards
    from .cluster_supervisor import supervisor

    return [
        ("a worker's router, up to 1,000 replicas", router),
        ("the supervisor, up to 1,000 workers and as many replicas", supervisor),
        ("the publisher, up to 1,000 replicas", publisher),
        ("the buffer, up to 1,000 workers", buffer),
        ("the buffer with 1, 2 and 4 shards", shards),
    ]


def _recording() -> list[tuple[str, Measure]]:
    from .recording import buffer_recording, run_recording, step_recording

    return [
        ("the buffer with and without its series", buffer_recording),
        ("the learner's step with and without its spans", step_recording),
        ("whole runs with and without spans and series", run_recording),
    ]


def _prediction(arguments: argparse.Namespace, console: Console) -> list[tuple[str, Measure]]:
    from .prediction import LEAST_STEPS, PROBES, STEPS, prediction

    steps = _steps(arguments, STEPS, LEAST_STEPS)
    out = None if arguments.out is None else Path(arguments.out)
    what = f"runs of {steps} steps on {len(PROBES)} other settings, each between two of its own"
    return [(what, lambda folder: prediction(out or folder, steps, console.print))]


def _async(arguments: argparse.Namespace, console: Console) -> list[tuple[str, Measure]]:
    from ..configs import load
    from .asynchrony import LEAST_STEPS, PLAIN, STEPS, arms, checked_bounds, emulated, real
    from .commands import make_empty

    steps = _steps(arguments, STEPS, LEAST_STEPS)
    bounds = checked_bounds(arguments.staleness)
    out, config = None if arguments.out is None else Path(arguments.out), arguments.config
    if out is not None:
        make_empty(out)
    if config is not None:
        load(config, PLAIN)
        what = f"{len(bounds)} runs of {config}"
        return [(what, lambda folder: real(config, out or folder, bounds, steps, console.print))]
    every = arms(bounds)
    what = f"{len(every)} runs with an emulated engine and learner"
    return [(what, lambda folder: emulated(out or folder, every, steps, console.print))]


def _tune(arguments: argparse.Namespace, console: Console) -> list[tuple[str, Measure]]:
    from .tune import LEAST_STEPS, MINUTES, STEPS, tuning

    steps = _steps(arguments, STEPS, LEAST_STEPS)
    out = None if arguments.out is None else Path(arguments.out)
    what = f"a search of {MINUTES} minutes at most, and a sweep of six points, {steps} steps each"
    return [(what, lambda folder: tuning(out or folder, steps, console.print))]


def _explain(arguments: argparse.Namespace, console: Console) -> list[tuple[str, Measure]]:
    from .commands import make_empty
    from .explanation import LEAST_STEPS, PLANTED, STEPS, explained

    steps = _steps(arguments, STEPS, LEAST_STEPS)
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None:
        make_empty(out)
    what = f"{len(PLANTED)} runs with an emulated engine and learner, and again with what explain changes"
    return [(what, lambda folder: explained(out or folder, PLANTED, steps, console.print))]


def _alerts(arguments: argparse.Namespace, console: Console) -> list[tuple[str, Measure]]:
    from ..errors import ConfigError
    from .alerts import SEEDS, STEPS, healthy

    seeds, steps = SEEDS if arguments.seeds is None else arguments.seeds, _steps(arguments, STEPS, 1)
    if seeds < 1:
        raise ConfigError(f"--seeds: {seeds} is not allowed; allowed are 1 and more")
    out = None if arguments.out is None else Path(arguments.out)
    what = f"{seeds} healthy runs of {steps} steps"
    return [(what, lambda folder: healthy(out or folder, seeds, steps, console.print))]


def _steps(arguments: argparse.Namespace, default: int, least: int) -> int:
    """Of `--steps`. Raises ConfigError."""
    from ..errors import ConfigError

    steps = default if arguments.steps is None else arguments.steps
    if steps < least:
        raise ConfigError(f"--steps: {steps} is not allowed; allowed are {least} and more")
    return steps


def _learner(sizes: list[str] | None) -> list[tuple[str, Measure]]:
    from .learner import learner

    return [
        (f"the learner's step, {size}", lambda folder, size=size: learner(folder, size))
        for size in sizes or ["1M", "10M"]
    ]


def _distillation(arguments: argparse.Namespace, console: Console) -> list[tuple[str, Measure]]:
    from ..errors import ConfigError
    from .distillation import LEAST_STEPS, SEEDS, STEPS, distillation

    seeds = SEEDS if arguments.seeds is None else arguments.seeds
    steps = STEPS if arguments.steps is None else arguments.steps
    for name, value, least in (("seeds", seeds, 1), ("steps", steps, LEAST_STEPS)):
        if value < least:
            raise ConfigError(f"--{name}: {value} is not allowed; allowed are {least} and more")
    out = Path(arguments.out or "runs/bench-distillation")
    return [
        (
            f"a teacher and {seeds} seeds of {steps} steps, in {out}",
            lambda _: distillation(out, seeds, steps, console.print),
        )
    ]


def _learning(arguments: argparse.Namespace, console: Console) -> list[tuple[str, Measure]]:
    from ..errors import ConfigError
    from .learning import SEEDS, STALENESS, STEPS, learning

    seeds = SEEDS if arguments.seeds is None else arguments.seeds
    steps = STEPS if arguments.steps is None else arguments.steps
    staleness = STALENESS if arguments.staleness is None else tuple(dict.fromkeys(arguments.staleness))
    for name, value, least in (("seeds", seeds, 1), ("steps", steps, 1), ("staleness", min(staleness), 0)):
        if value < least:
            raise ConfigError(f"--{name}: {value} is not allowed; allowed are {least} and more")
    out = Path(arguments.out or "runs/bench-learning")
    what = f"{seeds} seeds of {steps} steps, staleness {', '.join(map(str, staleness))}, in {out}"
    return [(what, lambda _: learning(out, seeds, staleness, steps, console.print))]
