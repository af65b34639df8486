"""`slipstream tune CONFIG --minutes M [--over keys] [--gpus N] [--json]`: find settings that train more tokens per second; and
`slipstream tune RUN --live`: move the staleness bound of a run that goes on."""

from __future__ import annotations

import argparse
import functools
import math
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from ...common.fsio import is_folder
from ...configs import load, run_config
from ...errors import ConfigError, Interrupted
from ...monitor.output import open_console, print_line
from ...monitor.text import count, duration, share
from .options import FOLLOWER_NICE, CommandTable, add_config

if TYPE_CHECKING:
    from ...planner.tune.search import TunedPoint
    from ..tune import TuneResult

BOUND = "buffer.max_staleness"
LEAST_MINUTES = 1.0
SHOWN = 6  # points of the table that were only simulated
COLUMNS = ("trained\ntok/s", "simu-\nlated", "x ess", "stale-\nness", "with-\nheld", "steps")


def register(commands: CommandTable) -> None:
    parser = commands.add(
        "tune", tune, "find settings that train more tokens per second, by simulations and short runs"
    )
    add_config(parser, or_run=True)
    text = "time for everything: a first run of the config's own settings, simulations, short runs of the best others"
    parser.add_argument("--minutes", type=float, metavar="M", help=text)
    text = (
        "settings to look at, as key=a,b or as key,key; repeat it for the combinations; default: max_staleness, groups_per_batch "
        "with minibatches, replicas with ranks, max_concurrent, min_members"
    )
    parser.add_argument("--over", action="append", default=[], metavar="KEYS", help=text)
    text = "GPUs that replicas and learner may have, or cores where none are used; default: those of this machine"
    parser.add_argument("--gpus", type=int, metavar="N", help=text)
    text = "a new folder for the runs and the results; default: runs/tune-CONFIG"
    parser.add_argument("--out", metavar="FOLDER", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON; what is done meanwhile goes to stderr")
    text = (
        "with RUN, which goes on: raise buffer.max_staleness while the learner waits, lower it while that costs nothing; within 0 "
        f"and the bound that the run began with, or the least and the largest of --over {BOUND}=a,b"
    )
    parser.add_argument("--live", action="store_true", help=text)


def tune(options: argparse.Namespace) -> int:
    if options.live:
        return follow(options)
    if options.minutes is None:
        raise ConfigError("--minutes: must be given, as in --minutes 10; or --live, for a run that goes on")
    if is_folder(options.config):
        raise ConfigError(
            f"{options.config} is a folder; a search takes a config, such as {options.config}/config.yaml"
        )
    if not LEAST_MINUTES <= options.minutes < math.inf:
        raise ConfigError(f"--minutes {options.minutes:g}: allowed are {LEAST_MINUTES:g} and more, less than infinity")
    if options.gpus is not None and options.gpus < 2:
        raise ConfigError(f"--gpus {options.gpus}: allowed are 2 and more, one for a replica and one for the learner")
    from ...planner.tune.space import search_of

    over = search_of(options.over)
    config = load(options.config, options.overrides)  # before anything is imported that takes seconds
    out = Path(options.out) if options.out else free_folder(Path(config.run.dir).parent, Path(options.config).stem)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: the run that goes on ends with it
    from .. import tune as tuning

    console = open_console(stderr=options.json)
    request = tuning.TuneRequest(
        source=options.config,
        overrides=tuple(options.overrides),
        minutes=options.minutes,
        over=over,
        gpus=options.gpus,
        out=out,
    )
    result = tuning.Tuner(request, functools.partial(console.print, soft_wrap=True, markup=False)).run()
    tuning.draw(result, out / tuning.PICTURE)
    if options.json:
        print_line(msgspec.json.encode(result).decode())
    else:
        show(result, console)
    if result.interrupted:
        raise Interrupted("interrupted; the search ended with what it knew")
    return 0


def follow(options: argparse.Namespace) -> int:
    """Tune a run that goes on, until it ends or the user interrupts."""
    for name in ("minutes", "gpus", "out", "json", "overrides"):
        if getattr(options, name):
            shown = " ".join(options.overrides) if name == "overrides" else f"--{name}"
            raise ConfigError(f"{shown}: --live knows no such thing; leave it out")
    limits = limits_of(options.over)
    run_config(options.config)  # refuses what is no run before anything is imported that takes seconds
    from ..live_tuning import LiveTuner

    tuner = LiveTuner(Path(options.config), limits, print_line)
    os.nice(FOLLOWER_NICE)
    try:
        tuner.follow()
    except KeyboardInterrupt:
        return 0
    return 0


def limits_of(over: Sequence[str]) -> tuple[int, int] | None:
    """The least and the largest value of `buffer.max_staleness=a,b`. Raises ConfigError."""
    if not over:
        return None
    key, _, values = over[0].partition("=")
    numbers = [value.strip() for value in values.split(",")]
    if len(over) > 1 or key.strip() != BOUND or not all(number.isdecimal() for number in numbers):
        raise ConfigError(f"--over {' '.join(over)}: --live moves one key, as in --over {BOUND}=0,4")
    return min(map(int, numbers)), max(map(int, numbers))


def free_folder(parent: Path, name: str) -> Path:
    """`tune-NAME` in `parent`, with a number where there is one."""
    number, path = 1, parent / f"tune-{name}"
    while path.exists():
        number += 1
        path = parent / f"tune-{name}-{number}"
    return path


def show(result: TuneResult, console: Console) -> None:
    """The table, what to take, and where the files are."""
    per = "GPU" if result.devices == "GPUs" else "core"
    table = Table("", *COLUMNS, f"{per}-h\nper M", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    probed = [point for point in result.points if point.measured]
    others = [point for point in result.points if not point.measured and point.frontier]
    for point in probed:
        table.add_row(*_cells(point))
    if others:
        table.add_section()
    for point in others[:SHOWN]:
        table.add_row(*_cells(point))
    console.print(table)
    console.print(
        "> chosen   * frontier: none of the others trains more tokens per second at the same or a lower staleness"
    )
    if others:
        console.print("The rows below the line were not run: expected by simulation and the runs above.")
    if result.drift is not None:
        console.print(
            f"Runs of the same settings differ by up to {100 * abs(result.drift):.0f} %: less than that means nothing."
        )
    own = next((point for point in probed if not point.changes), None)
    chosen = result.chosen
    if own is None or own.measured is None or chosen.measured is None or not chosen.changes:
        console.print("The config's own settings are the ones to take.")
    else:
        gain = 100 * (chosen.measured.tokens_per_s / own.measured.tokens_per_s - 1)
        age = chosen.measured.staleness - own.measured.staleness
        console.print(f"Chosen: {gain:+.0f} % trained tok/s, staleness {age:+.2f}:")
    command = shlex.join(["slipstream", "train", result.config, *result.overrides])
    console.print(f"  {command}", soft_wrap=True, markup=False)
    console.print(
        f"{len(probed)} combinations measured in {duration(result.seconds)}; {result.folder} has tune.json, tune.png, "
        "profile.json and the folders of the runs, without their weights",
        soft_wrap=True,
    )


def _cells(point: TunedPoint) -> list[str]:
    one, name = point.rating, "\n".join(point.labels)
    return [
        f"{'>' if point.chosen else ' '}{'*' if point.frontier else ' '} {name}".replace("\n", "\n   "),
        count(one.tokens_per_s),
        count(point.simulated.trained_tokens_per_s),
        count(one.ess_tokens_per_s),
        f"{one.staleness:.2f}",
        share(point.withheld),
        count(point.steps) if point.probes else "–",
        f"{one.device_hours:.3g}",
    ]
