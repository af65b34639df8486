"""`slipstream doctor`: every check that `train` makes before it starts a process, one line each."""

from __future__ import annotations

import argparse

from ...configs import load
from ...errors import ConfigError
from ...monitor.output import print_line, print_notice
from .options import CommandTable, add_config

DEFAULT = "quickstart"
MARKS = {"ok": "ok", "wrong": "WRONG", "left": "-"}  # of a finding, before its line


def register(commands: CommandTable) -> None:
    parser = commands.add("doctor", doctor, "check this machine and a config for what would break a run")
    add_config(parser, default=DEFAULT)


def doctor(options: argparse.Namespace) -> int:
    from ..preflight import examine

    if "=" in options.config:  # the first of the overrides
        options.config, options.overrides = DEFAULT, [options.config, *options.overrides]
    config = load(options.config, options.overrides, notice=print_notice)
    healthy = True
    for finding in examine(config):
        healthy &= finding.state == "ok"
        print_line(f"{MARKS[finding.state]:6}{finding.name:19}{finding.text}")
    return 0 if healthy else ConfigError.exit_code
