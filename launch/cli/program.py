"""`slipstream program`: the supervisor of a program's run, started by `slipstream.Run`."""

from __future__ import annotations

import argparse

from .options import CommandTable


def register(commands: CommandTable) -> None:
    commands.add("program", program, "supervise the run of a program (slipstream.Run starts it)")


def program(options: argparse.Namespace) -> int:
    from ..program.supervised import supervise_program

    return supervise_program()
