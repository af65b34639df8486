"""An append-only log of array bytes beside the store's file, read at the positions that its rows name.

    buffer.sqlite: trajectories.arrays = 0x1002000 ──names──> byte 0x2000 of buffer.arrays/0000000001000000

Invariants:
- A position counts the bytes that were ever appended; a segment's name is the position of its first byte, in hexadecimal. While a
  row names a position, no other bytes get it.
- When `append` returns, the bytes are on the disk.
- Rows name bytes after they are written, and are deleted before their bytes. A kill between the two leaves bytes without a row,
  never a row without its bytes.
- A segment is deleted as a whole, when no row names a byte of it; nothing else is ever deleted or overwritten.
- Learner ranks read the files themselves, on any host of the run: what the buffer has named in a reply is on the disk.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections.abc import Callable, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path

from ..common.fsio import fsync_directory
from ..rpc.wire import Frame

SEGMENT_BYTES = 16 << 20  # size after which the next segment begins; one row can keep this much from being deleted
CACHED_SEGMENTS = 8  # full segments that the kernel may keep in memory, because batches are read from them
BUFFERS_AT_ONCE = 1024  # buffers of one write (IOV_MAX)
_sync = getattr(os, "fdatasync", os.fsync)  # macOS has only the latter


class SegmentLog:
    """The segments in `folder`, which is created. No row names a position at or after `end`. All methods raise OSError."""

    def __init__(self, folder: Path, end: int) -> None:
        self._folder = folder
        self._file: int | None = None
        folder.mkdir(exist_ok=True)
        fsync_directory(folder.parent)
        self._starts = starts_of(folder)
        sizes = {start: self._path(start).stat().st_size for start in self._starts}
        self._end = max([end, *(start + size for start, size in sizes.items())])
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

    @property
    def end(self) -> int:
        """The position of the next record."""
        return self._end

    def append(self, records: Sequence[Frame]) -> list[int]:
        """Write the records one after the other; returns the positions where they begin."""
        if self._file is None or self._end - self._starts[-1] >= SEGMENT_BYTES:
            self._begin()
        assert self._file is not None
        *positions, end = accumulate(map(len, records), initial=self._end)
        _write(self._file, records, self._end - self._starts[-1])
        _sync(self._file)
        self._end = end
        return positions

    def read(self, position: int, size: int) -> bytes:
        """`size` bytes; fewer where the segment ends before, none where it is deleted."""
        return read_arrays(self._folder, self._starts, position, size) if position < self._end else b""

    def delete_unnamed(self, is_named: Callable[[int, int], bool]) -> None:
        """Delete the segments that no row names: `is_named(start, end)` is whether a row names a position in that range."""
        gone = [start for start, end in pairwise([*self._starts, self._end]) if not is_named(start, end)]
        if gone and gone[-1] == self._starts[-1]:
            self.close()  # the next write begins another
        self._starts = [start for start in self._starts if start not in gone]
        for start in gone:
            self._path(start).unlink(missing_ok=True)

    def _begin(self) -> None:
        self.close()
        self._file = os.open(self._path(self._end), os.O_WRONLY | os.O_CREAT, 0o644)
        self._starts.append(self._end)
        fsync_directory(self._folder)
        if len(self._starts) > CACHED_SEGMENTS:
            _drop_from_page_cache(self._path(self._starts[-1 - CACHED_SEGMENTS]))

    def _path(self, start: int) -> Path:
        return _segment(self._folder, start)


def segments_path(path: Path) -> Path:
    """The folder of arrays that belongs to the file for rows at `path`."""
    return path.with_suffix(".arrays")


def starts_of(folder: Path) -> list[int]:
    """The positions at which the segments in `folder` begin, in order."""
    return sorted(int(path.name, 16) for path in folder.glob("[0-9a-f]" * 16))


def read_arrays(folder: Path, starts: Sequence[int], position: int, size: int) -> bytes:
    """`size` bytes of the segments that begin at `starts`; fewer where one ends before, none where it is deleted."""
    at = bisect.bisect_right(starts, position) - 1
    if at < 0:
        return b""
    with contextlib.suppress(FileNotFoundError), _segment(folder, starts[at]).open("rb", buffering=0) as file:
        return os.pread(file.fileno(), size, position - starts[at])
    return b""


def _segment(folder: Path, start: int) -> Path:
    return folder / f"{start:016x}"


def _drop_from_page_cache(path: Path) -> None:
    """Let the kernel use the memory of a file that is on the disk for the next one, instead of more and more."""
    if hasattr(os, "posix_fadvise"):  # macOS has none
        with contextlib.suppress(FileNotFoundError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write(file: int, frames: Sequence[Frame], at: int) -> None:
    left = iter(frames)
    while lot := list(islice(left, BUFFERS_AT_ONCE)):
        done = os.pwritev(file, lot, at)
        at += done
        if done < sum(map(len, lot)):  # the disk is full: the next write raises
            remaining = memoryview(b"".join(lot))[done:]
            while remaining:
                done = os.pwrite(file, remaining, at)
                at, remaining = at + done, remaining[done:]
