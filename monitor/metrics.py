"""`metrics.jsonl`: one JSON object per learner step and per evaluation, appended and flushed, readable after any crash.

Invariants:
- A line is one write. A last line without a newline was torn by a crash; it is dropped, and the log reports it.
- NaN and infinity are written as `null`, because JSON has neither; the log names the key, and charts have a gap.
- A learner that resumes from a checkpoint repeats steps; of two rows for one step the later one counts.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..errors import StoreError
from .follow import LineFollower

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"  # in the folder of a run
EVALUATION = "evaluation"  # the key that only lines of evaluations have: the name of the suite
Row = Mapping[str, Any]  # one line of the file: metric -> number; `staleness_tokens` is a mapping to numbers


class MetricsWriter:
    """Appends rows to a file, which an earlier process may have begun."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError where the file cannot be opened."""
        self._encoder = msgspec.json.Encoder()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            size = path.read_bytes().rfind(b"\n") + 1
            if size < self._file.tell():
                log.warning("%s: the last line was torn by a crash and is dropped", path)
                self._file.truncate(size)
        except OSError as error:
            raise StoreError(f"{path}: metrics cannot be written there: {error}") from error

    def append(self, row: Row | msgspec.Struct) -> None:
        values = msgspec.to_builtins(row)
        invalid = [key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)]
        if invalid:
            log.warning("step %s: not a finite number, written as null: %s", values.get("step"), ", ".join(invalid))
        self._file.write(self._encoder.encode(values) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[Row]:
    """Rows of steps in their order; empty where there is no file. Raises StoreError naming a complete line that is no JSON object
    with a step."""
    rows = {row["step"]: row for row in read_lines(path) if EVALUATION not in row}
    return [rows[step] for step in sorted(rows)]


class MetricsTail:
    """The rows of steps that were added to a file since the last look, in the order in which they were written."""

    def __init__(self, path: Path) -> None:
        self._follower = LineFollower(path)
        self._unread: list[bytes] = []  # lines that came since the last look that could read all of its lines
        self._lines = 0  # before these

    def read(self) -> list[Row]:
        """Complete lines only: one that is being written is read when it is whole. Raises as `read_metrics`, at each look again."""
        self._unread += self._follower.lines()
        rows = _decoded(self._follower.path, self._unread, self._lines + 1)
        self._lines += len(self._unread)
        self._unread = []
        return [row for row in rows if EVALUATION not in row]


def read_lines(path: Path) -> list[Row]:
    """All lines, those of evaluations included. Raises as `read_metrics`."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    if lines.pop():
        log.warning("%s: the last line is torn and is ignored", path)
    return _decoded(path, lines, 1)


def _decoded(path: Path, lines: list[bytes], first: int) -> list[Row]:
    """`first` is the number of the first of the lines."""
    rows: list[Row] = []
    for number, line in enumerate(lines, start=first):
        try:
            row = msgspec.json.decode(line, type=dict[str, Any])
            rows.append(row | {"step": int(row["step"])})
        except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{path}, line {number}: not a row of metrics: {error!r}") from None
    return rows


def scalars(row: Row) -> dict[str, float]:
    """The finite numbers of a row by flat name, for trackers: `{"staleness_tokens": {"0": 3}}` gives `staleness_tokens/0`."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        nested = value if isinstance(value, Mapping) else {"": value}
        for sub, number in nested.items():
            if isinstance(number, int | float) and math.isfinite(number):
                flat[f"{key}/{sub}" if sub else key] = float(number)
    return flat
