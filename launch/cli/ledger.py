"""`slipstream ledger RUN [--by length|version] [--json]`: which account holds every generated token; exit status 1 where the ledger
does not balance."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from ...buffer.image_files import ImageFiles
from ...buffer.ledger import ACCOUNTS, Ledger
from ...buffer.ledger_report import LedgerReport
from ...monitor.output import UNLIMITED, open_console, print_line
from .options import CommandTable, add_run


def register(commands: CommandTable) -> None:
    parser = commands.add("ledger", ledger, "show which account holds every generated token")
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--by", choices=("length", "version"), default="length", help="what the rows are")


def ledger(options: argparse.Namespace) -> int:
    from ..run import read_ledger

    report = read_ledger(Path(options.run))
    if options.json:
        print_line(msgspec.json.encode(report.to_builtins()).decode())
    else:
        print_report(report, options.by, open_console())
        files, size = ImageFiles(Path(options.run)).sizes()
        if files:
            print_line(f"images: {files} files of {size / (1 << 20):.1f} MiB, which stay with the run")
    return 0 if report.balances else 1


def print_report(report: LedgerReport, by: str, console: Console) -> None:
    """A row per length bucket or version, a column per account; several tables where one is wider than the console."""
    names = {"generated": "generated"} | {name: name.replace("_", " ") for name in ACCOUNTS}
    names |= {f"withheld/{reason}": f"withheld: {reason}" for reason in sorted(report.total.withheld)}
    names |= {f"discarded/{reason}": f"discarded: {reason}" for reason in sorted(report.total.discarded)}
    shown, wide = list(names), console.options.update(max_width=UNLIMITED)
    while shown:
        for count in range(len(shown), 0, -1):
            table = _table(report, by, names, shown[:count])
            if count == 1 or Measurement.get(console, wide, table).maximum <= console.width:
                console.print(table)
                shown = shown[count:]
                break
    console.print(_verdict(report))


def _table(report: LedgerReport, by: str, names: dict[str, str], shown: Sequence[str]) -> Table:
    parts = report.by_length if by == "length" else report.by_version
    table = Table("episode length" if by == "length" else "version", title="token ledger")
    table.columns[0].justify, table.columns[0].no_wrap = "right", True
    for name in shown:
        # A word a line: rich makes a table that it has to fold wider than it was asked to.
        table.add_column(names[name].replace("_", "\n").replace(" ", "\n"), justify="right", no_wrap=True)
    for name, part in parts.items():
        label = f"{name:,} to {2 * name - 1:,}" if by == "length" and name else str(name)
        table.add_row(label, *(f"{_tokens(part, key):,}" for key in shown))
    table.add_section()
    table.add_row("all", *(f"{_tokens(report.total, key):,}" for key in shown))
    return table


def _tokens(ledger: Ledger, key: str) -> int:
    """Tokens of an account, or of one reason of an account: `trained`, `discarded/crashed`."""
    account, _, reason = key.partition("/")
    return getattr(ledger, account).get(reason, 0) if reason else getattr(ledger, account)


def _verdict(report: LedgerReport) -> str:
    lines = ["closes" if report.balances else "DOES NOT CLOSE"]
    for version, part in report.by_version.items():
        if not part.balances:
            lines.append(f"version {version}: {part.generated} generated, {part.accounted} accounted for")
    if report.miscounted:
        lines.append(
            f"episodes with another number of sampled tokens than the ledger has for them: {report.miscounted}"
        )
    if report.trained_length is not None:
        lengths = f"{report.generated_length:,.0f} generated, {report.trained_length:,.0f} trained"
        lines.append(f"mean episode length over tokens: {lengths}")
    return "\n".join(lines)
