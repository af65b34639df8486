"""The dashboard's reader of the files of a run's buffer, which does not hold up a run that goes on.

Invariants:
- Connections are read-only and are closed after one request. Callers fetch all rows of a query at once, and ask for at most
  `ROWS` at a time: a read transaction that stays open would keep SQLite from writing its WAL back into the file.
- The file of a run that is over is opened as immutable, see `read_mode`.
- A query that takes longer than `QUERY_S` is ended.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..buffer.admission import ReplayCounters
from ..buffer.encoded import EncodedRow
from ..buffer.run_stores import connect_run, parts, read_mode, shard_index
from ..buffer.schema import DATABASE, store_error
from ..buffer.trajectory import BatchRow
from ..errors import StoreError, WireError

ROWS = 2000  # of one query: headers of some kilobytes each are read within 50 ms
QUERY_S = 5.0  # far more than any query of this room takes
NEWEST = (
    "SELECT t.{column}, e.delivered_time FROM {{part}}.{table} t LEFT JOIN {{part}}.episodes e ON e.id = t.episode_id"
    " ORDER BY t.rowid DESC LIMIT ?"
)
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
            mode = read_mode(self.path, active=self._is_active())
            with contextlib.closing(connect_run(self.path, mode)) as db:
                yield ReadConnection(db, parts(self.path))
        except sqlite3.Error as error:
            raise store_error(f"cannot read the buffer {self.path}", error) from None

    def decode(self, header: bytes, length: int) -> BatchRow:
        """A row of `trajectories` without its arrays. Raises StoreError."""
        try:
            return EncodedRow(header, length, 0).decode()
        except (WireError, TypeError) as error:
            raise StoreError(f"{self.path} is damaged: {error}") from None


class ReadConnection:
    """Fetches what a query finds at once, so that nothing is held between two queries. `parts` are the names of the files that
    have groups: what follows their new rows follows each by itself, by its own `rowid`."""

    def __init__(self, db: sqlite3.Connection, parts: Sequence[str]) -> None:
        self._db = db
        self.parts = parts
        self._deadline = 0.0
        db.set_progress_handler(lambda: time.monotonic() > self._deadline, CHECKED_EVERY)

    def all(self, query: str, *values: object, **named: object) -> list[tuple[Any, ...]]:
        """Raises sqlite3.Error, also where it took longer than `QUERY_S`."""
        self._deadline = time.monotonic() + QUERY_S
        return self._db.execute(query, named or values).fetchall()

    def one(self, query: str, *values: object, **named: object) -> tuple[Any, ...] | None:
        """The first row, None where there is none."""
        return next(iter(self.all(query, *values, **named)), None)

    def newest(self, column: str, limit: int, table: str = "trajectories") -> list[Any]:
        """A column of the `limit` trajectories that were delivered last, the last first."""
        return [value for value, _ in self.newest_first(NEWEST.format(column=column, table=table), limit)]

    def newest_first(self, query: str, limit: int, *values: object) -> list[tuple[Any, ...]]:
        """The `limit` newest rows of all parts. `query` finds those of one `{part}`, the newest first: its last `?` is how many,
        its last column their time. The rows of one part stay in the order in which it finds them."""
        found = (self.all(query.replace("{part}", part), *values, limit) for part in self.parts)
        newest = heapq.merge(*found, key=lambda row: row[-1] or 0.0, reverse=True)
        return list(itertools.islice(newest, limit))

    def newest_group(self) -> int:
        """Groups with higher numbers may not have begun yet, where there are others; -1 before the first."""
        newest = (self.one(f"SELECT max(id) FROM {part}.groups") for part in self.parts)
        return min(-1 if row is None or row[0] is None else row[0] for row in newest)

    def global_rowid(self, part: str, rowid: int) -> int:
        """Of a row that has `rowid` in its own file: as queries over all files have it."""
        return rowid * len(self.parts) + shard_index(part)

    def by_part(self, rowids: Sequence[int]) -> dict[str, list[int]]:
        """Which rows of each part have these rowids in all files: `global_rowid` the other way."""
        found: dict[str, list[int]] = {}
        for rowid in rowids:
            local, index = divmod(rowid, len(self.parts))
            found.setdefault(self.parts[index], []).append(local)
        return found

    def counters(self) -> ReplayCounters | None:
        """Of the replay as it was saved last; None before the first."""
        row = self.one("SELECT value FROM counters")
        return None if row is None else msgspec.json.decode(row[0], type=ReplayCounters)
