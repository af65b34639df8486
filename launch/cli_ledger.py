"""`slipstream ledger RUN [--by length|version] [--json]`: where every generated token is; exit status 1 where that is not known."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from ..buffer.accounts import Accounts
from ..buffer.ledger import ACCOUNTS, Ledger


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `ledger` understands to its parser."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--by", choices=("length", "version"), default="length", help="what the rows are")


def ledger(options: argparse.Namespace) -> int:
    """Print a run's accounts; returns the exit status."""
    from .run import require_accounts

    accounts = require_accounts(Path(options.run))
    if options.json:
        sys.stdout.write(msgspec.json.encode(accounts.told()).decode() + "\n")
    else:
        Console().print(_table(accounts, options.by))
    return 0 if accounts.closes else 1


def _table(accounts: Accounts, by: str) -> Table:
    """A row per length bucket or version, a column per account; then all of them."""
    parts = accounts.by_length if by == "length" else accounts.by_version
    withheld, discarded = sorted(accounts.total.withheld), sorted(accounts.total.discarded)
    heads = (
        "generated",
        *(name.replace("_", " ") for name in ACCOUNTS),
        *(f"withheld: {reason}" for reason in withheld),
        *(f"discarded: {reason}" for reason in discarded),
    )
    table = Table(
        "episode length" if by == "length" else "version", *heads, title="token ledger", caption=_caption(accounts)
    )
    for column in table.columns:
        column.justify = "right"

    def cells(part: Ledger) -> list[str]:
        kept = (getattr(part, name) for name in ACCOUNTS)
        without_loss = (part.withheld.get(reason, 0) for reason in withheld)
        gone = (part.discarded.get(reason, 0) for reason in discarded)
        return [f"{n:,}" for n in (part.generated, *kept, *without_loss, *gone)]

    for name, part in parts.items():
        table.add_row(f"{name:,} to {2 * name - 1:,}" if by == "length" and name else str(name), *cells(part))
    table.add_section()
    table.add_row("all", *cells(accounts.total))
    return table


def _caption(accounts: Accounts) -> str:
    lines = ["closes" if accounts.closes else "DOES NOT CLOSE"]
    for version, part in accounts.by_version.items():
        if not part.closes:
            lines.append(f"version {version}: {part.generated} generated, {part.accounted} accounted for")
    if accounts.miscounted:
        lines.append(f"{accounts.miscounted} episodes hold another number of sampled tokens than their accounts")
    if accounts.trained_length is not None:
        lines.append(
            f"mean episode length over tokens: {accounts.generated_length:,.0f} generated, {accounts.trained_length:,.0f} trained"
        )
    return "\n".join(lines)
