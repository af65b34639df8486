"""What a run's episodes were, read from its buffer file while the run goes on or after it: rows without their arrays."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path

from ..errors import StoreError, WireError
from .schema import connect, require_schema
from .trajectory import BatchRow, EncodedRow

# Groups that have ended, from the first that was trained on after a version.
ENDED = (
    "SELECT id FROM groups WHERE state IN ('ready', 'batched', 'trained', 'discarded')"
    " AND id >= (SELECT coalesce(min(id), 0) FROM groups WHERE trained_at > ?)"
    " AND EXISTS (SELECT 1 FROM trajectories WHERE group_id = groups.id) ORDER BY id"
)
ROWS = "SELECT id, header, length FROM trajectories WHERE group_id = ?"


def read_groups(path: Path, after: int, most: int) -> list[list[list[BatchRow]]]:
    """At most `most` groups that have ended, spread evenly over those since version `after`: of each group its episodes, of each
    episode its branches in order.

    Raises:
        StoreError: there is no such file, it is not a buffer of this version, or a row of it is damaged.
    """
    if not path.exists():
        raise StoreError(f"there is no buffer at {path}")
    db = connect(path, "ro")
    try:
        require_schema(db, path)
        db.execute("BEGIN")  # all queries see one state
        ids = [id for (id,) in db.execute(ENDED, (after,))]
        chosen = ids if len(ids) <= most else [ids[i * len(ids) // most] for i in range(most)]
        return [_episodes(db, path, id) for id in chosen]
    except sqlite3.Error as error:
        raise StoreError(f"cannot read the buffer {path}: {error}") from None
    finally:
        db.close()


def _episodes(db: sqlite3.Connection, path: Path, group: int) -> list[list[BatchRow]]:
    rows: list[BatchRow] = []
    for id, header, length in db.execute(ROWS, (group,)):
        try:
            rows.append(EncodedRow(header, length, 0).decode())
        except (WireError, TypeError) as error:
            raise StoreError(f"the buffer {path} is damaged at trajectory {id!r}: {error}") from None
    rows.sort(key=lambda row: (row.member, row.episode, row.branch))
    return [list(branches) for _, branches in itertools.groupby(rows, key=lambda row: row.episode)]
