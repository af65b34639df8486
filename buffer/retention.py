"""What leaves the buffer's file when it has grown too large, and in which order.

Invariants:
- Only settled groups lose anything: nobody can train on them again, and no report can change them any more.
- Arrays go first, of all settled groups, the oldest group first; then rows. What they counted stays, in `archive`.
- A part at a time, each in one transaction of its own: a round of the service waits for no more.
"""

from __future__ import annotations

import sqlite3

SETTLED = (
    "(state = 'discarded' OR (state = 'trained' AND trained_at <= :over))"
    " AND NOT EXISTS (SELECT 1 FROM episodes WHERE group_id = groups.id AND NOT settled)"
)
"""Groups that nothing can happen to any more; `:over` is the last version that is both served and in a checkpoint."""

GROUPS_AT_ONCE = 256
"""Groups that lose something in one transaction: more would keep the answers of a round waiting."""

CUT_BYTES = 32 << 20
"""How much is cut off the file at a time, for the same reason."""

SLACK = 0.9
"""A buffer over its limit is brought down to this share of it, so that it is not over it again at once."""

TOKEN_BYTES = 8
"""Of arrays: an id and a log-prob."""

END = (
    f"SELECT coalesce(max(arrays + {TOKEN_BYTES} * coalesce(length(loss_mask), 0)), 0) FROM trajectories"
    " WHERE typeof(arrays) = 'integer' AND arrays < 1 << 62"  # a damaged row may hold anything
)
NAMED = "SELECT EXISTS (SELECT 1 FROM trajectories WHERE arrays >= ? AND arrays < ?)"
"""Where the arrays end that rows name, and whether rows name any in these places."""

_LEAVING = "(SELECT id FROM leaving)"

ARRAYS = (
    "SELECT DISTINCT group_id FROM trajectories INDEXED BY held CROSS JOIN groups ON groups.id = group_id"
    f" WHERE arrays IS NOT NULL AND {SETTLED} ORDER BY group_id LIMIT {GROUPS_AT_ONCE}",
    f"UPDATE trajectories SET arrays = NULL, loss_mask = NULL WHERE arrays IS NOT NULL AND group_id IN {_LEAVING}",
)
ROWS = (
    f"SELECT id FROM groups WHERE {SETTLED} ORDER BY id LIMIT {GROUPS_AT_ONCE}",
    "INSERT INTO archive SELECT version, bucket(length), account, sum(tokens), sum(tokens * CAST(length AS REAL)) FROM placed"
    f" WHERE group_id IN {_LEAVING} GROUP BY 1, 2, 3"
    " ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens, weight = weight + excluded.weight",
    f"DELETE FROM trajectories WHERE episode_id IN (SELECT id FROM episodes WHERE group_id IN {_LEAVING})",
    f"DELETE FROM episodes WHERE group_id IN {_LEAVING}",
    f"DELETE FROM groups WHERE id IN {_LEAVING}",
)
"""Each: the groups that may lose it, and how they do."""


def sizes(db: sqlite3.Connection) -> tuple[int, int]:
    """Bytes of the file that are in use, and all of them."""
    page, pages, free = (_pragma(db, what) for what in ("page_size", "page_count", "freelist_count"))
    return page * (pages - free), page * pages


def give_back(db: sqlite3.Connection) -> None:
    """Cut unused pages off the file, outside of a transaction; it is smaller after the next checkpoint of its log."""
    pages = CUT_BYTES // _pragma(db, "page_size")
    db.executescript(f"PRAGMA incremental_vacuum({pages})")  # `execute` would stop after one page


def _pragma(db: sqlite3.Connection, what: str) -> int:
    return db.execute(f"PRAGMA {what}").fetchone()[0]


def drop(db: sqlite3.Connection, over: int) -> bool:
    """Take the next part away, in the caller's transaction; False when nothing is left that may go. The bytes of arrays that are no
    longer named then go after it."""
    db.execute("CREATE TEMP TABLE IF NOT EXISTS leaving (id INTEGER PRIMARY KEY)")
    for chosen, *statements in (ARRAYS, ROWS):
        db.execute("DELETE FROM leaving")
        if db.execute(f"INSERT INTO leaving {chosen}", {"over": over}).rowcount:
            for statement in statements:
                db.execute(statement)
            return True
    return False
