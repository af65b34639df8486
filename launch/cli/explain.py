"""`slipstream explain RUN [--watch] [--json] [--fail-on critical]`: what is wrong, what to change, and what that gains."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import msgspec

from ...configs import run_config
from ...errors import ConfigError
from ...monitor.output import print_line
from .options import FOLLOWER_NICE, CommandTable, add_run

SEVERITIES = ("hint", "warning", "critical")
FAILED = 1  # exit status


def register(commands: CommandTable) -> None:
    parser = commands.add("explain", explain, "say what is wrong with a run, what to change, and what that gains")
    add_run(parser)
    text = "follow a run that goes on: explain it again after new steps, until it ends"
    parser.add_argument("--watch", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON; with --watch a line for each explanation")
    text = f"exit with status {FAILED} where the last explanation has an alert or a finding of this severity, or a worse one"
    parser.add_argument("--fail-on", choices=SEVERITIES, help=text)
    text = "offer no more than N GPUs, or cores where none are used; default: those of this machine"
    parser.add_argument("--gpus", type=int, metavar="N", help=text)


def explain(options: argparse.Namespace) -> int:
    if options.gpus is not None and options.gpus < 1:
        raise ConfigError(f"--gpus {options.gpus}: allowed are 1 and more")
    folder = Path(options.run)
    run_config(options.run)  # refuses what is no run before anything is imported that takes seconds
    from .. import explain as explaining

    shown, worst = "", ""
    if options.watch:
        os.nice(FOLLOWER_NICE)
    try:
        for found in (
            explaining.follow(folder, options.gpus) if options.watch else [explaining.explain_run(folder, options.gpus)]
        ):
            worst = found.worst
            text = msgspec.json.encode(found).decode() if options.json else "\n".join(found.lines())
            if text != shown:
                print_line(text)
            shown = text
    except KeyboardInterrupt:
        if not options.watch:
            raise
    limit = SEVERITIES[SEVERITIES.index(options.fail_on) :] if options.fail_on else ()
    return FAILED if worst in limit else 0
