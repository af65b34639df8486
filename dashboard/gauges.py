"""The dashboard's gauges of all processes of a run, one line a second each, as columns over time.

Invariants:
- A gauge that a process did not report in a second is missing there, never 0.
- What counts from the start of a process is shown per second; where the process was replaced there is a gap.
- Of a role at most about `VALUES` are in memory, however long the run: where there would be more, the older half of its lines is
  thinned evenly over its time.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..monitor.timeline import SERIES, FolderFollower

COUNTERS = ("cpu_s", "tokens", "delivered", "generated", "trained_tokens")  # last parts of the names of what only grows
VALUES = 1 << 21  # of a role, 16 MiB: about what the files of one of its processes hold


class RoleGauges:
    """Of one role, over all processes that had it."""

    def __init__(self) -> None:
        self.times = array("d")
        self.columns: dict[str, array[float]] = {}  # name -> a value for each time, NaN where it is missing
        self.last: dict[str, Any] = {}  # the newest line
        self.pid = ""  # of the process that wrote it

    def add(self, line: Mapping[str, Any], pid: str) -> None:
        at = len(self.times)
        for name, value in _numbers(line):
            if name not in self.columns:
                self.columns[name] = array("d", [math.nan]) * at
            self.columns[name].append(value)
        for column in self.columns.values():
            if len(column) == at:
                column.append(math.nan)
        self.times.append(line["t"])  # last: who reads meanwhile finds all values of each time
        self.last, self.pid = dict(line), pid

    @property
    def full(self) -> bool:
        return len(self.times) > 1 and len(self.times) * len(self.columns) > VALUES

    def thinned(self) -> RoleGauges:
        """The same with one line of each of equal parts of the time of the older half, half as many as lines. Who reads this one is
        not disturbed."""
        half, found = len(self.times) // 2, RoleGauges()
        since = np.array(self.times[:half]) - min(self.times[:half])
        part = (since / max(float(since.max()), 1e-9) * (half // 2)).astype(int)
        kept = np.sort(np.unique(part, return_index=True)[1])  # a clock may have been set back

        def thin(column: array[float]) -> array[float]:
            return array("d", np.array(column[:half])[kept].tobytes()) + column[half:]

        found.times, found.columns = thin(self.times), {name: thin(column) for name, column in self.columns.items()}
        found.last, found.pid = self.last, self.pid
        return found

    def between(self, t0: float, t1: float, points: int) -> dict[str, list[float | None]]:
        """Means over `points` equal parts of the time from `t0` to `t1`."""
        times = np.array(self.times[:])
        inside = (times >= t0) & (times <= t1)  # a clock may have been set back
        if not inside.any():
            return {}
        first, last = int(inside.argmax()), len(times) - int(inside[::-1].argmax())
        times, inside = times[first:last], inside[first:last]
        part = np.minimum(((times[inside] - t0) / max(t1 - t0, 1e-9) * points).astype(int), points - 1)
        found = {}
        for name, column in list(self.columns.items()):
            values = np.array(column[first:last])
            if name.rpartition(".")[2] in COUNTERS:
                values = rates(times, values)
            values = values[inside]
            known = np.isfinite(values)
            if known.any():
                sums = np.bincount(part[known], values[known], points)
                counts = np.bincount(part[known], minlength=points)
                found[name] = [
                    round(s / n, 4) if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True)
                ]
        return found


class GaugeTable:
    """Of the run in `folder`; from any thread."""

    def __init__(self, folder: Path) -> None:
        self._files = FolderFollower(folder / SERIES)
        self._roles: dict[str, RoleGauges] = {}
        self._lock = threading.Lock()

    def roles(self) -> dict[str, RoleGauges]:
        """Up to now. Raises OSError."""
        with self._lock:
            for role, pid, data in self._files.lines():
                try:
                    line = msgspec.json.decode(data, type=dict[str, Any])
                    gauges = self._roles.setdefault(role, RoleGauges())
                    gauges.add({**line, "t": float(line["t"])}, pid)
                    if gauges.full:
                        self._roles[role] = gauges.thinned()
                except (msgspec.MsgspecError, KeyError, TypeError, ValueError):
                    continue  # a line that a killed process left
            return dict(self._roles)

    def bounds(self) -> tuple[float, float] | None:
        """The first time and the last; None before the first line."""
        times = [role.times for role in self.roles().values() if role.times]
        return (min(one[0] for one in times), max(one[-1] for one in times)) if times else None


def _numbers(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a line but its time, `replicas.engine-0.kv` by its whole name."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not (name == "t" and not prefix):
            yield prefix + name, float(value)


Numbers = Sequence[float] | NDArray[np.float64]


def rates(times: Numbers, values: Numbers) -> np.ndarray[Any, Any]:
    """float64[T]: per second since the value before; NaN where it fell."""
    found = np.full(len(values), np.nan)
    if len(values) > 1:
        grown, took = np.diff(values), np.diff(times)
        found[1:] = np.where((grown >= 0) & (took > 0), grown / np.maximum(took, 1e-9), np.nan)
    return found
