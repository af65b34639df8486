"""`slipstream replicas RUN add|remove|list`: change the number of inference servers of an active run."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.table import Table

from ...common.tasks import Stopped, run_unless_exited
from ...configs import load, run_config
from ...errors import EngineError, with_deadline
from ...monitor.output import open_console, print_line
from ...rpc.pubsub import StateSubscriber
from ...weightsync.fleet import Fleet
from ..supervisor.control import (
    AddReplicas,
    CommandAccepted,
    ControlAddress,
    GetStatus,
    RemoveReplica,
    RunStatus,
    read_control_address,
    send_command,
)
from .options import CommandTable, add_run


def register(commands: CommandTable) -> None:
    parser = commands.add("replicas", replicas, "change the number of inference servers of an active run")
    add, remove = add_pool_actions(
        parser,
        add="start COUNT more; each serves once it has the weights",
        remove="drain one: requests in flight continue on other replicas",
        example="engine-1",
    )
    add.add_argument("--wait", action="store_true", help="return when they serve")
    remove.add_argument("--wait", action="store_true", help="return when it has stopped")


def add_pool_actions(
    parser: argparse.ArgumentParser, *, add: str, remove: str, example: str
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """`RUN add|remove|list` with these help texts; the parsers of the first two."""
    add_run(parser)
    actions = parser.add_subparsers(required=True, metavar="add|remove|list", dest="action")
    adding = actions.add_parser("add", help=add)
    adding.add_argument("count", metavar="COUNT", nargs="?", type=int, default=1, help="default: 1")
    removing = actions.add_parser("remove", help=remove)
    removing.add_argument("name", metavar="NAME", help=f"for example {example}")
    listing = actions.add_parser("list", help="show them")
    listing.add_argument("--json", action="store_true", help="print JSON")
    return adding, removing


def replicas(options: argparse.Namespace) -> int:
    run_dir = Path(options.run).resolve()
    control = read_control_address(run_dir)
    if options.action == "list":
        work = _list(control, as_json=options.json)
    elif options.action == "add":
        work = _add(control, run_dir, options.count, wait=options.wait)
    else:
        work = _remove(control, run_dir, options.name, wait=options.wait)
    asyncio.run(work)
    return 0


async def _list(control: ControlAddress, *, as_json: bool) -> None:
    status = await send_command(control, GetStatus(), RunStatus)
    if as_json:
        print_line(msgspec.json.encode(status.replicas).decode())
        return
    table = Table("name", "state", "version", "pid", "started", "false replies", "url", title="replicas")
    table.columns[-1].overflow = "fold"
    for row in status.replicas:
        version, pid = ("-" if value is None else str(value) for value in (row.version, row.pid))
        started = "by others" if row.external else f"{row.incarnation + 1} x"
        table.add_row(row.name, row.state, version, pid, started, str(row.false_replies), row.url)
    open_console().print(table)
    for row in status.replicas:
        if row.distrusted:
            print_line(f"{row.name} was {'left out' if row.external else 'ended'} once: {row.distrusted}")


async def _add(control: ControlAddress, run_dir: Path, count: int, *, wait: bool) -> None:
    accepted = await send_command(control, AddReplicas(count), CommandAccepted)
    names = ", ".join(accepted.names)
    print_line(f"{names}: starting")
    if not wait:
        return

    def settled(fleet: Fleet) -> bool:
        """Every new replica serves, or one of them has left the fleet."""
        infos = [fleet.replica(name) for name in accepted.names]
        states = {info.state if info else "gone" for info in infos}
        return fleet.revision >= accepted.revision and ("gone" in states or states == {"serving"})

    fleet = await _wait_for_fleet(control, run_dir, settled, f"{names} to serve")
    if missing := [name for name in accepted.names if fleet.replica(name) is None]:
        raise EngineError(f"{', '.join(missing)} stopped before serving; see {run_dir / 'logs' / missing[0]}.log")
    print_line(f"{names}: serving")


async def _remove(control: ControlAddress, run_dir: Path, name: str, *, wait: bool) -> None:
    accepted = await send_command(control, RemoveReplica(name), CommandAccepted)
    print_line(f"{name}: draining")
    if wait:
        await _wait_for_fleet(
            control, run_dir, lambda f: f.revision >= accepted.revision and not f.replica(name), f"{name} to stop"
        )
        print_line(f"{name}: gone")


async def _wait_for_fleet(
    control: ControlAddress, run_dir: Path, settled: Callable[[Fleet], bool], waits_for: str
) -> Fleet:
    """The first fleet that is `settled`. The learner pushes weights to a new replica between two of its steps."""
    config = load(str(run_config(run_dir)))
    seconds = config.rollout.engine.start_s + config.push_s + config.learner.batch_s
    async with StateSubscriber(control.fleet, Fleet(), control.pair) as subscriber:
        settling = subscriber.until(lambda fleet: fleet.revision > 0 and (not fleet.replicas or settled(fleet)))
        hint = f"it may still happen; see `slipstream replicas {shlex.quote(str(run_dir))} list` and {run_dir / 'logs'}"
        work = run_unless_exited(settling, control.pid)
        with contextlib.suppress(Stopped):
            fleet = await with_deadline(seconds, work, who="slipstream replicas", waits_for=waits_for, hint=hint)
            if fleet.replicas:  # the last one cannot be removed: an empty fleet is the end of the run
                return fleet
    raise EngineError(f"the run ended while `slipstream replicas` waited for {waits_for}")
