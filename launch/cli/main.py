"""The command line: builds the parser and runs the command it names.

Exit status: 0 done, 2 bad input (one line), 1 the run failed (one named error), 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from ... import __version__
from ...common.gc import raise_gc_threshold
from ...errors import ConfigError, Interrupted, SlipstreamError
from .options import CommandParser, CommandTable, merge_overrides

INTERRUPTED = 130

COMMANDS = {
    "train": ".train",
    "resume": ".train",
    "eval": ".train",
    "submit": ".submit",
    "export": ".export",
    "rate": ".rate",
    "sft": ".sft",
    "init-model": ".init_model",
    "ledger": ".ledger",
    "show": ".show",
    "trace": ".trace",
    "dash": ".dash",
    "simulate": ".simulate",
    "explain": ".explain",
    "tune": ".tune",
    "waits": ".waits",
    "replicas": ".replicas",
    "workers": ".workers",
    "set": ".set",
    "chaos": "slipstream.chaos.command",
    "bench": "slipstream.benchmarks.command",
    "doctor": ".doctor",
    "env": ".env",
    "config": ".config",
    "serve": ".serve",
    "role": ".role",
    "program": ".program",
}
"""The module of each command. Only the module of the command that runs is imported, inside `main`, so that an interrupt gets its
answer from the first moment on; by name, because the product does not import the folders of chaos and the benchmarks."""

DESCRIPTION = """\
Train language-model agents with asynchronous, staleness-bounded reinforcement learning.

A first run on a laptop, from a random model to an evaluated policy:

  slipstream init-model models/random
  slipstream sft quickstart model.path=models/random sft.out=models/quickstart
  slipstream train quickstart
  slipstream eval runs/quickstart
"""


def main(arguments: Sequence[str] | None = None) -> int:
    raise_gc_threshold()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        parser = make_parser(words[0] if words else "")
        options, unparsed = parser.parse_known_args(arguments)
        merge_overrides(parser, options, unparsed)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: waiting threads do not spin
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # as in the roles, which download what is missing
        sys.path.append(os.getcwd())  # where the user's own environments and agents are
        return options.command(options)
    except Interrupted as stopped:
        sys.stderr.write(f"slipstream: {stopped}\n")
        return INTERRUPTED
    except SlipstreamError as error:
        line = " ".join(str(error).split())
        kind = "" if error.exit_code == ConfigError.exit_code else f"{type(error).__name__}: "
        sys.stderr.write(f"slipstream: {kind}{line}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("slipstream: interrupted\n")
        return INTERRUPTED
    finally:
        from ...monitor.output import flush_stdout

        flush_stdout()


def make_parser(command: str = "") -> CommandParser:
    """The parser of `command`, or of every command where there is none of that name."""
    parser = CommandParser(prog="slipstream", description=DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = CommandTable(parser)
    modules = [COMMANDS[command]] if command in COMMANDS else dict.fromkeys(COMMANDS.values())
    for module in modules:
        importlib.import_module(module, __package__).register(commands)
    return parser
