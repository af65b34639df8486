"""`slipstream serve`: one inference server of a config, for a run that does not start its own."""

from __future__ import annotations

import argparse

from ...configs import load
from ...monitor.output import print_notice
from .options import CommandTable, add_config


def register(commands: CommandTable) -> None:
    parser = commands.add("serve", serve, "run one inference server of a config, for a run that does not start its own")
    add_config(parser)
    parser.add_argument(
        "--address", required=True, metavar="https://HOST:PORT", help="to listen at; HOST 0.0.0.0 is all addresses"
    )
    parser.add_argument(
        "--keys",
        required=True,
        metavar="FILE",
        help="its tokens, key and certificate, made where missing; rollout.engine.replicas names a copy",
    )


def serve(options: argparse.Namespace) -> int:
    from ..engine_server import serve_engine

    config = load(options.config, options.overrides, notice=print_notice)
    serve_engine(config, options.address, options.keys, print_notice)
