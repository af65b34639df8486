"""The durable store: an SQLite file (WAL) that holds groups, episodes, trajectories and counters, and beside it their arrays.

    buffer.sqlite    rows; other processes may read it during the run
    buffer.arrays/   token ids, log-probs and loss masks, most of the bytes, at the positions that `trajectories.arrays` names:
                     written once, not to a log first
    images/          files of images, see `image_files`

Invariants:
- What one `save` stores is in the file as a whole or not at all; after SIGKILL of any process the file is as of the last `save`.
- Arrays are on the disk before the rows that name them, and are deleted after those rows: see `segments`.
- A trajectory's frames are stored as they came, once, with the delivery of its episode, and never change; `shrink` may drop those
  that can no longer be trained on.
- Branches of failed episodes are kept apart, with their arrays, in `failed`: no method reads them.
- No token disappears from the file: rows that `shrink` drops are summed up in `archive`.
- Rows are made when a change is drained, before another thread stores them: groups and episodes change meanwhile.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np

from ..errors import StoreError, WireError
from . import retention
from .admission import ReplayCounters
from .encoded import DeliveredTrajectory, EncodedTrajectory
from .group_table import Changed, Episode, Group
from .image_files import NO_IMAGES, ImageFiles
from .ledger import Counts
from .retention import SETTLED
from .schema import SCHEMA, SCHEMA_VERSION, connect, require_schema, store_error
from .segments import SegmentLog, segments_path
from .task_table import StoredTask, TaskChange, TaskStatistics
from .trajectory import ARRAYS_LIMIT, NOWHERE, Outcome, Trajectory

WAL_BYTES = 64 << 20  # the log beside the file is truncated to this after a larger transaction
# Values of one statement, which every SQLite takes, and bytes of several rows: it holds a copy of them.
VALUES_AT_ONCE, BYTES_AT_ONCE = 999, 16 << 20
Row = tuple[object, ...]
# Of an episode: all its branches have the same.
REWARD = (
    "CASE WHEN account IN ('ready', 'trained')"
    " THEN (SELECT reward FROM trajectories WHERE episode_id = episodes.id LIMIT 1) END AS reward"
)
_UPDATED = ["account", "length", "generated", "kept", "settled", "final", "withheld", "loss_from", "reason", "outcome"]
_UPDATED += ["delivered_time"]
# Of an episode's row: id, group and worker stay, and so their index entries; `REPLACE` would rewrite all of them.
UPSERT = "ON CONFLICT (id) DO UPDATE SET " + ", ".join(f"{column} = excluded.{column}" for column in _UPDATED)


# Of a task's row, which holds sums.
ADD_UP = (
    "ON CONFLICT (env, task) DO UPDATE SET id = CASE excluded.id WHEN '' THEN id ELSE excluded.id END,"
    " groups = groups + excluded.groups, attempts = attempts + excluded.attempts, solves = solves + excluded.solves,"
    " streak = excluded.streak + CASE WHEN excluded.attempts = excluded.solves THEN streak ELSE 0 END,"
    " version = max(version, excluded.version)"
)


FAILED_COLUMNS = "(id, episode_id, group_id, header, length, arrays)"


class CommitRow(msgspec.Struct, frozen=True):
    """The step that made `version`, at `time` (seconds since the epoch), from `groups` groups, and the rules that its batch was
    taken under."""

    version: int
    time: float
    groups: int
    max_staleness: int
    groups_per_batch: int


class WriteBatch(msgspec.Struct, frozen=True):
    """What one transaction stores."""

    counters: str  # JSON of `ReplayCounters`
    groups: Sequence[Row]
    episodes: Sequence[Row]
    trajectories: Sequence[DeliveredTrajectory]
    commits: Sequence[CommitRow]
    rolled_back_to: int | None  # the commits after this version no longer count
    tasks: Sequence[Row] = ()
    failed: Sequence[DeliveredTrajectory] = ()
    images: Mapping[str, bytes] = NO_IMAGES  # files that trajectories name, by name

    @classmethod
    def of(
        cls,
        counters: ReplayCounters,
        groups: Iterable[Changed],
        trajectories: Sequence[DeliveredTrajectory] = (),
        commits: Sequence[CommitRow] = (),
        rolled_back_to: int | None = None,
        tasks: Mapping[tuple[int, int], TaskChange] | None = None,
        failed: Sequence[DeliveredTrajectory] = (),
        images: Mapping[str, bytes] = NO_IMAGES,
    ) -> WriteBatch:
        """Groups come with their changed episodes. `failed` are branches of failed episodes; some may be stored already."""
        changed = list(groups)
        return cls(
            msgspec.json.encode(counters).decode(),
            [_group_row(group) for group, _ in changed],
            [_episode_row(g.id, e) for g, episodes in changed for e in episodes],
            trajectories,
            commits,
            rolled_back_to,
            [(*key, *msgspec.structs.astuple(change)) for key, change in (tasks or {}).items()],
            failed,
            images,
        )


class Store:
    """The only writer of one file. Every method raises StoreError when SQLite does, or when a row is not what was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.images = ImageFiles(path.parent)
        self._shrinking = False
        with contextlib.ExitStack() as opened:  # closed where what follows fails
            self._db = connect(path, "rwc")
            opened.callback(self._db.close)
            try:
                require_schema(self._db, path, new=True)
                self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table
                self._db.execute("PRAGMA journal_mode = WAL")
                self._db.execute("PRAGMA synchronous = FULL")  # what is acknowledged survives a crash of the host, too
                self._db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
                self._db.execute("PRAGMA temp_store = MEMORY")
                self._db.executescript(SCHEMA)
                self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                (end,) = self._db.execute(retention.END).fetchone()
                self._segments = SegmentLog(segments_path(path), end)
                opened.callback(self._segments.close)
                self._reserved = self._segments.end
                self._segments.delete_unnamed(self._is_named)
            except (sqlite3.Error, OSError) as error:
                raise store_error(f"cannot prepare the buffer {path}", error) from None
            opened.pop_all()

    def close(self) -> None:
        self._segments.close()
        self._db.close()

    # --- writing --------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> int:
        """The position of a trajectory's arrays, which the next `save` stores. Trajectories with a reserved position are saved in
        the order of their reservations, and a `save` with them has no others. May be called while another thread is in `save`."""
        position, self._reserved = self._reserved, self._reserved + size
        return position

    def save(self, batch: WriteBatch) -> None:
        """Store it in one transaction, after the arrays and the images, which its rows name."""
        trajectories = list[Row]()
        with self._writing():
            self.images.write(batch.images)
        if batch.trajectories:
            with self._writing():
                positions = self._segments.append([new.encoded.arrays.data for new in batch.trajectories])
            for new, position in zip(batch.trajectories, positions, strict=True):
                if new.row.position not in (NOWHERE, position):
                    raise StoreError(
                        f"trajectory {new.id} is stored at {position}, and {new.row.position} was reserved"
                    )
            trajectories = [
                (id, episode_id, group_id, reward, row.header, row.length, position, len(encoded.arrays))
                for (id, episode_id, group_id, reward, encoded, row), position in zip(
                    batch.trajectories, positions, strict=True
                )
            ]
        with self._transaction():
            self._insert("REPLACE INTO counters", [(0, batch.counters)])
            self._insert("REPLACE INTO groups", batch.groups)
            self._insert("INSERT INTO episodes", batch.episodes, UPSERT)
            self._insert("INSERT INTO trajectories", trajectories, large=(4,))
            failed = list(map(_failed_row, batch.failed))
            self._insert(f"INSERT OR IGNORE INTO failed {FAILED_COLUMNS}", failed, large=(3, 5))
            self._insert("INSERT INTO tasks", batch.tasks, ADD_UP)
            self._insert("INSERT INTO commits", [(*msgspec.structs.astuple(commit), 0) for commit in batch.commits])
            if batch.rolled_back_to is not None:
                self._db.execute("UPDATE commits SET rolled_back = 1 WHERE version > ?", (batch.rolled_back_to,))

    def shrink(self, limit: int, settled: int) -> bool:
        """Reduce the file towards `limit` bytes: drop arrays of settled groups, the oldest first, then sum up their rows in the
        archive. Does a part at a time; returns whether it did anything, so that the caller calls again.

        Args:
            settled: `ReplayCounters.settled`.
        """
        with self._reading():
            arrays, (used, size) = self._segments.size, retention.sizes(self._db)
        target = retention.SLACK * limit if self._shrinking else limit
        dropped = vacuumed = False
        if arrays + used > target:
            with self._transaction():
                dropped = retention.drop(self._db, settled)
            with self._writing():
                self._segments.delete_unnamed(self._is_named)
        if arrays + size > target:
            with self._writing():
                retention.vacuum(self._db)
                vacuumed = retention.sizes(self._db)[1] < size
        self._shrinking = dropped or vacuumed
        return self._shrinking

    def _insert(self, verb: str, rows: Sequence[Row], suffix: str = "", large: Sequence[int] = ()) -> None:
        """Many rows by one statement: each statement waits for the interpreter, which decodes the next messages meanwhile. `large`
        are the columns that hold bytes."""
        for chunk in _chunks(rows, large):
            marks = f"({', '.join('?' * len(chunk[0]))})"
            values = [value for row in chunk for value in row]
            self._db.execute(f"{verb} VALUES {', '.join([marks] * len(chunk))} {suffix}", values)

    # --- reading --------------------------------------------------------------------------------------------------

    def trajectories(self, group_id: int) -> list[Trajectory]:
        """All trajectories of a group that were kept, by member and branch."""
        found = self._read("episode_id IN (SELECT id FROM episodes WHERE group_id = ?)", group_id)
        return [trajectory for trajectory, *_ in found]

    def episode(self, episode_id: str) -> list[DeliveredTrajectory]:
        """The branches of one delivered episode, in order."""
        return [DeliveredTrajectory.of(episode_id, *found) for found in self._read("episode_id = ?", episode_id)]

    def load(self) -> tuple[ReplayCounters, list[Group]]:
        """The counters, and by id every group that can still change: unfinished, not served yet, one that may be rolled back, or
        with episodes that may still report."""
        groups: dict[int, Group] = {}
        with self._reading():
            row = self._db.execute("SELECT value FROM counters").fetchone()
            with self._intact("the counters"):
                counters = msgspec.json.decode(row[0], type=ReplayCounters) if row else ReplayCounters()
            (newest,) = self._db.execute("SELECT coalesce(max(id), -1) FROM groups").fetchone()
            if newest >= counters.next_group:
                why = f"the next group is {counters.next_group}, there is a group {newest}"
                raise self._damaged("the counters", why)
            settled = {"settled": counters.settled}
            wanted = f"FROM groups WHERE NOT ({SETTLED})"
            for row in self._rows(f"SELECT * {wanted} ORDER BY id", settled):
                with self._intact(f"group {row['id']}"):
                    groups[row["id"]] = msgspec.convert(dict(row), Group)
            for row in self._rows(f"SELECT *, {REWARD} FROM episodes WHERE group_id IN (SELECT id {wanted})", settled):
                with self._intact(f"episode {row['id']}"):
                    groups[row["group_id"]].episodes[row["id"]] = _read_episode(row)
        return counters, list(groups.values())

    def tasks(self, envs: Iterable[int]) -> list[StoredTask]:
        """What is known of the tasks of these environments, in order."""
        found = list[StoredTask]()
        with self._reading():
            for env in envs:
                query = "SELECT task, groups, attempts, solves, streak, version FROM tasks WHERE env = ? ORDER BY task"
                for task, *numbers in self._db.execute(query, (env,)):
                    with self._intact(f"task {task}"):
                        found.append(
                            (env, task, TaskStatistics(*msgspec.convert(numbers, tuple[int, int, int, int, int])))
                        )
        return found

    def _read(self, where: str, value: object) -> list[tuple[Trajectory, EncodedTrajectory, int]]:
        """With their positions, by member and branch."""
        with self._reading():
            rows = self._db.execute(
                f"SELECT id, header, length, bytes, arrays FROM trajectories WHERE {where}", (value,)
            ).fetchall()
            found = [self._trajectory(*row) for row in rows]
        return sorted(found, key=lambda one: (one[0].member, one[0].branch))

    def _trajectory(
        self, trajectory_id: str, header: object, length: object, size: object, position: object
    ) -> tuple[Trajectory, EncodedTrajectory, int]:
        what = f"trajectory {trajectory_id}"
        if not (isinstance(header, bytes) and isinstance(size, int) and isinstance(position, int)):
            raise self._damaged(what, "its arrays or its header are missing")
        arrays = self._segments.read(position, size) if 0 < size <= ARRAYS_LIMIT else b""
        if not arrays or len(arrays) < size:
            raise self._damaged(what, f"{len(arrays)} of {size} bytes are left of its arrays")
        encoded = EncodedTrajectory(header, np.frombuffer(arrays, dtype=np.uint8))
        try:
            trajectory = encoded.decode()
            trajectory.check()
        except WireError as error:
            raise self._damaged(what, error) from None
        if (trajectory.id, len(trajectory)) != (trajectory_id, length):
            raise self._damaged(what, f"it holds {trajectory.id} of {len(trajectory)} tokens")
        return trajectory, encoded, position

    def _is_named(self, start: int, end: int) -> bool:
        """Whether a row names arrays at these positions."""
        return bool(self._db.execute(retention.NAMED, (start, end)).fetchone()[0])

    def _rows(self, query: str, values: dict[str, int]) -> sqlite3.Cursor:
        cursor = self._db.cursor()
        cursor.row_factory = sqlite3.Row
        return cursor.execute(query, values)

    # --- errors ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
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
            raise store_error(f"cannot write the buffer {self.path}", error) from None

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise store_error(f"cannot read the buffer {self.path}", error) from None

    @contextlib.contextmanager
    def _intact(self, what: str) -> Iterator[None]:
        """A damaged row may hold anything."""
        try:
            yield
        except (msgspec.MsgspecError, TypeError) as error:
            raise self._damaged(what, error) from None

    def _damaged(self, what: str, why: object) -> StoreError:
        return StoreError(f"the buffer {self.path} is damaged at {what}: {why}")


