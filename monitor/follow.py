"""A follower of a file of lines, which reads what was added since its last read.

Invariants:
- Only complete lines are returned, each once. A line that its writer is still writing comes with a later call.
- A file that was replaced, or that became shorter, is read from its beginning. Where its writer renames a full file to `older`,
  what was not read of that comes first.
- A line that is longer than `READ_AT_ONCE` is left out.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

READ_AT_ONCE = 1 << 20  # bytes


class LineFollower:
    """Reads `path`, which may not exist yet, and what its writer has renamed to `older`."""

    def __init__(self, path: Path, older: Path | None = None) -> None:
        self.path = path
        self._older = older
        self._identity: tuple[int, int] | None = None  # device and inode of the file that was read
        self._offset = 0
        self._skips = False  # the rest of a line that is too long

    def lines(self) -> Iterator[bytes]:
        """The complete lines that were added, without their ends. Raises OSError."""
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return
        with file:
            identity = _identity(file)
            if identity != self._identity:
                yield from self._rest(identity)
                self._begin(identity)
            elif os.fstat(file.fileno()).st_size < self._offset:
                self._begin(identity)
            yield from self._read(file)

    def _rest(self, newer: tuple[int, int]) -> Iterator[bytes]:
        """What was not read of the older file, which is not the one that is `newer`."""
        try:
            if self._older is None:
                return
            file = self._older.open("rb", buffering=0)
        except FileNotFoundError:
            return
        with file:
            identity = _identity(file)
            if identity == newer:  # renamed just now
                return
            if identity != self._identity:
                self._begin(identity)
            yield from self._read(file)

    def _begin(self, identity: tuple[int, int]) -> None:
        self._identity, self._offset, self._skips = identity, 0, False

    def _read(self, file: io.FileIO) -> Iterator[bytes]:
        file.seek(self._offset)
        while data := file.read(READ_AT_ONCE):
            end, begin = data.rfind(b"\n") + 1, 0
            if not end and len(data) < READ_AT_ONCE:
                return  # its writer is still writing it
            if self._skips:
                begin = data.find(b"\n") + 1
            self._skips = not end
            self._offset += end or len(data)
            file.seek(self._offset)
            yield from data[begin:end].splitlines()


def _identity(file: io.FileIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino
