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
"""How much is cut off each file at a time, for the same reason."""

SLACK = 0.9
"""A buffer over its limit is brought down to this share of it, so that it is not over it again at once."""

SCHEMAS = ("main", "arrays")

_LEAVING = "(SELECT id FROM leaving)"

ARRAYS = (
    "SELECT DISTINCT group_id FROM trajectories INDEXED BY held CROSS JOIN groups ON groups.id = group_id"
    f" WHERE arrays IS NOT NULL AND {SETTLED} ORDER BY group_id LIMIT {GROUPS_AT_ONCE}",
    f"INSERT INTO let_go SELECT arrays FROM trajectories WHERE arrays IS NOT NULL AND group_id IN {_LEAVING}",
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
    """Bytes of both files that are in use, and all of them."""
    used = whole = 0
    for schema in SCHEMAS:
        page, pages, free = (_pragma(db, schema, what) for what in ("page_size", "page_count", "freelist_count"))
        used += page * (pages - free)
        whole += page * pages
    return used, whole


def give_back(db: sqlite3.Connection) -> None:
    """Cut unused pages off the files, outside of a transaction; that of rows is smaller after the next checkpoint of its log."""
    for schema in SCHEMAS:
        pages = CUT_BYTES // _pragma(db, schema, "page_size")
        db.executescript(f"PRAGMA {schema}.incremental_vacuum({pages})")  # `execute` would stop after one page


def _pragma(db: sqlite3.Connection, schema: str, what: str) -> int:
    return db.execute(f"PRAGMA {schema}.{what}").fetchone()[0]


def drop(db: sqlite3.Connection, over: int) -> bool:
    """Take the next part away, in the caller's transaction; False when nothing is left that may go. `drop_arrays` follows, in
    another."""
    db.execute("CREATE TEMP TABLE IF NOT EXISTS leaving (id INTEGER PRIMARY KEY)")
    db.execute("CREATE TEMP TABLE IF NOT EXISTS let_go (key INTEGER PRIMARY KEY)")
    for chosen, *statements in (ARRAYS, ROWS):
        db.execute("DELETE FROM leaving")
        if db.execute(f"INSERT INTO leaving {chosen}", {"over": over}).rowcount:
            for statement in statements:
                db.execute(statement)
            return True
    return False


def drop_arrays(db: sqlite3.Connection) -> None:
    """Take the arrays away that no row names any more, in the caller's transaction."""
    db.execute("DELETE FROM arrays.arrays WHERE key IN (SELECT key FROM let_go)")
    db.execute("DELETE FROM let_go")