def _group_row(g: Group) -> Row:
    times = g.leased_time, g.ready_time, g.taken_time
    return (g.id, g.env, g.task, g.state, g.attempt, g.request, g.leased_at, g.trained_at, *times)


def _episode_row(group_id: int, e: Episode) -> Row:
    return (
        e.id,
        group_id,
        e.worker,
        e.account,
        sum(e.generated.values()),
        msgspec.json.encode(e.generated).decode(),
        msgspec.json.encode(e.kept).decode(),
        e.settled,
        e.final,
        e.withheld,
        e.loss_from,
        e.reason,
        msgspec.json.encode(e.outcome).decode() if e.outcome else None,
        e.delivered_time,
    )


def _failed_row(new: DeliveredTrajectory) -> Row:
    return new.id, new.episode_id, new.group_id, new.row.header, new.row.length, new.encoded.arrays.tobytes()


def _read_episode(row: sqlite3.Row) -> Episode:
    """From all columns, and `REWARD`."""
    flags = {name: bool(row[name]) for name in ("settled", "final")}
    counts = {name: msgspec.json.decode(row[name], type=Counts) for name in ("generated", "kept")}
    outcome = msgspec.json.decode(row["outcome"], type=Outcome) if row["outcome"] else None
    return msgspec.convert({**dict(row), **flags, **counts, "outcome": outcome}, Episode)


def _chunks(rows: Sequence[Row], large: Sequence[int]) -> Iterator[Sequence[Row]]:
    """The rows of one statement each. Their number is a power of two, so that there are few different statements: `sqlite3` keeps
    them compiled."""
    at = 0
    while left := len(rows) - at:
        number = 1 << min(left, VALUES_AT_ONCE // len(rows[at])).bit_length() - 1
        while number > 1 and _nbytes(rows[at : at + number], large) > BYTES_AT_ONCE:
            number //= 2
        yield rows[at : at + number]
        at += number


def _nbytes(rows: Sequence[Row], columns: Sequence[int]) -> int:
    return sum(len(cast("bytes", row[column])) for row in rows for column in columns)
