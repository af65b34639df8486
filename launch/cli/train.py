"""`slipstream train`, `resume` and `eval`."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ... import __version__
from ...common.fsio import is_folder
from ...configs import LIVE, RUN_CONFIG, Config, describe, describe_schema, load, run_config
from ...errors import ConfigError
from ...monitor.output import print_line, print_notice
from .config import fields_text
from .options import CommandTable, add_config, add_overrides, add_run, add_step

if TYPE_CHECKING:
    from ...monitor.settings import SettingChange


def register(commands: CommandTable) -> None:
    parser = commands.add("train", train, "start a run and see it through")
    add_config(parser)
    parser.add_argument(
        "--resume", action="store_true", help="resume the run where run.dir holds one, as a requeued job does"
    )
    parser.make_epilog = lambda: "fields, their defaults, and what they mean:\n\n" + fields_text(describe_schema())
    parser = commands.add("resume", resume, "continue a run from its newest checkpoint")
    add_run(parser)
    add_overrides(parser)
    parser = commands.add("eval", evaluate, "play held-out tasks with the model of a config, or of a run")
    add_config(parser, or_run=True)
    add_step(parser)
    parser.add_argument("--json", action="store_true", help="print a JSON object for each suite")


def train(options: argparse.Namespace) -> int:
    config = load(options.config, options.overrides, notice=print_notice)
    if options.resume and (Path(config.run.dir) / RUN_CONFIG).is_file():
        return _resume(config.run.dir, options.overrides, config)
    print_line(f"slipstream {__version__}: checks the config, then trains in {config.run.dir}")
    from .. import run

    print_line(run.summary(run.train(config)))
    return 0


def resume(options: argparse.Namespace) -> int:
    for override in options.overrides:
        key, _, folder = override.partition("=")
        if key.strip() == "run.dir" and Path(folder.strip()).resolve() != Path(options.run).resolve():
            raise ConfigError(
                f"{override}: a run is resumed in its own folder, {options.run}; copy it to resume it elsewhere"
            )
    return _resume(options.run, options.overrides)


def _resume(folder: str, overrides: Sequence[str], given: Config | None = None) -> int:
    """`given` is the config of `train --resume`, with the overrides: what they do not change is taken from the run."""
    from ...monitor.settings import SETTINGS, in_force, read_changes

    changes = read_changes(Path(folder) / SETTINGS)
    path, live, where = str(run_config(folder)), in_force(changes), f"run.dir={folder}"
    before = load(path, live)
    if given is None:
        config = load(path, [*live, *overrides, where])
    else:
        from ..run import with_absolute_paths  # takes seconds

        given = with_absolute_paths(given)
        config = with_absolute_paths(load(path, [*live, *_new(overrides, given, before, changes), where]))
        if kept := _different(given, config):
            keys = ", ".join(sorted(kept))
            print_notice(
                f"the run keeps its own {keys}; `slipstream resume {shlex.quote(folder)} key=value` changes it"
            )
    print_line(f"slipstream {__version__}: checks the config, then resumes {folder}")
    from .. import run

    print_line(run.summary(run.resume(config, before, Path(folder).resolve())))
    return 0


def _new(overrides: Sequence[str], given: Config, before: Config, changes: Sequence[SettingChange]) -> list[str]:
    """Those that ask for something else than the run has. A requeued job has the overrides that the run began with: it takes back
    nothing that `slipstream set` has changed since."""
    had = {change.key for change in changes if change.key in LIVE and LIVE[change.key].value(given) == change.old}
    different = _different(given, before) - had

    def asks(key: str) -> bool:
        """It, something in it, or the kind of a section around it is different."""
        return any(
            f"{one}.".startswith(f"{key}.") or (one.endswith(".kind") and key.startswith(one.removesuffix("kind")))
            for one in different
        )

    return [override for override in overrides if asks(override.partition("=")[0].strip())]


def _different(one: Config, other: Config) -> set[str]:
    """The keys whose values differ; the folder of a run may have been moved."""
    values, others = ({field.key: field.value for field in describe(config)} for config in (one, other))
    return {key for key in values.keys() | others.keys() if values.get(key) != others.get(key)} - {"run.dir"}


def evaluate(options: argparse.Namespace) -> int:
    from ...monitor.series import pass_text, reward_text

    with contextlib.ExitStack() as stack:
        if is_folder(options.config):
            from ..export import model_at  # takes seconds

            where = f"run.dir={options.config}"  # the run may have been moved
            model = stack.enter_context(model_at(options.config, options.step, options.overrides))
            config = load(str(run_config(options.config)), [f"model.path={model}", where, *options.overrides])
        elif options.step is not None:
            raise ConfigError(f"--step: {options.config} is no folder of a run; only a run has steps")
        else:
            config = load(options.config, options.overrides, notice=print_notice)
        what = Path(config.model.path).name if options.step is not None else config.model.path
        if not options.json:
            print_line(f"slipstream {__version__}: checks the config, then evaluates {what}")
        from .. import run

        results = run.evaluate(config, label="eval")
    for result in results:
        if options.json:
            print_line(msgspec.json.encode(result).decode())
            continue
        outcomes = ", ".join(f"{n} {name}" for name, n in result.outcomes.items())
        chances = f"; {pass_text(result)}" if result.samples > 1 else ""
        print_line(
            f"{what}{f', {result.suite}' if result.suite else ''}: reward {reward_text(result)} "
            f"over {result.tasks} task{'s' * (result.tasks != 1)} ({outcomes}) in {result.seconds:.1f} s{chances}"
        )
    return 0
