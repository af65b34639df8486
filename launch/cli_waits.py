"""`slipstream waits RUN [--json]`: who waits for what in a run that goes on, the oldest wait first."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from ..monitor.text import duration

if TYPE_CHECKING:
    from .watchdog import RoleWait

CAPTION = "Of waits that differ in their numbers alone the oldest is shown. A role that hangs is heard no more."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `waits` understands to its parser."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def waits(options: argparse.Namespace) -> int:
    """Print them; returns the exit status."""
    from .control import Told, Waits, ask, contact

    where = contact(Path(options.run).resolve())
    rows = asyncio.run(ask(where, Waits(), Told, who="slipstream waits")).waits
    if options.json:
        sys.stdout.write(msgspec.json.encode(rows).decode() + "\n")
    else:
        Console().print(_table(rows))
    return 0


def _table(rows: Sequence[RoleWait]) -> Table:
    table = Table("role", "age", "deadline", "who", "waits for", "alike", "heard", title="waits", caption=CAPTION)
    for name in (3, 4):
        table.columns[name].overflow = "fold"
    for row in rows:
        wait = row.wait
        until = "none" if wait.deadline_s is None else duration(wait.deadline_s)
        heard = f"{duration(row.heard_s)} ago"
        table.add_row(row.role, duration(wait.age_s), until, wait.who, wait.waits_for, str(wait.alike), heard)
    return table
