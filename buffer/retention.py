"""What is deleted from the buffer's file when it has grown too large, and in which order.

Invariants:
- Only settled groups lose anything: they cannot be trained on again, and no report can change them.
- Branches of failed episodes are deleted first, the oldest first: nothing depends on them.
- Then arrays of all settled groups, the oldest group first; then rows. Their token counts stay, in `archive`.
- One part at a time, each in a transaction of its own: a round of the service waits for no more than one.
"""

from __future__ import annotations

import sqlite3

# Groups that can no longer change; `:settled` is `ReplayCounters.settled`.
SETTLED = (
    "(state = 'discarded' OR (state = 'trained' AND trained_at <= :settled))"
    " AND NOT EXISTS (SELECT 1 FROM episodes WHERE group_id = groups.id AND NOT settled)"
)
GROUPS_AT_ONCE = 256  # groups of one transaction: more would delay the replies of a round
CUT_BYTES = 32 << 20  # how much is cut off the file at a time, for the same reason
SLACK = 0.9  # a buffer over its limit shrinks to this share of it, so that it does not exceed the limit again at once
# Where the arrays end that rows name.
END = (
    "SELECT coalesce(max(arrays + bytes), 0) FROM trajectories"
    " WHERE typeof(arrays) = 'integer' AND arrays < 1 << 62 AND bytes BETWEEN 1 AND 1 << 40"  # a damaged row may hold anything
)
# Whether rows name arrays between two positions.
NAMED = "SELECT EXISTS (SELECT 1 FROM trajectories WHERE arrays >= ? AND arrays < ?)"
FAILED = f"DELETE FROM failed WHERE rowid IN (SELECT rowid FROM failed ORDER BY rowid LIMIT {GROUPS_AT_ONCE})"
_LEAVING = "(SELECT id FROM leaving)"
# ARRAYS, ROWS: the groups that may lose them, and the statements that delete them.
ARRAYS = (
    "SELECT DISTINCT group_id FROM trajectories INDEXED BY held CROSS JOIN groups ON groups.id = group_id"
    f" WHERE arrays IS NOT NULL AND {SETTLED} ORDER BY group_id LIMIT {GROUPS_AT_ONCE}",
    f"UPDATE trajectories SET arrays = NULL WHERE arrays IS NOT NULL AND group_id IN {_LEAVING}",
)
ROWS = (
    f"SELECT id FROM groups WHERE {SETTLED} ORDER BY id LIMIT {GROUPS_AT_ONCE}",
    "INSERT INTO archive SELECT version, bucket(length), account, sum(tokens), sum(tokens * CAST(length AS REAL)) FROM accounts"
    f" WHERE group_id IN {_LEAVING} GROUP BY 1, 2, 3"
    " ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens, weight = weight + excluded.weight",
    f"DELETE FROM trajectories WHERE episode_id IN (SELECT id FROM episodes WHERE group_id IN {_LEAVING})",
    f"DELETE FROM episodes WHERE group_id IN {_LEAVING}",
    f"DELETE FROM groups WHERE id IN {_LEAVING}",
)


def sizes(db: sqlite3.Connection) -> tuple[int, int]:
    """Bytes of the file that are in use, and all of them."""
    page, pages, free = (_pragma(db, what) for what in ("page_size", "page_count", "freelist_count"))
    return page * (pages - free), page * pages


def vacuum(db: sqlite3.Connection) -> None:
    """Cut unused pages off the file, outside of a transaction; it is smaller after the next checkpoint of its WAL."""
    pages = CUT_BYTES // _pragma(db, "page_size")
    db.executescript(f"PRAGMA incremental_vacuum({pages})")  # `execute` would stop after one page


def _pragma(db: sqlite3.Connection, what: str) -> int:
    return db.execute(f"PRAGMA {what}").fetchone()[0]


def drop(db: sqlite3.Connection, settled: int) -> bool:
    """Delete the next part, in the caller's transaction; False when there is none. The caller then deletes the array bytes that no
    row names."""
    if db.execute(FAILED).rowcount:
        return True
    db.execute("CREATE TEMP TABLE IF NOT EXISTS leaving (id INTEGER PRIMARY KEY)")
    for chosen, *statements in (ARRAYS, ROWS):
        db.execute("DELETE FROM leaving")
        if db.execute(f"INSERT INTO leaving {chosen}", {"settled": settled}).rowcount:
            for statement in statements:
                db.execute(statement)
            return True
    return False
