"""The bytes of arrays beside the store's file: appended once, read by the place that a row names.

    buffer.sqlite: trajectories.arrays = 0x1002000 ──names──> byte 0x2000 of buffer.arrays/0000000001000000

Invariants:
- A place counts the bytes that were ever appended; the name of a segment is the place of its first byte, in hexadecimal. While a
  row names a place, no other bytes get it.
- What `append` returned places of is on the disk.
- Rows name bytes after they are written, and forget them before they are deleted. So after a kill between the two there are bytes
  that no row names, and never a row without its bytes.
- Segments go as a whole, when no row names a byte of them; nothing else is ever deleted or written again.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Callable, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path

from ..durable import flush
from .wire import Frame

SEGMENT_BYTES = 16 << 20
"""After which another segment is begun: so much may be kept for the sake of one row."""

BUFFERS_AT_ONCE = 1024
"""Of one write, where systems take so many."""

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter


class Arrays:
    """The segments in `folder`, which is made. Rows name no place from `named` on. All methods raise OSError."""

    def __init__(self, folder: Path, named: int) -> None:
        self._folder = folder
        self._file: int | None = None
        folder.mkdir(exist_ok=True)
        flush(folder.parent)
        sizes = {int(path.name, 16): path.stat().st_size for path in folder.glob("[0-9a-f]" * 16)}
        self._starts = sorted(sizes)
        self._end = max([named, *(start + size for start, size in sizes.items())])
        if self._starts and self._starts[-1] + sizes[self._starts[-1]] == self._end:
            self._file = os.open(self._path(self._starts[-1]), os.O_WRONLY)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(self._path(start).stat().st_size for start in self._starts)

    def append(self, records: Sequence[Sequence[Frame]]) -> list[int]:
        """Write the frames of each record, one after the other; the places where the records begin."""
        if self._file is None or self._end - self._starts[-1] >= SEGMENT_BYTES:
            self._begin()
        assert self._file is not None
        *places, end = accumulate((sum(map(len, frames)) for frames in records), initial=self._end)
        _write(self._file, [frame for frames in records for frame in frames], self._end - self._starts[-1])
        _sync(self._file)
        self._end = end
        return places

    def read(self, place: int, size: int) -> bytes:
        """`size` bytes; fewer where the segment ends before, none where it is gone."""
        at = bisect.bisect_right(self._starts, place) - 1
        if at < 0 or place >= self._end:
            return b""
        with contextlib.suppress(FileNotFoundError), self._path(self._starts[at]).open("rb", buffering=0) as file:
            return os.pread(file.fileno(), size, place - self._starts[at])
        return b""

    def forget(self, named: Callable[[int, int], bool]) -> None:
        """Delete the segments of which `named`, asked for the places from one up to another, says that no row names any."""
        gone = [start for start, end in pairwise([*self._starts, self._end]) if not named(start, end)]
        if gone and gone[-1] == self._starts[-1]:
            self.close()  # the next is begun when there is something to write
        self._starts = [start for start in self._starts if start not in gone]
        for start in gone:
            self._path(start).unlink(missing_ok=True)

    def _begin(self) -> None:
        self.close()
        self._file = os.open(self._path(self._end), os.O_WRONLY | os.O_CREAT, 0o644)
        self._starts.append(self._end)
        flush(self._folder)

    def _path(self, start: int) -> Path:
        return self._folder / f"{start:016x}"


def _write(file: int, frames: Sequence[Frame], at: int) -> None:
    left = iter(frames)
    while lot := list(islice(left, BUFFERS_AT_ONCE)):
        done = os.pwritev(file, lot, at)
        at += done
        if done < sum(map(len, lot)):  # the disk is full, as the next write will say
            rest = memoryview(b"".join(lot))[done:]
            while rest:
                done = os.pwrite(file, rest, at)
                at, rest = at + done, rest[done:]
