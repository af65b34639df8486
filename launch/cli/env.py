"""`slipstream env check`: the environment author's test suite."""

from __future__ import annotations

import argparse

from ...configs import load
from ...configs.checks import PYTHON_NAME
from ...configs.environments import parts_by_key
from ...errors import ConfigError, EnvError
from ...monitor.output import print_line, print_notice
from .options import CommandTable, add_config, add_overrides

VIOLATED = 1


def register(commands: CommandTable) -> None:
    parser = commands.add("env", _check, "work on an environment: check it against its contract")
    actions = CommandTable(parser)
    check = actions.add("check", _check, "play an environment with scripted policies and name what breaks its contract")
    check.add_argument("what", metavar="WHAT", help="`package.module:Factory`, a YAML file, or a preset")
    add_overrides(check)
    serve = actions.add("serve", _serve, "run the environments of a config for workers on other hosts")
    add_config(serve)
    serve.add_argument("--address", required=True, metavar="tcp://HOST:PORT", help="to listen at; HOST 0.0.0.0 is all")
    serve.add_argument(
        "--keys", default="", metavar="FILE", help="keys of the link, made where missing; env.keys names a copy"
    )


def _serve(options: argparse.Namespace) -> int:
    from ..env_server import serve_environments

    config = load(options.config, options.overrides, notice=print_notice)
    serve_environments(config, options.address, options.keys, print_notice)
    return 0


def _check(options: argparse.Namespace) -> int:
    """One line for each check; exit status 1 where one fails."""
    from ...envs.check import CHECKS, ContractViolation, run_check, subject_of

    what = options.what
    given = ["env.kind=python", f"env.factory={what}"] if PYTHON_NAME.fullmatch(what) else []
    config = load("quickstart" if given else what, [*given, *options.overrides], notice=print_notice)
    failed = False
    for key, section in parts_by_key(config.env).items():
        subject = subject_of(section, config.seed)
        print_line(f"{key}: {subject.source.name}")
        for name in CHECKS:
            try:
                found, mark = run_check(name, subject), "ok"
            except (ContractViolation, ConfigError, EnvError) as error:
                found, mark, failed = " ".join(str(error).split()), "WRONG", True
            print_line(f"{mark:6}{name:13}{found}")
    return VIOLATED if failed else 0
