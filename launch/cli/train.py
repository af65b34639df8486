"""`slipstream train`, `resume` and `eval`."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from ... import __version__
from ...configs import describe_schema, load
from ...errors import ConfigError
from ...monitor.output import print_line, print_notice
from .config import fields_text
from .options import CommandTable, add_config, add_overrides, add_run


def register(commands: CommandTable) -> None:
    parser = commands.add("train", train, "start a run and see it through")
    add_config(parser)
    parser.make_epilog = lambda: "fields, their defaults, and what they mean:\n\n" + fields_text(describe_schema())
    parser = commands.add("resume", resume, "continue a run from its newest checkpoint")
    add_run(parser)
    add_overrides(parser)
    parser = commands.add("eval", evaluate, "play fresh tasks with the model of a config, or of a finished run")
    add_config(parser, or_run=True)
    parser.add_argument("--json", action="store_true", help="print JSON")


def train(options: argparse.Namespace) -> int:
    config = load(options.config, options.overrides, notice=print_notice)
    print_line(f"slipstream {__version__}: checks the config, then trains in {config.run.dir}")
    from .. import run  # takes seconds

    print_line(run.summary(run.train(config)))
    return 0


def resume(options: argparse.Namespace) -> int:
    path = str(run_config(options.run))
    before, config = load(path), load(path, [*options.overrides, f"run.dir={options.run}"])
    print_line(f"slipstream {__version__}: checks the config, then resumes {options.run}")
    from .. import run

    print_line(run.summary(run.resume(config, before, Path(options.run).resolve())))
    return 0


def evaluate(options: argparse.Namespace) -> int:
    path = Path(options.config)
    if path.is_dir():
        model = path / "model"
        if not model.is_dir():
            raise ConfigError(f"{path} holds no finished model; it appears as {model} when the last step is done")
        config = load(str(run_config(options.config)), [f"model.path={model}", *options.overrides])
    else:
        config = load(options.config, options.overrides, notice=print_notice)
    if not options.json:
        print_line(f"slipstream {__version__}: checks the config, then evaluates {config.model.path}")
    from .. import run

    result = run.evaluate(config, label="eval")
    if options.json:
        print_line(msgspec.json.encode(result).decode())
        return 0
    outcomes = ", ".join(f"{n} {name}" for name, n in result.outcomes.items())
    print_line(
        f"{config.model.path}: reward {result.reward_mean:.3f} ± {result.reward_stderr:.3f} "
        f"over {result.tasks} tasks ({outcomes}) in {result.seconds:.1f} s"
    )
    return 0


def run_config(run: str) -> Path:
    """The config file of a run folder. Raises ConfigError where the folder holds no run."""
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run} holds no run: there is no {path}")
    return path
