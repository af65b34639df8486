"""What was added to a file of lines since it was last looked at.

Invariants:
- Only complete lines are returned, each once. A line that its writer is still writing comes with a later call.
- A file that was replaced, or that became shorter, is read from its beginning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

READ_AT_ONCE = 1 << 20  # bytes; a longer line than this is not read


class LineFollower:
    """Reads `path`, which may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._identity: tuple[int, int] | None = None  # device and inode of the file that was read
        self._offset = 0

    def lines(self) -> Iterator[bytes]:
        """The complete lines that were added, without their ends. Raises OSError."""
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino
            if identity != self._identity or status.st_size < self._offset:
                self._identity, self._offset = identity, 0
            file.seek(self._offset)
            while end := (data := file.read(READ_AT_ONCE)).rfind(b"\n") + 1:
                self._offset += end
                file.seek(self._offset)
                yield from data[:end].splitlines()
