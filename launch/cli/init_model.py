"""`slipstream init-model`: a small random model and its tokenizer."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...configs import load
from ...monitor.output import print_line, print_notice
from .options import CommandTable, add_overrides


def register(commands: CommandTable) -> None:
    text = "make a random Qwen3 model of about a million parameters and train its tokenizer on an environment's demonstrations"
    parser = commands.add("init-model", init_model, text)
    parser.add_argument("directory", metavar="DIR", help="the Hugging Face folder to make")
    text = "the config whose environment the tokenizer is trained for; default: quickstart"
    parser.add_argument("--config", default="quickstart", help=text)
    add_overrides(parser)


def init_model(options: argparse.Namespace) -> int:
    from ..file_checks import environment_files
    from ..preflight import writable
    from ..run_inputs import RunInputs

    config = load(options.config, options.overrides, notice=print_notice)
    writable("DIR", options.directory)
    inputs = RunInputs(config)
    environment_files(inputs)
    from ..init_model import init_model as make  # takes seconds

    sources = [part.source for part in inputs.train]
    parameters = make(Path(options.directory), sources=sources, agent=config.agent, seed=config.seed)
    print_line(f"{options.directory}: a random Qwen3 model of {parameters / 1e6:.2f} million parameters")
    return 0
