"""The command line. Exit status: 0 done, 2 bad input (one line), 1 the run failed (one named error), 130 interrupted."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .. import __doc__ as package_doc
from .. import __version__
from ..configs import Config, describe, dump, load
from ..configs.schema import Fake, Mixture, PythonEnv, Rollout, Sglang
from ..errors import ConfigError, Interrupted, SlipstreamError
from . import cli_bench, cli_chaos, cli_ledger, cli_replicas, cli_waits
from .resources import wait_passively

if TYPE_CHECKING:
    from ..monitor.report import Report

INTERRUPTED = 130

Command = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    # argparse gives up on positional arguments that follow an option; key=value may stand anywhere.
    if any(word.startswith("-") or "=" not in word for word in rest) or (rest and "overrides" not in options):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    wait_passively()
    sys.path.append(os.getcwd())  # where the user's own environments and agents are
    try:
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
    except BrokenPipeError:
        return 1


# --- commands -----------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> int:
    from . import run

    return _finish(lambda: run.train(load(options.config, options.overrides)))


def resume(options: argparse.Namespace) -> int:
    from . import run

    path = str(_run_config(options.run))
    before, config = load(path), load(path, [*options.overrides, f"run.dir={options.run}"])
    return _finish(lambda: run.resume(config, before, Path(options.run).resolve()))


def evaluate(options: argparse.Namespace) -> int:
    from . import run

    path = Path(options.config)
    if path.is_dir():
        model = path / "model"
        if not model.is_dir():
            raise ConfigError(f"{path} holds no finished model; it appears as {model} when the last step is done")
        config = load(str(_run_config(options.config)), [f"model.path={model}", *options.overrides])
    else:
        config = load(options.config, options.overrides)
    result = run.evaluate(config, label="eval")
    if options.json:
        _out(bytes(result).decode())
        return 0
    values = msgspec.json.decode(bytes(result))
    outcomes = ", ".join(f"{n} {name}" for name, n in values["outcomes"].items())
    _out(
        f"{config.model.path}: reward {values['reward_mean']:.3f} ± {values['reward_stderr']:.3f} "
        f"over {values['tasks']} tasks ({outcomes}) in {values['seconds']:.1f} s"
    )
    return 0


def sft(options: argparse.Namespace) -> int:
    from .sft import fine_tune

    config = load(options.config, options.overrides)
    result = fine_tune(config, _out)
    held = f", {result.held_out[-1].loss:.3f} on what was held out" if result.held_out else ""
    _out(f"final loss {result.loss:.3f} nats per token{held}; the model is in {config.sft.out}")
    return 0


def init_model(options: argparse.Namespace) -> int:
    from ..envs import parts_of
    from .init_model import init_model as make
    from .preflight import writable

    config = load(options.config, options.overrides)
    writable("DIR", options.directory)
    sources = [part.source for part in parts_of(config.env, "train", config.seed)]
    parameters = make(Path(options.directory), sources=sources, agent=config.agent, seed=config.seed)
    _out(f"{options.directory}: a random Qwen3 model of {parameters / 1e6:.2f} million parameters")
    return 0


def doctor(options: argparse.Namespace) -> int:
    from .preflight import CHECKS

    config = load(options.config, options.overrides)
    healthy = True
    for name, check in CHECKS.items():
        try:
            found, mark = check(config), "ok"
        except ConfigError as error:
            found, mark, healthy = str(error), "WRONG", False
        _out(f"{mark:6}{name:13}{found}")
    return 0 if healthy else ConfigError.exit_code


def show_config(options: argparse.Namespace) -> int:
    config = load(options.config, options.overrides)
    _out(dump(config).rstrip() if options.yaml else _fields(config))
    return 0


def role(options: argparse.Namespace) -> int:
    from .roles import run_role

    return run_role(options.name, options.label, options.listen)


# --- helpers ------------------------------------------------------------------------------------------------------


def _finish(work: Callable[[], Report]) -> int:
    from .run import outcome

    report = work()
    _out(outcome(report))
    return 0


def _run_config(run: str) -> Path:
    path = Path(run) / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{run} holds no run: there is no {path}")
    return path


def _out(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _fields(*configs: Config) -> str:
    """Every field of the configs, each once, with its value in the first that has it."""
    lines, seen = [], set[str]()
    for field in (field for config in configs for field in describe(config)):
        if field.key in seen:
            continue
        seen.add(field.key)
        lines.append(f"{field.key} = {field.value}    ({field.type})")
        lines.append(f"    {field.doc}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="slipstream", description=package_doc, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"slipstream {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(
        name: str, command: Command, text: str, *, run: bool = False, default: str | None = None, epilog: str = ""
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=raw)
        sub.set_defaults(command=command)
        if run:
            sub.add_argument("run", metavar="RUN", help="the folder of a run")
        else:
            nargs = "?" if default else None
            sub.add_argument("config", metavar="CONFIG", nargs=nargs, default=default, help="a YAML file, or a preset")
        return sub

    def overrides(sub: argparse.ArgumentParser) -> argparse.ArgumentParser:
        sub.add_argument("overrides", nargs="*", metavar="key=value", help="for example learner.steps=20")
        return sub

    fields = "fields, their defaults, and what they mean:\n\n" + _fields(
        Config(),
        Config(env=PythonEnv(factory="package.module:Name")),
        Config(env=Mixture(parts={})),
        Config(rollout=Rollout(engine=Sglang())),
        Config(rollout=Rollout(engine=Fake())),
    )
    overrides(add("train", train, "start a run and see it through", epilog=fields))
    overrides(add("resume", resume, "continue a run from its newest checkpoint", run=True))
    sub = overrides(add("eval", evaluate, "play fresh tasks with the model of a config, or of a finished run"))
    sub.add_argument("--json", action="store_true", help="print JSON")
    overrides(add("sft", sft, "fine-tune model.path on conversations or demonstrations, into sft.out"))
    sub = commands.add_parser("init-model", help="make a small random model and its tokenizer")
    sub.add_argument("directory", metavar="DIR", help="the Hugging Face folder to make")
    sub.add_argument("--config", default="quickstart", help="whose environment the tokenizer is trained for")
    overrides(sub).set_defaults(command=init_model)
    cli_ledger.arguments(add("ledger", cli_ledger.ledger, "where every generated token is", run=True))
    cli_waits.arguments(add("waits", cli_waits.waits, "who waits for what in a run that goes on", run=True))
    replicas = "change the number of inference servers of a run that goes on"
    sub = commands.add_parser(
        "replicas", help=replicas, description=replicas, epilog=cli_replicas.COMMANDS, formatter_class=raw
    )
    cli_replicas.arguments(sub)
    text = "kill, stop and starve the processes of a run at random, then audit what is left of it"
    cli_chaos.arguments(overrides(add("chaos", cli_chaos.chaos, text)))
    bench = "measure what Slipstream costs, as ratios of contender and floor in one run"
    cli_bench.arguments(commands.add_parser("bench", help=bench, description=bench))
    overrides(add("doctor", doctor, "look for what would break a run", default="quickstart"))
    sub = overrides(add("config", show_config, "show every field of a config with its meaning"))
    sub.add_argument("--yaml", action="store_true", help="as a file that can be loaded again")
    sub = commands.add_parser("role", help="one process of a run (started by the launchers)")
    sub.add_argument("name")
    sub.add_argument("--label", default="")
    sub.add_argument("--listen", default="", metavar="HOST:PORT")
    sub.set_defaults(command=role)
    return parser


if __name__ == "__main__":
    sys.exit(main())
