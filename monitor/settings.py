"""`settings.jsonl`: the changes of a run's settings while it went on, a line each, and where charts mark them.

Invariants:
- A line is on the disk before the change is acknowledged. A last line without a newline was torn by a crash and never acknowledged;
  it does not count.
- The last line of a key has its value in force; a key without a line has the value of `config.yaml`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..configs.live import Value
from ..errors import StoreError
from .metrics import Row

SETTINGS = "settings.jsonl"  # in the folder of a run


class SettingChange(msgspec.Struct, frozen=True):
    """`key` had the value `old` and has `new`, since `time` (seconds since the epoch). Its first batch is taken at policy version
    `version`, and makes step `step`; a run that rolled steps back may make that step again."""

    time: float
    step: int
    version: int
    key: str
    old: Value
    new: Value

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


class LiveSetting(msgspec.Struct, frozen=True):
    """A live key and its value in force."""

    key: str
    value: Value
    applied_by: str
    takes_effect: str


class SettingMark(msgspec.Struct, frozen=True):
    """What a chart shows between two steps, at `step` - 1/2: the first step under the changed settings."""

    step: int
    time: float
    text: str


def append_changes(path: Path, changes: Sequence[SettingChange]) -> None:
    """Append them durably, all or none. Raises OSError."""
    with path.open("a+b") as file:
        file.seek(0)
        size = file.read().rfind(b"\n") + 1
        file.truncate(size)
        try:
            file.write(b"".join(msgspec.json.encode(change) + b"\n" for change in changes))
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


def read_changes(path: Path) -> list[SettingChange]:
    """Every line in its order; empty where there is no file. Raises StoreError naming a complete line that is no change."""
    if not path.is_file():
        return []
    found = list[SettingChange]()
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            found.append(msgspec.json.decode(line, type=SettingChange))
        except msgspec.MsgspecError as error:
            raise StoreError(f"{path}, line {number}: not a changed setting: {error}") from None
    return found


def in_force(changes: Sequence[SettingChange]) -> tuple[str, ...]:
    """The last value of each key as an override, `buffer.max_staleness=0`."""
    return tuple(f"{key}={value}" for key, value in {change.key: change.new for change in changes}.items())


def rows_since(changes: Sequence[SettingChange], rows: Sequence[Row]) -> Sequence[Row]:
    """Those of the steps since the last change."""
    return [row for row in rows if row["version"] > changes[-1].version] if changes else rows


def largest_bound(changes: Sequence[SettingChange], bound: int) -> int:
    """The largest `buffer.max_staleness` of a run that has `bound` now."""
    values = [value for c in changes if c.key == "buffer.max_staleness" for value in (c.old, c.new)]
    return max([bound, *(value for value in values if isinstance(value, int))])


def marks(changes: Sequence[SettingChange], rows: Sequence[Row]) -> list[SettingMark]:
    """Where to mark `changes` in charts of `rows`, those of one command together. One without a step yet is after the last."""
    made: list[tuple[int, int]] = [(row.get("version") or 0, row["step"]) for row in rows]
    last = made[-1][1] if made else 0
    found = list[SettingMark]()
    for (time, version), together in itertools.groupby(changes, lambda change: (change.time, change.version)):
        step = next((step for after, step in made if after > version), last + 1)
        texts = (f"{change.key.rpartition('.')[2]} {change.old} → {change.new}" for change in together)
        found.append(SettingMark(step, time, ", ".join(texts)))
    return found
