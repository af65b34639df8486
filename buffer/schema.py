"""The tables of the buffer's file, the views by which its ledger can be checked with SQLite alone, and how to open it.

Invariants:
- `ledger` has every generated token once: account (or the reason it was discarded for), policy version, length of its episode.
- The views need nothing but SQLite.
- What is in `failed` is for people to look at: nothing that is trained on, counted or recovered is read from there.
- Times are seconds since the epoch, on the clock of the buffer's host; NULL before what they are of.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ..errors import StoreError

BUFFER = "buffer"  # the role that is the whole buffer, or the clock of its shards
DATABASE = f"{BUFFER}.sqlite"  # in the folder of a run; its shards have `buffer-1.sqlite` and so on, see `run_stores`
EVALUATION_DATABASE = "evaluation.sqlite"  # beside it, see `evaluation_episodes`
SCHEMA_VERSION = 14  # raise it when the tables, or the headers of trajectories in them (`wire.FORMAT`), change
BUSY_S = 10.0  # how long SQLite waits for another connection that holds the file
SCHEMA = """
CREATE TABLE IF NOT EXISTS counters (
    id INTEGER PRIMARY KEY CHECK (id = 0),
    value TEXT NOT NULL  -- JSON of admission.ReplayCounters
);
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, env INTEGER NOT NULL, task INTEGER NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
    request TEXT NOT NULL, leased_at INTEGER NOT NULL, trained_at INTEGER,
    leased_time REAL, ready_time REAL, taken_time REAL  -- see group_table.Group
);
CREATE TABLE IF NOT EXISTS episodes (
    id TEXT PRIMARY KEY, group_id INTEGER NOT NULL REFERENCES groups, worker TEXT NOT NULL, account TEXT NOT NULL,
    length INTEGER NOT NULL,  -- tokens generated so far
    generated TEXT NOT NULL,  -- JSON: {"version": tokens}
    kept TEXT NOT NULL,       -- of these, sampled tokens of the delivered trajectories
    settled INTEGER NOT NULL, final INTEGER NOT NULL,
    withheld TEXT,            -- why none of its tokens carries loss
    loss_from INTEGER,        -- once trained: the oldest version whose tokens carried loss
    reason TEXT NOT NULL, outcome TEXT,
    delivered_time REAL       -- when its end was delivered
);
CREATE INDEX IF NOT EXISTS episodes_of_group ON episodes (group_id);
CREATE TABLE IF NOT EXISTS trajectories (
    id TEXT PRIMARY KEY, episode_id TEXT NOT NULL REFERENCES episodes, group_id INTEGER NOT NULL, reward REAL NOT NULL,
    header BLOB NOT NULL, length INTEGER NOT NULL,
    arrays INTEGER, -- their position, see `segments`; NULL once dropped to free space
    bytes INTEGER NOT NULL  -- of its arrays
);
CREATE INDEX IF NOT EXISTS held ON trajectories (group_id) WHERE arrays IS NOT NULL;
CREATE INDEX IF NOT EXISTS positions ON trajectories (arrays) WHERE arrays IS NOT NULL;
CREATE INDEX IF NOT EXISTS trajectories_of_episode ON trajectories (episode_id);
CREATE TABLE IF NOT EXISTS failed (  -- branches of episodes that failed and are not trained on; no view and no batch has them
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- of no two rows, so that a reader that follows them misses none
    id TEXT NOT NULL UNIQUE, episode_id TEXT NOT NULL, group_id INTEGER NOT NULL,
    header BLOB NOT NULL, length INTEGER NOT NULL,
    arrays BLOB NOT NULL      -- as in `segments`, but here, so that they leave with their row
);
CREATE INDEX IF NOT EXISTS failed_of_group ON failed (group_id);
CREATE TABLE IF NOT EXISTS commits (
    version INTEGER PRIMARY KEY, time REAL NOT NULL, groups INTEGER NOT NULL,
    max_staleness INTEGER NOT NULL, groups_per_batch INTEGER NOT NULL,  -- its batch was taken under
    rolled_back INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS tasks (  -- sums over all groups and episodes of a task; its rows are never dropped
    env INTEGER NOT NULL, task INTEGER NOT NULL,  -- as in `groups`
    id TEXT NOT NULL,           -- the environment's name of the task, empty before its first attempt
    groups INTEGER NOT NULL, attempts INTEGER NOT NULL, solves INTEGER NOT NULL, streak INTEGER NOT NULL,
    version INTEGER NOT NULL,   -- see task_table.TaskStatistics
    PRIMARY KEY (env, task)
) WITHOUT ROWID;
CREATE VIEW IF NOT EXISTS rates AS  -- an epoch gives a row of a data set another number, but the same id
    SELECT env, id, sum(groups) AS groups, sum(attempts) AS attempts, sum(solves) AS solves,
        CAST(sum(solves) AS REAL) / sum(attempts) AS rate, max(version) AS version
    FROM tasks WHERE attempts > 0 GROUP BY env, id;
CREATE TABLE IF NOT EXISTS archive (  -- sums over groups whose rows were dropped; length is rounded down to a power of two
    version INTEGER, length INTEGER, account TEXT, tokens INTEGER NOT NULL,
    weight REAL NOT NULL,     -- sum over tokens of the length of their episodes, which the mean needs unrounded
    PRIMARY KEY (version, length, account)
);
CREATE VIEW IF NOT EXISTS sampled AS
    SELECT group_id, episodes.id AS episode_id, account, reason, withheld, loss_from, length, CAST(key AS INTEGER) AS version,
        value AS generated,
        CASE WHEN account IN ('ready', 'trained') THEN coalesce(json_extract(kept, '$."' || key || '"'), 0) ELSE 0 END AS kept
    FROM episodes, json_each(episodes.generated);
CREATE VIEW IF NOT EXISTS accounts AS
    SELECT group_id, version, length,
        CASE WHEN part = 'kept' THEN
                CASE WHEN account = 'ready' THEN 'ready' WHEN version >= loss_from THEN 'trained'
                    ELSE 'withheld_' || coalesce(withheld, 'stale') END
            ELSE CASE account WHEN 'in_flight' THEN 'in_flight' WHEN 'discarded' THEN reason ELSE 'unused' END
        END AS account,
        CASE WHEN part = 'kept' THEN kept ELSE generated - kept END AS tokens
    FROM sampled, (SELECT 'kept' AS part UNION ALL SELECT 'unused')
    WHERE CASE WHEN part = 'kept' THEN kept ELSE generated - kept END <> 0;
CREATE VIEW IF NOT EXISTS ledger AS
    SELECT version, length, account, tokens, tokens * CAST(length AS REAL) AS weight FROM accounts
    UNION ALL SELECT version, length, account, tokens, weight FROM archive;
"""


def process_names(shards: int) -> list[str]:
    """The roles of a buffer with so many shards: one that is all of it, or the clock and its shards, by number."""
    return [BUFFER, *(f"{BUFFER}-{number}" for number in range(1, shards + 1) if shards > 1)]


def bucket(length: int) -> int:
    """The largest power of two that is at most `length`; 0 for 0."""
    return 1 << (length.bit_length() - 1) if length > 0 else 0


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open the file; `mode` as in SQLite's URIs. Raises StoreError."""
    try:
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,
            timeout=BUSY_S,
            check_same_thread=False,  # the service stores in another thread; the two take turns
        )
        db.create_function("bucket", 1, bucket, deterministic=True)
        return db
    except sqlite3.Error as error:
        raise store_error(f"cannot open the buffer {path}", error) from None


def require_schema(db: sqlite3.Connection, path: Path, name: str = "main", *, new: bool = False) -> None:
    """Raises StoreError when the file, which the connection knows as `name`, is not of this program; with `new` an empty one may
    become so."""
    found = db.execute(f"PRAGMA {name}.user_version").fetchone()[0]
    if found != SCHEMA_VERSION and not (new and found == 0):
        raise StoreError(
            f"{path} has schema {found}, this program knows {SCHEMA_VERSION}: only the release that wrote it reads it"
        )


def store_error(what: str, error: Exception) -> StoreError:
    """Final, except where another process only held the file for long."""
    held = getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return StoreError(f"{what}: {error}", final=not held)
