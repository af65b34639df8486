"""`slipstream waits RUN [--json]`: what every process of an active run waits for, the oldest wait first."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import msgspec
from rich.table import Table

from ...monitor.output import open_console, print_line
from ...monitor.text import duration
from ..supervisor.control import GetStatus, RunStatus, read_control_address, send_command
from .options import CommandTable, add_run

CAPTION = "Of waits that differ only in their numbers the oldest is shown. A role that hangs reports nothing new."


def register(commands: CommandTable) -> None:
    parser = commands.add("waits", waits, "show what every process of an active run waits for")
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def waits(options: argparse.Namespace) -> int:
    address = read_control_address(Path(options.run).resolve())
    rows = asyncio.run(send_command(address, GetStatus(), RunStatus, who="slipstream waits")).waits
    if options.json:
        print_line(msgspec.json.encode(rows).decode())
        return 0
    table = Table("role", "age", "deadline", "who", "waits for", "alike", "reported", title="waits", caption=CAPTION)
    for column in (3, 4):
        table.columns[column].overflow = "fold"
    for row in rows:
        wait = row.wait
        deadline = "none" if wait.deadline_s is None else duration(wait.deadline_s)
        reported = f"{duration(row.heard_s)} ago"
        table.add_row(row.role, duration(wait.age_s), deadline, wait.who, wait.waits_for, str(wait.alike), reported)
    open_console().print(table)
    return 0
