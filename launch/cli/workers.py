"""`slipstream workers RUN add|remove|list`: change the number of workers of an active run."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec
from rich.table import Table

from ...monitor.output import open_console, print_line
from ..supervisor.control import (
    AddWorkers,
    CommandAccepted,
    ControlAddress,
    GetStatus,
    RemoveWorker,
    RunStatus,
    read_control_address,
    send_command,
)
from .options import CommandTable
from .replicas import add_pool_actions

WHO = "slipstream workers"


def register(commands: CommandTable) -> None:
    parser = commands.add("workers", workers, "change the number of workers of an active run")
    remove = "end one: the others play again the episodes that it did not finish"
    add_pool_actions(parser, add="start COUNT more", remove=remove, example="worker-1")


def workers(options: argparse.Namespace) -> int:
    control = read_control_address(Path(options.run).resolve())
    if options.action == "list":
        asyncio.run(_list(control, as_json=options.json))
        return 0
    adds = options.action == "add"
    command = AddWorkers(options.count) if adds else RemoveWorker(options.name)
    accepted = asyncio.run(send_command(control, command, CommandAccepted, who=WHO))
    print_line(f"{', '.join(accepted.names)}: {'starting' if adds else 'leaving'}")
    return 0


async def _list(control: ControlAddress, *, as_json: bool) -> None:
    status = await send_command(control, GetStatus(), RunStatus, who=WHO)
    if as_json:
        print_line(msgspec.json.encode(status.workers).decode())
        return
    table = Table("name", "state", "pid", "restarts", "host", title="workers")
    for row in status.workers:
        table.add_row(row.name, row.state, "-" if row.pid is None else str(row.pid), str(row.restarts), row.host)
    open_console().print(table)
