"""The result of a benchmark: rows of contender against floor, and the machine that they were measured on.

Invariants:
- Contender and floor of a row were measured in the same run, on the same machine, by turns where noise matters.
- A ratio is a row's point: it travels between machines better than either number.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from statistics import mean

import msgspec
from rich.console import Console
from rich.table import Table


class Row(msgspec.Struct, frozen=True):
    """`contender` against `floor`, both in `unit`; `ratio` is contender / floor, infinite where the floor is 0."""

    name: str
    contender: float
    floor: float
    unit: str
    note: str = ""
    ratio: float = 0.0

    def __post_init__(self) -> None:
        if not self.ratio:
            msgspec.structs.force_setattr(self, "ratio", self.contender / self.floor if self.floor else math.inf)


def by_rounds(
    name: str, contender: Sequence[float], floor: Sequence[float], unit: str, *, note: str = "", digits: int = 2
) -> Row:
    """Means over the rounds; the note ends with between what the rounds' own ratios lie."""
    ratios = sorted(c / f for c, f in zip(contender, floor, strict=True))
    spread = f"{ratios[0]:.{digits}f} to {ratios[-1]:.{digits}f} by round"
    return Row(name, mean(contender), mean(floor), unit, f"{note}; {spread}" if note else spread)


class Result(msgspec.Struct, frozen=True):
    """One benchmark's rows; `contender` and `floor` say what the columns are."""

    title: str
    contender: str
    floor: str
    rows: tuple[Row, ...]


class Report(msgspec.Struct, frozen=True):
    """All results of one command, and the machine."""

    benchmark: str
    machine: str
    results: tuple[Result, ...]


def machine() -> str:
    """Cores, processor and system, in one line."""
    return f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()} {platform.release()}"


def render(report: Report, console: Console) -> None:
    """Tables, ratios first."""
    console.print(f"{report.benchmark} on {report.machine}")
    for result in report.results:
        table = Table("", "ratio", result.contender, result.floor, "unit", "", title=result.title, title_justify="left")
        for column in table.columns[1:4]:
            column.justify = "right"
        for row in result.rows:
            table.add_row(row.name, f"{row.ratio:.2f}", _number(row.contender), _number(row.floor), row.unit, row.note)
        console.print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
