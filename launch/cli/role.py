"""`slipstream role`: one process of a run, started by the launchers."""

from __future__ import annotations

import argparse

from .options import CommandTable


def register(commands: CommandTable) -> None:
    parser = commands.add("role", role, "run one process of a run (the launchers start it)")
    parser.add_argument("name")
    parser.add_argument("--label", default="")
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--listen", default="", metavar="HOST:PORT")
    parser.add_argument("--rendezvous", default="", metavar="HOST:PORT")


def role(options: argparse.Namespace) -> int:
    from ..supervisor.entrypoints import run_role

    return run_role(
        options.name, options.label, options.step, options.listen, options.rendezvous, checkpoint=options.checkpoint
    )
