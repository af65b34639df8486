"""The tables of the buffer's file, and the views by which anybody with SQLite can check its accounts.

Invariants:
- `ledger` has every generated token once: account (or the reason it was discarded for), policy version, length of its episode.
- The views need nothing but SQLite.
"""

SCHEMA_VERSION = 6
"""Raise it when the tables, or the headers of trajectories in them (`wire.FORMAT`), change."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS clock (
    id INTEGER PRIMARY KEY CHECK (id = 0),
    value TEXT NOT NULL  -- JSON of rules.Clock
);
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, env INTEGER NOT NULL, task INTEGER NOT NULL, state TEXT NOT NULL, attempt INTEGER NOT NULL,
    wish TEXT NOT NULL, leased_at INTEGER NOT NULL, trained_at INTEGER
);
CREATE TABLE IF NOT EXISTS episodes (
    id TEXT PRIMARY KEY, group_id INTEGER NOT NULL REFERENCES groups, worker TEXT NOT NULL, account TEXT NOT NULL,
    length INTEGER NOT NULL,  -- tokens generated so far
    generated TEXT NOT NULL,  -- JSON: {"version": tokens}
    kept TEXT NOT NULL,       -- of these, sampled tokens of the delivered trajectories
    settled INTEGER NOT NULL, final INTEGER NOT NULL,
    withheld TEXT,            -- why none of its tokens carries loss
    loss_from INTEGER,        -- once trained: the oldest version whose tokens carried loss
    reason TEXT NOT NULL, outcome TEXT
);
CREATE INDEX IF NOT EXISTS episodes_of_group ON episodes (group_id);
CREATE TABLE IF NOT EXISTS trajectories (
    id TEXT PRIMARY KEY, episode_id TEXT NOT NULL REFERENCES episodes, group_id INTEGER NOT NULL, reward REAL NOT NULL,
    header BLOB NOT NULL, loss_mask BLOB, arrays INTEGER  -- their place, see `arrays`; both are NULL once dropped to save room
);
CREATE INDEX IF NOT EXISTS held ON trajectories (group_id) WHERE arrays IS NOT NULL;
CREATE INDEX IF NOT EXISTS places ON trajectories (arrays) WHERE arrays IS NOT NULL;
CREATE INDEX IF NOT EXISTS trajectories_of_episode ON trajectories (episode_id);
CREATE TABLE IF NOT EXISTS commits (
    version INTEGER PRIMARY KEY, time REAL NOT NULL, groups INTEGER NOT NULL, rolled_back INTEGER NOT NULL DEFAULT 0
);
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
CREATE VIEW IF NOT EXISTS placed AS
    SELECT group_id, version, length,
        CASE WHEN whose = 'kept' THEN
                CASE WHEN account = 'ready' THEN 'ready' WHEN version >= loss_from THEN 'trained'
                    ELSE 'withheld_' || coalesce(withheld, 'stale') END
            ELSE CASE account WHEN 'in_flight' THEN 'in_flight' WHEN 'discarded' THEN reason ELSE 'unused' END
        END AS account,
        CASE WHEN whose = 'kept' THEN kept ELSE generated - kept END AS tokens
    FROM sampled, (SELECT 'kept' AS whose UNION ALL SELECT 'rest')
    WHERE CASE WHEN whose = 'kept' THEN kept ELSE generated - kept END <> 0;
CREATE VIEW IF NOT EXISTS ledger AS
    SELECT version, length, account, tokens, tokens * CAST(length AS REAL) AS weight FROM placed
    UNION ALL SELECT version, length, account, tokens, weight FROM archive;
"""


def bucket(length: int) -> int:
    """The largest power of two that is at most `length`; 0 for 0."""
    return 1 << (length.bit_length() - 1) if length > 0 else 0
