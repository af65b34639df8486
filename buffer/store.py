"""The durable store: an SQLite file (WAL) that holds groups, episodes, trajectories and the clock, and beside it their arrays.

    buffer.sqlite    rows; many may read it while the run goes on
    buffer.arrays/   token ids and log-probs, nine tenths of the bytes, at the places that `trajectories.arrays` names: written
                     once, not to a log first

Invariants:
- What was stored in one `save` is there whole or not at all; after SIGKILL of any process it is as of the last `save`.
- Arrays are on the disk before the rows that name them, and are deleted after them: see `arrays`.
- A trajectory's arrays are written once, with the delivery of its episode, and never changed; `shrink` may drop those that nobody
  can train on again.
- No token disappears from the file: what `shrink` drops as rows is in `archive` as sums.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from ..errors import StoreError, WireError
from . import retention, wire
from .arrays import Arrays
from .group import Group
from .retention import SETTLED
from .rows import CHANGED, REWARD, Change, Row, read_clock, read_episode, read_group
from .rules import Clock
from .schema import SCHEMA, SCHEMA_VERSION, bucket
from .trajectory import Trajectory

BUSY_S = 10.0
"""How long SQLite waits for another connection that holds the file."""

WAL_BYTES = 64 << 20
"""What the log beside the file is cut down to after a larger transaction."""

VALUES_AT_ONCE, BYTES_AT_ONCE = 10_000, 16 << 20
"""Values of one statement, where SQLite takes so many, and the bytes after which there are no more: it holds a copy of them."""


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open the file; `mode` as in SQLite's URIs. Raises StoreError."""
    try:
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,
            timeout=BUSY_S,
            check_same_thread=False,  # the service saves from another thread; the two take turns
        )
        db.create_function("bucket", 1, bucket, deterministic=True)
        return db
    except sqlite3.Error as error:
        raise _failed(f"cannot open the buffer {path}", error) from None


def require_schema(db: sqlite3.Connection, path: Path, *, new: bool = False) -> None:
    """Raises StoreError when the file is not of this program; with `new` an empty one may become so."""
    found = db.execute("PRAGMA user_version").fetchone()[0]
    if found != SCHEMA_VERSION and not (new and found == 0):
        raise StoreError(f"{path} has schema {found}, this program knows {SCHEMA_VERSION}")


def arrays_of(path: Path) -> Path:
    """The folder of arrays that belongs to the file for rows at `path`."""
    return path.with_suffix(".arrays")


