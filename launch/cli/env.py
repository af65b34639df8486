"""`slipstream env new|check|play|bench|serve`: what the author of an environment works with."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec
from rich.table import Table

from ...configs import load
from ...configs.checks import PYTHON_NAME
from ...configs.environments import parts_by_key
from ...errors import ConfigError, EnvError
from ...monitor.output import open_console, print_line, print_notice
from .options import CommandTable, add_config, add_overrides

VIOLATED = 1


def register(commands: CommandTable) -> None:
    parser = commands.add("env", _check, "work on an environment: check it against its contract")
    actions = CommandTable(parser)
    check = actions.add("check", _check, "play an environment with scripted policies and name what breaks its contract")
    check.add_argument("what", metavar="WHAT", help="`package.module:Factory`, a YAML file, or a preset")
    add_overrides(check)
    new = actions.add("new", _new, "write an environment to begin with: a module, a config and a test")
    new.add_argument("name", metavar="NAME", help="of the module, for example my_env")
    play = actions.add(
        "play", _play, "play one episode on the terminal: `/TOOL {...}` calls a tool, other lines are messages"
    )
    add_config(play)
    play.add_argument("--task", type=int, default=0, metavar="N", help="number of the task; default: 0")
    play.add_argument("--part", default="", metavar="NAME", help="of a mixture")
    play.add_argument(
        "--model", default="", metavar="URL", help="a model plays: the base URL of an OpenAI API, with /v1"
    )
    play.add_argument("--name", default="", metavar="NAME", help="of that model; default: the first that it lists")
    bench = actions.add("bench", _bench, "measure resets and steps a second with scripted policies")
    add_config(bench)
    bench.add_argument("--concurrent", type=int, nargs="+", default=[1, 8, 64], metavar="N", help="episodes at a time")
    bench.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each measurement; default: 5")
    bench.add_argument("--part", default="", metavar="NAME", help="of a mixture")
    bench.add_argument("--json", action="store_true", help="print JSON")
    serve = actions.add("serve", _serve, "run the environments of a config for workers on other hosts")
    add_config(serve)
    serve.add_argument("--address", required=True, metavar="tcp://HOST:PORT", help="to listen at; HOST 0.0.0.0 is all")
    serve.add_argument(
        "--keys",
        dest="key_file",
        default="",
        metavar="FILE",
        help="keys of the link, made where missing; env.keys names a copy",
    )


def _new(options: argparse.Namespace) -> int:
    from ..env_new import write_environment

    module, config, test = write_environment(options.name, Path.cwd())
    print_line(f"wrote {module.name}, {config.name} and {test.name}")
    print_line(f"check it:  slipstream env check {config.name}    test it: python -m pytest {test.name}")
    print_line(f"play it:   slipstream env play {config.name}     train on it: slipstream train {config.name}")
    return 0


def _play(options: argparse.Namespace) -> int:
    from .. import env_play

    config = load(options.config, options.overrides, notice=print_notice)
    part = env_play.part_of(config, options.part)
    url = options.model.rstrip("/")
    if part.self_played and not url:
        raise ConfigError(f"--model: {part.name} plays itself, with a model; name one")
    with_model = (
        env_play.itself(url, options.name) if part.self_played else env_play.model(url, options.name, print_line)
    )
    player = with_model if url else env_play.person()
    total = asyncio.run(env_play.play(part, config, options.task, player, print_line))
    print_line(f"the rewards are {total:g} in all")
    return 0


def _bench(options: argparse.Namespace) -> int:
    from ...envs.bench import measure
    from ...envs.check import ContractViolation
    from ...envs.sandbox import closing_pools
    from ..env_play import part_of

    if min(options.concurrent) < 1 or options.seconds <= 0:
        raise ConfigError("--concurrent and --seconds: must be above 0")
    config = load(options.config, options.overrides, notice=print_notice)
    source = part_of(config, options.part).source
    try:
        found = [asyncio.run(closing_pools(measure(source, n, options.seconds))) for n in options.concurrent]
    except ContractViolation as violated:
        raise EnvError(f"{source.name}: {violated}") from violated
    if options.json:
        print_line(msgspec.json.encode(found).decode())
        return 0
    quantiles = "p50 / p95 / p99 ms"
    columns = ("at once", "episodes/s", "resets/s", quantiles, "steps/s", quantiles, "loop lag ms")
    table = Table(*columns, title=f"{source.name}, scripted policies")
    for row in found:
        ms = [" / ".join(f"{1e3 * q:.2f}" for q in (call.p50, call.p95, call.p99)) for call in (row.reset, row.step)]
        speeds = (f"{row.episodes / row.seconds:.1f}", f"{row.reset.per_s:.1f}", ms[0], f"{row.step.per_s:.1f}", ms[1])
        table.add_row(str(row.concurrent), *speeds, f"{1e3 * row.loop_lag:.1f}")
    open_console().print(table)
    return 0


def _serve(options: argparse.Namespace) -> int:
    from ..env_server import serve_environments

    config = load(options.config, options.overrides, notice=print_notice)
    serve_environments(config, options.address, options.key_file, print_notice)
    return 0


def _check(options: argparse.Namespace) -> int:
    """One line for each check; exit status 1 where one fails."""
    from ..env_check import check_environment

    what = options.what
    given = ["env.kind=python", f"env.factory={what}"] if PYTHON_NAME.fullmatch(what) else []
    config = load("quickstart" if given else what, [*given, *options.overrides], notice=print_notice)
    parts = parts_by_key(config.env).items()
    hold = [check_environment(key, section, config.seed, print_line) for key, section in parts]
    return 0 if all(hold) else VIOLATED
