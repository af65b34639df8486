"""`slipstream simulate RUN|PROFILE|CONFIG [key=value ...] [--sweep key=a,b] [--gpus N] [--json]`: what other settings would do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from ...common.fsio import is_folder
from ...errors import ConfigError
from ...monitor.output import open_console, print_line
from ...monitor.text import count, share
from .options import CommandTable, add_overrides

if TYPE_CHECKING:
    from ...planner.figures import RunFigures
    from ..simulation import Comparison

COLUMNS = ("trained\ntok/s", "", "cycle\ns", "learner\nwaits", "slots\nidle", "staleness", "withheld")


def register(commands: CommandTable) -> None:
    parser = commands.add("simulate", simulate, "predict what a run would do with other settings")
    text = "the folder of a run, finished or not; a profile.json; or a config whose run.dir holds a run"
    parser.add_argument("source", metavar="RUN|PROFILE|CONFIG", help=text)
    add_overrides(parser, "buffer.max_staleness=1")
    parser.make_epilog = _keys
    text = "try each value; repeat it for the combinations with another key"
    parser.add_argument("--sweep", action="append", default=[], metavar="key=a,b", help=text)
    text = "try ways to divide N GPUs between replicas and learner; on a CPU N counts processes"
    parser.add_argument("--gpus", type=int, metavar="N", help=text)
    text = "with CONFIG: a run or a profile.json whose times and lengths to take"
    parser.add_argument("--profile", metavar="RUN|PROFILE", help=text)
    text = "learner steps of each simulation; default: as many as take some seconds, at most 60"
    parser.add_argument("--steps", type=int, default=0, metavar="N", help=text)
    text = "where simulate.png and, of a run, profile.json are written; default: the run, else this folder"
    parser.add_argument("--out", metavar="FOLDER", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON and write no file, unless --out names a folder")


def _keys() -> str:
    from ...planner.profile import SIMULATED

    return "\n".join(["keys that a simulation knows:", "", *(f"  {key}" for key in SIMULATED)])


def simulate(options: argparse.Namespace) -> int:
    from .. import simulation

    for name, least in (("steps", 0), ("gpus", 2)):
        if (value := getattr(options, name)) is not None and value < least:
            raise ConfigError(f"--{name} {value}: allowed are {least} and more")
    if options.out is not None and not is_folder(options.out):
        raise ConfigError(f"--out {options.out}: there is no such folder")
    of_run = is_folder(options.source)
    dimensions = [simulation.sweep_of(text) for text in options.sweep]
    profile, folder = simulation.find_profile(options.source, options.profile)
    if options.gpus is not None:
        dimensions.append(simulation.require_splits(profile, options.gpus))
    found = simulation.compare(profile, options.overrides, dimensions, options.steps)
    out = folder if options.out is None else Path(options.out)
    saved: list[Path] = []
    if options.out is not None or not options.json:
        if of_run:
            saved.append(simulation.save(profile, out))
        simulation.draw(found, out / simulation.PICTURE)
        saved.append(out / simulation.PICTURE)
    if options.json:
        print_line(msgspec.json.encode(found).decode())
    else:
        show(found, profile.engine.running, saved, open_console(), per_gpu=options.gpus is not None)
    return 0


def show(found: Comparison, running: float, saved: list[Path], console: Console, *, per_gpu: bool) -> None:
    """The table, what may be believed of it, and where the files are."""
    from ...planner.explain.gains import MISSED
    from ..simulation import frontier

    table = Table("", *COLUMNS, *(["GPUs"] if per_gpu else []), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    if found.measured is not None:
        table.add_row("measured", *_cells(found.measured, None))
        table.add_section()
    several, best = len(found.points) > 1, frontier(found.points)
    base = found.points[0]
    for point, on_frontier in zip(found.points, best, strict=True):
        name = "\n".join(point.labels) or "simulated"
        relative = base.figures.trained_tokens_per_s if point is not base else None
        cells = _cells(point.figures, relative)
        if several and on_frontier:
            cells[0] += "*"
        table.add_row(name, *cells, *([str(point.gpus)] if per_gpu else []))
    console.print(table)
    if several:
        console.print("* none of the others trains more tokens per second at the same or a lower staleness")
    if found.missed is not None and abs(found.missed) > MISSED:
        console.print(
            f"The simulation misses the run's own cycle by {100 * found.missed:+.0f} %: differences between settings of less than "
            "that mean nothing."
        )
    if found.engine == "fitted":
        console.print(
            f"The run did not record how fast its replicas decode: fitted at {running:.0f} running sequences each, guessed "
            "elsewhere."
        )
    console.print(f"{count(found.events)} events in {found.cpu_s:.1f} s; {', '.join(map(str, saved))}")


def _cells(figures: RunFigures, relative: float | None) -> list[str]:
    change = "" if not relative else f"{100 * (figures.trained_tokens_per_s / relative - 1):+.0f} %"
    return [
        count(figures.trained_tokens_per_s),
        change,
        f"{figures.cycle_s:.3g}",
        share(figures.learner_wait),
        share(figures.rollout_idle),
        f"{figures.staleness:.2f}",
        share(figures.withheld),
    ]
