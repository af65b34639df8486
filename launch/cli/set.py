"""`slipstream set RUN [key=value ...]`: show and change the settings of an active run."""

from __future__ import annotations

import argparse
import asyncio
import textwrap
from pathlib import Path

import msgspec
from rich.table import Table

from ...configs import LIVE
from ...monitor.output import open_console, print_line
from ..supervisor.control import (
    ChangeSettings,
    GetSettings,
    SettingsChanged,
    SettingsListing,
    read_control_address,
    send_command,
)
from .options import CommandTable, add_overrides, add_run

WHO = "slipstream set"


def register(commands: CommandTable) -> None:
    parser = commands.add("set", change_settings, "change settings of an active run; without key=value, show them")
    add_run(parser)
    add_overrides(parser, "buffer.max_staleness=1")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.make_epilog = _live_keys


def change_settings(options: argparse.Namespace) -> int:
    run_dir = Path(options.run).resolve()
    control = read_control_address(run_dir, options.overrides)
    if not options.overrides:
        listing = asyncio.run(send_command(control, GetSettings(), SettingsListing, who=WHO))
        _show(listing, as_json=options.json)
        return 0
    command = ChangeSettings(tuple(options.overrides))
    changes = asyncio.run(send_command(control, command, SettingsChanged, who=WHO)).changes
    if options.json:
        print_line(msgspec.json.encode(changes).decode())
        return 0
    for change in changes:
        print_line(f"{change}, from step {change.step} on")
    if not changes:
        print_line("nothing changes: the run has these values")
    return 0


def _show(listing: SettingsListing, *, as_json: bool) -> None:
    if as_json:
        print_line(msgspec.json.encode({one.key: one.value for one in listing.settings}).decode())
        return
    table = Table("key", "value", "applied by", "takes effect")
    for one in listing.settings:
        table.add_row(one.key, str(one.value), one.applied_by, one.takes_effect)
    open_console().print(table)


def _live_keys() -> str:
    keys = (f"  {live.key}\n{textwrap.indent(live.takes_effect, '      ')}" for live in LIVE.values())
    return "\n".join(["keys that can be changed while a run goes on, and when a change takes effect:", "", *keys])
