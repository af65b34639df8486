"""`slipstream rate`: pass rates of the rows of a data set, and the rows between two bounds."""

from __future__ import annotations

import argparse
from pathlib import Path

from ... import __version__
from ...common.fsio import is_folder
from ...configs import load, run_config
from ...errors import ConfigError
from ...monitor.output import print_line, print_notice
from .options import CommandTable, add_config

SAMPLES = 8


def register(commands: CommandTable) -> None:
    parser = commands.add("rate", rate, "measure how often a model solves each row of a data set; write a filtered one")
    add_config(parser, or_run=True)
    text = "the new data set, .jsonl; what was measured for an earlier one of this name is used again"
    parser.add_argument("--out", required=True, metavar="FILE", help=text)
    text = f"attempts at each row; default: {SAMPLES}"
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="K", help=text)
    parser.add_argument("--min", type=float, default=0.0, metavar="RATE", help="lowest rate that is kept; default: 0")
    parser.add_argument("--max", type=float, default=1.0, metavar="RATE", help="highest rate that is kept; default: 1")
    parser.add_argument("--rows", type=int, default=0, metavar="N", help="rate the first N rows only; default: all")


def rate(options: argparse.Namespace) -> int:
    for name, least in (("samples", 1), ("rows", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name} {getattr(options, name)}: allowed are {least} and more")
    from ..rating import check_request
    from ..rating import rate as measure

    bounds, out = (options.min, options.max), Path(options.out)
    check_request(out, bounds)
    if is_folder(options.config):
        from ..export import model_at  # takes seconds

        with model_at(options.config, overrides=options.overrides) as model:
            config = load(str(run_config(options.config)), [f"model.path={model}", *options.overrides])
            name = f"{options.config}, {Path(model).name}"  # an unfinished run's is in another folder each time
            summary = measure(config, name, out, options.samples, options.rows, bounds)
    else:
        config = load(options.config, options.overrides, notice=print_notice)
        print_line(f"slipstream {__version__}: checks the config, then rates with {config.model.path}")
        summary = measure(config, config.model.path, out, options.samples, options.rows, bounds)
    failed = f"; {summary.failed} rows have no rate, all their episodes failed" if summary.failed else ""
    print_line(
        f"{summary.rows} rows, {options.samples} attempts each: {summary.unsolved} never solved, {summary.solved} always{failed}"
    )
    print_line(f"{summary.kept} rows with a pass rate from {options.min:g} to {options.max:g} are in {out}")
    return 0
