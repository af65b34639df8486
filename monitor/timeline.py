"""The timeline of a process, its spans and once a second its gauges: two files of lines for the simulator, the dashboard and
traces.

    RUN/spans/ROLE.PID.jsonl      {"t0": 1.8e9, "t1": 1.8e9, "what": "turn", "ids": {"episode": "3.0.1", ...}}
    RUN/series/ROLE.PID.jsonl     {"t": 1.8e9, "cpu_s": 12.5, "rss": 3.1e8, ...}

Invariants:
- Recording never blocks, slows or ends what it records: spans go to a bounded queue, and a thread writes. Where the queue is full,
  or the disk refuses, lines are dropped; every line of the series has the number that were dropped so far.
- A file takes at most half of its bytes; then it replaces `ROLE.PID.old.jsonl`, so that the oldest lines go first.
- A process that is killed loses at most the last second and leaves at most one torn line, which readers leave out.
- A reader that follows the files gets each line once; those that were replaced twice between two looks are lost to it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from ..common.spans import Span
from .follow import LineFollower

log = logging.getLogger(__name__)

SPANS, SERIES = "spans", "series"  # folders of a run
FILE, OLD = ".jsonl", ".old.jsonl"  # end the names of the newer and of the older half of a process's lines
PERIOD_S = 1.0  # between two lines of the series, and the longest that a span waits for the disk
QUEUE = 1 << 14  # spans that wait for the thread: a second of a worker with thousands of short episodes
SPANS_BYTES, SERIES_BYTES = 64 << 20, 16 << 20  # of one process on disk
LINE_BYTES = 256 << 10  # more than a line of the series has: a worker names a thousand replicas in less
SKEW_S = 300.0  # by which the clocks of two hosts may differ
Gauges = Callable[[], Mapping[str, Any]]  # numbers, and mappings of them, that JSON has


class TimelineWriter:
    """Records the process `role` in the run's `folder` while the context lasts; without a folder, nothing. `gauges`, which the role
    sets, is called in a thread of its own and must only read."""

    def __init__(self, folder: Path | None, role: str, gauges: Gauges = dict) -> None:
        self.gauges = gauges
        self._recorded, folder = folder is not None, folder or Path()
        name = f"{role}.{os.getpid()}"
        self._spans = _BoundedFile(folder / SPANS / (name + FILE), SPANS_BYTES)
        self._series = _BoundedFile(folder / SERIES / (name + FILE), SERIES_BYTES)
        self._queue: queue.Queue[Span] = queue.Queue(QUEUE)
        self._overflowed = 0
        self._encode = msgspec.json.Encoder().encode
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def __enter__(self) -> Self:
        if self._recorded:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._recorded:
            self._thread.join(2 * PERIOD_S)

    def record(self, span: Span) -> None:
        """From any thread; returns at once."""
        if not self._recorded:
            return
        try:
            self._queue.put_nowait(span)
        except queue.Full:
            self._overflowed += 1

    @property
    def dropped(self) -> int:
        """Lines that were recorded and are in no file."""
        return self._overflowed + self._spans.refused + self._series.refused

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(PERIOD_S - time.time() % PERIOD_S)
            self._spans.append([self._encode(self._queue.get_nowait()) for _ in range(self._queue.qsize())])
            self._series.append([self._encode(self._line())])
        self._spans.close()
        self._series.close()

    def _line(self) -> dict[str, Any]:
        line = {"t": time.time(), "cpu_s": time.process_time(), "rss": _resident_bytes(), "dropped": self.dropped}
        try:
            return {**line, **self.gauges()}
        except Exception as error:  # a number that is missing for a second ends nothing
            return {**line, "error": repr(error)[:200]}


class _BoundedFile:
    """Lines, of which the newest `limit` bytes are kept in two files. `refused` counts lines that the disk did not take."""

    def __init__(self, path: Path, limit: int) -> None:
        self.refused = 0
        self._path, self._limit = path, limit
        self._file: int | None = None
        self._size = 0

    def append(self, lines: list[bytes]) -> None:
        if not lines:
            return
        data = b"\n".join(lines) + b"\n"
        try:
            file = self._open() if self._file is None else self._file
            if self._size and self._size + len(data) > self._limit // 2:
                self.close()
                self._path.replace(self._path.with_name(self._path.name.removesuffix(FILE) + OLD))
                file = self._open()
            written = os.write(file, data)
            self._size += written
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes were written")
        except OSError as error:
            if not self.refused:
                log.warning("%s: %d lines are not recorded: %s", self._path, len(lines), error)
            self.refused += len(lines)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = os.fstat(self._file).st_size
        return self._file


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class FolderFollower:
    """The lines that processes add to `folder`, `RUN/spans` or `RUN/series`, which need not be there yet; of one role or of all."""

    def __init__(self, folder: Path, role: str = "*") -> None:
        self._folder, self._role = folder, role
        self._files: dict[str, LineFollower] = {}
        self._began: dict[tuple[str, str], float] = {}  # by role and pid

    def lines(self) -> Iterator[tuple[str, str, bytes]]:
        """(role, pid, line) of what was added since the last look, process by process, the oldest first. Raises OSError."""
        began: dict[tuple[str, str], float] = {}  # of processes that are new
        for path in self._folder.glob(f"{self._role}.*{FILE}"):
            role, _, pid = path.name.removesuffix(OLD).removesuffix(FILE).partition(".")
            if (role, pid) not in self._began:
                with contextlib.suppress(FileNotFoundError):  # its writer has just renamed it
                    began[role, pid] = min(_begin(path), began.get((role, pid), math.inf))
        self._began |= began
        for role, pid in sorted(self._began, key=lambda one: (one[0], self._began[one])):
            name = f"{role}.{pid}"
            if name not in self._files:
                self._files[name] = LineFollower(self._folder / (name + FILE), self._folder / (name + OLD))
            for line in self._files[name].lines():
                yield role, pid, line


class _Times(msgspec.Struct, frozen=True):
    """Of a line of the series or of a span."""

    t: float | None = None
    t0: float | None = None


def _begin(path: Path) -> float:
    """When the lines in `path` begin. The time of the file, which a copy does not keep, counts where its first line has none."""
    with path.open("rb") as file:
        first = file.readline(LINE_BYTES)
        try:
            line = msgspec.json.decode(first, type=_Times)
        except msgspec.MsgspecError:
            line = _Times()
        time_s = line.t if line.t0 is None else line.t0
        return os.fstat(file.fileno()).st_mtime if time_s is None else time_s


def read_spans(folder: Path) -> Iterator[tuple[str, Span]]:
    """(role, span) of all processes of the run in `folder`, process by process, the oldest first. Torn lines are left out."""
    for role, _, line in FolderFollower(folder / SPANS).lines():
        try:
            yield role, msgspec.json.decode(line, type=Span)
        except msgspec.MsgspecError:
            continue


def read_series(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(role, gauges with their time `t`), likewise."""
    for role, _, line in FolderFollower(folder / SERIES).lines():
        try:
            yield role, msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.MsgspecError:
            continue


def newest_gauges(folder: Path, since: float) -> dict[str, dict[str, Any]]:
    """Role -> the last line of the series of its newest process, where that is not older than `since`, seconds since the epoch."""
    found: dict[str, dict[str, Any]] = {}
    for path in (folder / SERIES).glob(f"*{FILE}"):
        role, line = path.name.partition(".")[0], _last_line(path, since)
        if line is not None and line.get("t", 0.0) >= max(since, found.get(role, {}).get("t", 0.0)):
            found[role] = line
    return found


def _last_line(path: Path, since: float) -> dict[str, Any] | None:
    """None where the file has no whole line, was not written for a while before `since`, or is being replaced."""
    try:
        if path.stat().st_mtime < since - SKEW_S:
            return None
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LINE_BYTES))
            lines = file.read().split(b"\n")
        return msgspec.json.decode(lines[-2], type=dict[str, Any]) if len(lines) > 1 else None
    except (OSError, msgspec.MsgspecError):
        return None