class Store:
    """The only writer of one file. Every method raises StoreError when SQLite does, or when a row is not what was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shrinking = False
        self._db = connect(path, "rwc")
        try:
            require_schema(self._db, path, new=True)
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # what is acknowledged survives the host, too
            self._db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
            self._db.execute("PRAGMA temp_store = MEMORY")
            self._db.executescript(SCHEMA)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            (named,) = self._db.execute(retention.END).fetchone()
            self._arrays = Arrays(arrays_of(path), named)
            self._arrays.forget(self._named)
        except StoreError:
            self._db.close()
            raise
        except (sqlite3.Error, OSError) as error:
            self._db.close()
            raise _failed(f"cannot prepare the buffer {path}", error) from None

    def close(self) -> None:
        self._arrays.close()
        self._db.close()

    def save(self, change: Change) -> None:
        """Store it in one transaction, after the arrays, which its rows name."""
        heads, arrays, trajectories = list[Row](), list[Sequence[wire.Frame]](), list[Row]()
        for episode_id, t in change.trajectories:
            header, token_ids, loss_mask, behavior_logprobs = wire.encode(t)
            heads.append((t.id, episode_id, t.group_id, t.reward, header, loss_mask))
            arrays.append((token_ids, behavior_logprobs))
        if arrays:
            with self._writing():
                places = self._arrays.append(arrays)
            trajectories = [(*head, place) for head, place in zip(heads, places, strict=True)]
        with self._transaction():
            self._insert("REPLACE INTO clock", [(0, change.clock)])
            self._insert("REPLACE INTO groups", change.groups)
            self._insert("INSERT INTO episodes", change.episodes, CHANGED)
            self._insert("INSERT INTO trajectories", trajectories)
            self._insert("INSERT INTO commits", [(*msgspec.structs.astuple(commit), 0) for commit in change.commits])
            if change.rolled_back_to is not None:
                self._db.execute("UPDATE commits SET rolled_back = 1 WHERE version > ?", (change.rolled_back_to,))

    def _insert(self, verb: str, rows: Sequence[Row], rest: str = "") -> None:
        """Many rows by one statement: each statement waits for the interpreter, which decodes the next messages meanwhile."""
        for lot in _lots(rows, min(VALUES_AT_ONCE, self._db.getlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER))):
            marks = f"({', '.join('?' * len(lot[0]))})"
            values = [value for row in lot for value in row]
            self._db.execute(f"{verb} VALUES {', '.join([marks] * len(lot))} {rest}", values)

    def trajectories(self, group_id: int) -> list[Trajectory]:
        """All trajectories of a group that were kept, by member and branch."""
        return self._trajectories("episode_id IN (SELECT id FROM episodes WHERE group_id = ?)", group_id)

    def episode(self, episode_id: str) -> list[Trajectory]:
        """The branches of one delivered episode."""
        return self._trajectories("episode_id = ?", episode_id)

    def _trajectories(self, where: str, value: object) -> list[Trajectory]:
        with self._reading():
            rows = self._db.execute(
                f"SELECT id, header, loss_mask, arrays FROM trajectories WHERE {where}", (value,)
            ).fetchall()
            found = [self._trajectory(*row) for row in rows]
        return sorted(found, key=lambda t: (t.member, t.branch))

    def _trajectory(self, trajectory_id: str, header: object, loss_mask: object, place: object) -> Trajectory:
        what = f"trajectory {trajectory_id}"
        if not (isinstance(header, bytes) and isinstance(loss_mask, bytes) and isinstance(place, int)):
            raise self._damaged(what, "an array or the header is missing")
        size = retention.TOKEN_BYTES * len(loss_mask)
        arrays = self._arrays.read(place, size)
        if len(arrays) < size:
            raise self._damaged(what, f"{len(arrays)} of {size} bytes are left of its arrays")
        try:
            trajectory = wire.decode(Trajectory, [header, arrays[: size // 2], loss_mask, arrays[size // 2 :]])
            trajectory.check()
        except WireError as error:
            raise self._damaged(what, error) from None
        if trajectory.id != trajectory_id:
            raise self._damaged(what, f"it holds {trajectory.id}")
        return trajectory

    def load(self) -> tuple[Clock, list[Group]]:
        """The clock, and by id every group that still matters: unfinished, rollable, not served yet, or with episodes that may
        still report."""
        groups: dict[int, Group] = {}
        with self._reading():
            row = self._db.execute("SELECT value FROM clock").fetchone()
            with self._intact("the clock"):
                clock = read_clock(row)
            (newest,) = self._db.execute("SELECT coalesce(max(id), -1) FROM groups").fetchone()
            if newest >= clock.next_group:
                raise self._damaged("the clock", f"the next group is {clock.next_group}, there is a group {newest}")
            over = {"over": clock.over}
            wanted = f"FROM groups WHERE NOT ({SETTLED})"
            for row in self._rows(f"SELECT * {wanted} ORDER BY id", over):
                with self._intact(f"group {row['id']}"):
                    groups[row["id"]] = read_group(row)
            for row in self._rows(f"SELECT *, {REWARD} FROM episodes WHERE group_id IN (SELECT id {wanted})", over):
                with self._intact(f"episode {row['id']}"):
                    groups[row["group_id"]].episodes[row["id"]] = read_episode(row)
        return clock, list(groups.values())

    def shrink(self, limit: int, over: int) -> bool:
        """Bring the file towards `limit` bytes: drop arrays of settled groups, the oldest first, then make archived sums of their
        rows. Does a part at a time; returns whether it did anything, and so should be asked again.

        Args:
            over: the last version that is both served and in a checkpoint.
        """
        with self._reading():
            arrays, (used, size) = self._arrays.size, retention.sizes(self._db)
        target = retention.SLACK * limit if self._shrinking else limit
        dropped = left = False
        if arrays + used > target:
            with self._transaction():
                dropped = retention.drop(self._db, over)
            with self._writing():
                self._arrays.forget(self._named)
        if arrays + size > target:
            with self._writing():
                retention.give_back(self._db)
                left = retention.sizes(self._db)[1] < size
        self._shrinking = dropped or left
        return self._shrinking

    def _named(self, start: int, end: int) -> bool:
        """Whether a row names arrays in these places."""
        return bool(self._db.execute(retention.NAMED, (start, end)).fetchone()[0])

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        """All of the block is in the file after it, or nothing."""
        with self._writing():
            self._db.execute("BEGIN")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OverflowError, OSError) as error:
            raise _failed(f"cannot write the buffer {self.path}", error) from None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise _failed(f"cannot read the buffer {self.path}", error) from None

    def _rows(self, query: str, values: dict[str, int]) -> sqlite3.Cursor:
        cursor = self._db.cursor()
        cursor.row_factory = sqlite3.Row
        return cursor.execute(query, values)

    @contextlib.contextmanager
    def _intact(self, what: str) -> Iterator[None]:
        """A damaged row may hold anything."""
        try:
            yield
        except (msgspec.MsgspecError, TypeError) as error:
            raise self._damaged(what, error) from None

    def _damaged(self, what: str, why: object) -> StoreError:
        return StoreError(f"the buffer {self.path} is damaged at {what}: {why}")


def _failed(what: str, error: Exception) -> StoreError:
    """Final, but where another process only held the file for long."""
    held = getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return StoreError(f"{what}: {error}", final=not held)


def _lots(rows: Sequence[Row], values: int) -> Iterator[list[Row]]:
    """Parts for one statement each, of at most so many `values`."""
    lot, size = list[Row](), 0
    for row in rows:
        lot.append(row)
        size += sum(value.nbytes for value in row if isinstance(value, memoryview))
        if (len(lot) + 1) * len(row) > values or size >= BYTES_AT_ONCE:
            yield lot
            lot, size = [], 0
    if lot:
        yield lot
