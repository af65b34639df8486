"""What a run's episodes were, read from its buffer while the run goes on or after it: rows without their arrays, and when the
buffer did what with them."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec

from ..errors import StoreError, WireError
from .encoded import EncodedRow
from .run_stores import connect_run, read_mode
from .trajectory import BatchRow

# Groups that have ended, from the first that was trained on after a version.
ENDED = (
    "SELECT id FROM groups WHERE state IN ('ready', 'batched', 'trained', 'discarded')"
    " AND id >= (SELECT coalesce(min(id), 0) FROM groups WHERE trained_at > ?)"
    " AND EXISTS (SELECT 1 FROM trajectories WHERE group_id = groups.id) ORDER BY id"
)
ROWS = "SELECT id, header, length FROM trajectories WHERE group_id = ?"
LEASED = (
    "SELECT id, leased_time FROM groups WHERE leased_time IS NOT NULL"
    " AND id >= (SELECT coalesce(min(id), 0) FROM groups WHERE trained_at > ?)"
)
DELIVERED = "SELECT id, delivered_time FROM episodes WHERE group_id = ? AND delivered_time IS NOT NULL"
COMPLETE = (
    "SELECT trained_at, max(ready_time) FROM groups WHERE trained_at > ? AND ready_time IS NOT NULL GROUP BY trained_at"
)


class BufferTimes(msgspec.Struct, frozen=True):
    """Seconds since the epoch, on the clock of the buffer's host."""

    leased: dict[int, float]  # group -> its last lease
    delivered: dict[str, float]  # episode -> its end was on disk
    complete: dict[int, float]  # version -> the last group of the batch that made it was complete


def read_groups(path: Path, after: int, most: int, *, active: bool = True) -> list[list[list[BatchRow]]]:
    """At most `most` groups that have ended, spread evenly over those since version `after`: of each group its episodes, of each
    episode its branches in order. `active` where a process may write to the run.

    Raises:
        StoreError: there is no such file, it is not a buffer of this version, or a row of it is damaged.
    """
    with _reading(path, active=active) as db:
        ids = [id for (id,) in db.execute(ENDED, (after,))]
        chosen = ids if len(ids) <= most else [ids[i * len(ids) // most] for i in range(most)]
        return [_episodes(db, path, id) for id in chosen]


def read_times(path: Path, after: int, groups: Collection[int], *, active: bool = True) -> BufferTimes:
    """Times of all groups and batches since version `after`, and of the episodes of `groups`. Otherwise as `read_groups`."""
    with _reading(path, active=active) as db:
        return BufferTimes(
            dict(db.execute(LEASED, (after,))),
            {episode: seconds for id in groups for episode, seconds in db.execute(DELIVERED, (id,))},
            dict(db.execute(COMPLETE, (after,))),
        )


@contextlib.contextmanager
def _reading(path: Path, *, active: bool) -> Iterator[sqlite3.Connection]:
    """All queries see one state; with shards one of each file. Raises StoreError."""
    if not path.exists():
        raise StoreError(f"there is no buffer at {path}")
    try:
        with contextlib.closing(connect_run(path, read_mode(path, active=active))) as db:
            db.execute("BEGIN")
            yield db
    except sqlite3.Error as error:
        raise StoreError(f"cannot read the buffer {path}: {error}") from None


def _episodes(db: sqlite3.Connection, path: Path, group: int) -> list[list[BatchRow]]:
    rows: list[BatchRow] = []
    for id, header, length in db.execute(ROWS, (group,)):
        try:
            rows.append(EncodedRow(header, length, 0).decode())
        except (WireError, TypeError) as error:
            raise StoreError(f"the buffer {path} is damaged at trajectory {id!r}: {error}") from None
    rows.sort(key=lambda row: (row.member, row.episode, row.branch))
    return [list(branches) for _, branches in itertools.groupby(rows, key=lambda row: row.episode)]
