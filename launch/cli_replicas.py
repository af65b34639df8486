"""`slipstream replicas RUN add|remove|list`: change the number of inference servers of a run that goes on."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

from ..configs import load
from ..errors import EngineError, within

if TYPE_CHECKING:
    from ..weightsync.fleet import Fleet
    from .control import Contact
    from .roster import Listed

COMMANDS = """\
add [COUNT]    start COUNT more (default 1); each joins when the learner has brought it the weights
remove NAME    let one go: it takes no new requests, and those under way go on elsewhere from the tokens they have
list           what is there
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `replicas` understands to its parser."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run that goes on")
    commands = parser.add_subparsers(required=True, metavar="add|remove|list", dest="wish")
    sub = commands.add_parser("add", help="start more replicas")
    sub.add_argument("count", metavar="COUNT", nargs="?", type=int, default=1)
    sub.add_argument("--wait", action="store_true", help="return when they serve")
    sub = commands.add_parser("remove", help="let one go")
    sub.add_argument("name", metavar="NAME", help="for example engine-1")
    sub.add_argument("--wait", action="store_true", help="return when it is gone")
    sub = commands.add_parser("list", help="what is there")
    sub.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=replicas)


def replicas(options: argparse.Namespace) -> int:
    """Carry out one wish; returns the exit status."""
    from .control import contact

    run_dir = Path(options.run).resolve()
    where = contact(run_dir)
    if options.wish == "list":
        asyncio.run(_list(where, as_json=options.json))
    elif options.wish == "add":
        asyncio.run(_add(where, run_dir, options.count, wait=options.wait))
    else:
        asyncio.run(_remove(where, run_dir, options.name, wait=options.wait))
    return 0


async def _list(where: Contact, *, as_json: bool) -> None:
    from .control import Show, Shown, ask

    shown = await ask(where, Show(), Shown)
    if as_json:
        _out(msgspec.json.encode(shown.replicas).decode())
    else:
        Console().print(_table(shown.replicas))


async def _add(where: Contact, run_dir: Path, count: int, *, wait: bool) -> None:
    from .control import Accepted, Add, ask

    accepted = await ask(where, Add(count), Accepted)
    names = ", ".join(accepted.names)
    _out(f"{names}: starting")
    if not wait:
        return

    def settled(fleet: Fleet) -> bool:
        """All serve, or one of them is not there any more."""
        seats = [fleet.seat(name) for name in accepted.names]
        return fleet.revision >= accepted.revision and (
            any(seat is None for seat in seats) or all(seat is not None and seat.state == "serving" for seat in seats)
        )

    fleet = await _until(where, run_dir, settled, f"{names} to serve")
    if missing := [name for name in accepted.names if fleet.seat(name) is None]:
        raise EngineError(f"{', '.join(missing)} left again before serving; see {run_dir / 'logs' / missing[0]}.log")
    _out(f"{names}: serving")


async def _remove(where: Contact, run_dir: Path, name: str, *, wait: bool) -> None:
    from .control import Accepted, Remove, ask

    accepted = await ask(where, Remove(name), Accepted)
    _out(f"{name}: draining")
    if wait:
        await _until(where, run_dir, lambda f: f.revision >= accepted.revision and not f.seat(name), f"{name} to leave")
        _out(f"{name}: gone")


async def _until(where: Contact, run_dir: Path, settled: Callable[[Fleet], bool], what: str) -> Fleet:
    """The first fleet that is `settled`. The learner brings weights to a newcomer between two of its steps."""
    from ..weightsync.fleet import FleetFeed

    config = load(str(run_dir / "config.yaml"))
    seconds = config.rollout.engine.start_s + config.weightsync.push_s + config.learner.batch_s
    async with FleetFeed(where.fleet, where.keys) as feed:
        fleet = await within(
            seconds,
            _or_end(feed.until(lambda fleet: fleet.revision > 0 and (not fleet.seats or settled(fleet))), where.pid),
            who="slipstream replicas",
            waits_for=what,
            hint=f"it may still come to that; see `slipstream replicas {run_dir} list` and {run_dir / 'logs'}",
        )
    if (
        fleet is None or not fleet.seats
    ):  # a fleet is empty at the end of the run alone: the last replica may not be removed
        raise EngineError(f"the run ended while `slipstream replicas` waited for {what}")
    return fleet


async def _or_end(work: Coroutine[Any, Any, Fleet], pid: int) -> Fleet | None:
    """The result of `work`, None when process `pid` ends before."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        work.close()
        return None
    loop.add_reader(process, ended.set)
    tasks = asyncio.ensure_future(work), asyncio.ensure_future(ended.wait())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        loop.remove_reader(process)
        os.close(process)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _table(rows: tuple[Listed, ...]) -> Table:
    table = Table("name", "state", "version", "pid", "started", "url", title="replicas")
    table.columns[-1].overflow = "fold"
    for row in rows:
        version, pid = ("-" if value is None else str(value) for value in (row.version, row.pid))
        table.add_row(row.name, row.state, version, pid, f"{row.incarnation + 1} x", row.url)
    return table


def _out(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
