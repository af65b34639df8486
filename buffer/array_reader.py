"""How learner ranks read the arrays of a batch: from the segment files of the buffer, at the positions that its plan names.

Invariants:
- Bytes are those that the buffer received: each trajectory's are compared with the checksum in its row.
- What is not there is looked for again until the deadline: a network file system may show a host what another one has written only
  some moments later, its size before its content, and gives no notice. The error says what was found instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..common.tasks import in_thread
from ..errors import StateError, with_deadline
from .encoded import checksum_of, with_arrays
from .segments import read_arrays, starts_of
from .trajectory import NOWHERE, BatchRow, Trajectory

PAUSE_S = 0.05, 1.0  # shortest and longest pause before a host looks again


class ArrayReader:
    """Reads the arrays of `rows` once, each from the segments of its shard's folder."""

    def __init__(self, rows: Sequence[tuple[BatchRow, Path]]) -> None:
        self._rows = rows
        self._found: dict[str, Trajectory] = {}
        self._wrong: list[str] = []  # what the last look found of the others

    async def read(self, who: str, deadline_s: float) -> tuple[Trajectory, ...]:
        """The trajectory of each row, as soon as this host sees all of them.

        Raises:
            DeadlineExceeded: of `who`; a file is not there, or damaged.
            StateError: a row has no position.
        """
        if nowhere := next((row.id for row, _ in self._rows if row.position == NOWHERE), None):
            raise StateError(f"trajectory {nowhere} is of no batch that the buffer has planned")
        waits_for = "the arrays of its batch"
        return await with_deadline(deadline_s, self._all(), who=who, waits_for=waits_for, hint=self._why)

    async def _all(self) -> tuple[Trajectory, ...]:
        pause_s, longest_s = PAUSE_S
        while True:
            await in_thread(self._look, "arrays")
            if not self._wrong:
                return tuple(self._found[row.id] for row, _ in self._rows)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _look(self) -> None:
        """Read what is not read yet."""
        starts = {folder: starts_of(folder) for folder in {folder for _, folder in self._rows}}
        self._wrong = [
            f"trajectory {row.id}: {folder} {wrong} at byte {row.position}"
            for row, folder in self._rows
            if row.id not in self._found and (wrong := self._read(row, folder, starts[folder]))
        ]

    def _read(self, row: BatchRow, folder: Path, starts: Sequence[int]) -> str:
        """What is wrong; empty where the bytes are found."""
        try:
            arrays = read_arrays(folder, starts, row.position, row.nbytes)
        except OSError as error:
            return f"cannot be read ({error})"
        if len(arrays) < row.nbytes:
            return f"has {len(arrays)} of {row.nbytes} bytes"
        if checksum_of(arrays) != row.checksum:
            return "is damaged: it holds other bytes than were delivered"
        self._found[row.id] = with_arrays(row, np.frombuffer(arrays, np.uint8))
        return ""

    def _why(self) -> str:
        """What to look at."""
        if wrong := next(iter(self._wrong), ""):
            return f"{wrong}; does every host see the same folder of the run?"
        return f"{len(self._found)} of {len(self._rows)} trajectories were read; the disk is slow"
