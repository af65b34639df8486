"""Reading the file of a run's buffer while the run goes on, without holding it up.

Invariants:
- Connections are read-only and are closed after one request. Callers fetch all rows of a query at once, and ask for at most
  `ROWS` at a time: a read transaction that stays open would keep SQLite from writing its WAL back into the file.
- The file of a run that is over is opened as immutable: no lock is taken, and no file appears beside it. Where a killed run left a
  WAL it is not, because rows would be missing.
- A query that takes longer than `QUERY_S` is ended.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..buffer.admission import ReplayCounters
from ..buffer.schema import DATABASE, connect, require_schema, store_error
from ..buffer.trajectory import BatchRow, EncodedRow
from ..errors import StoreError, WireError

ROWS = 2000  # of one query: headers of some kilobytes each are read within 50 ms
QUERY_S = 5.0  # far more than any query of this room takes
CHECKED_EVERY = 20_000  # steps of SQLite's machine between two looks at the clock: a few milliseconds


class StoreReader:
    """Of the run in `folder`; `is_active` says whether a process may write to it; `database` is the buffer's file, or that of
    evaluations."""

    def __init__(self, folder: Path, is_active: Callable[[], bool], database: str = DATABASE) -> None:
        self.path = folder / database
        self._is_active = is_active

    @property
    def exists(self) -> bool:
        """Whether the run has a buffer yet."""
        return self.path.exists()

    @contextlib.contextmanager
    def open(self) -> Iterator[ReadConnection]:
        """A connection for one request. Raises StoreError where there is no buffer of this version, or a row or the file is
        damaged."""
        if not self.exists:
            raise StoreError(f"{self.path.parent} has no buffer yet: the run has not started to play")
        try:
            with contextlib.closing(connect(self.path, "ro&immutable=1" if self._is_final() else "ro")) as db:
                require_schema(db, self.path)
                yield ReadConnection(db)
        except sqlite3.Error as error:
            raise store_error(f"cannot read the buffer {self.path}", error) from None

    def decode(self, header: bytes, length: int) -> BatchRow:
        """A row of `trajectories` without its arrays. Raises StoreError."""
        try:
            return EncodedRow(header, length, 0).decode()
        except (WireError, TypeError) as error:
            raise StoreError(f"{self.path} is damaged: {error}") from None

    def _is_final(self) -> bool:
        wal = self.path.with_name(self.path.name + "-wal")
        return not self._is_active() and not (wal.exists() and wal.stat().st_size)


class ReadConnection:
    """Fetches what a query finds at once, so that nothing is held between two queries."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._deadline = 0.0
        db.set_progress_handler(lambda: time.monotonic() > self._deadline, CHECKED_EVERY)

    def all(self, query: str, *values: object, **named: object) -> list[tuple[Any, ...]]:
        """Raises sqlite3.Error, also where it took longer than `QUERY_S`."""
        self._deadline = time.monotonic() + QUERY_S
        return self._db.execute(query, named or values).fetchall()

    def one(self, query: str, *values: object, **named: object) -> tuple[Any, ...] | None:
        """The first row, None where there is none."""
        return next(iter(self.all(query, *values, **named)), None)

    def counters(self) -> ReplayCounters | None:
        """Of the replay as it was saved last; None before the first."""
        row = self.one("SELECT value FROM counters")
        return None if row is None else msgspec.json.decode(row[0], type=ReplayCounters)
