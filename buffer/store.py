"""The durable store: one SQLite file (WAL) that holds groups, episodes, trajectories and the version clock.

Invariants:
- What was stored in one `save` is there whole or not at all; after SIGKILL of any process it is as of the last `save`.
- A trajectory's arrays are written once, with the delivery of its episode, and never changed.
- The ledger of a file is a query over its episodes (`ledger_of`), independent of the running totals of the state machine.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..errors import StoreError
from . import wire
from .ledger import Ledger
from .replay import Episode, Group
from .trajectory import Outcome, Trajectory

SCHEMA_VERSION = 2
"""Raise it when the tables, or the headers of trajectories in them (`wire.FORMAT`), change."""

BUSY_S = 10.0
"""How long SQLite waits for another connection that holds the file."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS clock (
    id INTEGER PRIMARY KEY CHECK (id = 0),
    version INTEGER NOT NULL,      -- policy version of the learner
    served INTEGER,                -- policy version of the engines
    next_group INTEGER NOT NULL,   -- dataset cursor
    recovered_from INTEGER,        -- version of the checkpoint that `version` was recovered from, until the next commit
    checkpointed INTEGER NOT NULL  -- commits up to here are in a checkpoint
);
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY, state TEXT NOT NULL, attempt INTEGER NOT NULL, worker TEXT NOT NULL,
    wish TEXT NOT NULL, leased_at INTEGER NOT NULL, trained_at INTEGER
);
CREATE TABLE IF NOT EXISTS episodes (
    id TEXT PRIMARY KEY, group_id INTEGER NOT NULL REFERENCES groups, account TEXT NOT NULL, generated INTEGER NOT NULL,
    sampled INTEGER NOT NULL, trained INTEGER NOT NULL, reason TEXT NOT NULL, settled INTEGER NOT NULL,
    by_version TEXT NOT NULL, outcome TEXT  -- JSON: [[version, sampled tokens], ...], and the outcome
);
CREATE INDEX IF NOT EXISTS episodes_of_group ON episodes (group_id);
CREATE TABLE IF NOT EXISTS trajectories (
    id TEXT PRIMARY KEY, episode_id TEXT NOT NULL REFERENCES episodes, group_id INTEGER NOT NULL, reward REAL NOT NULL,
    header BLOB NOT NULL, token_ids BLOB NOT NULL, loss_mask BLOB NOT NULL, behavior_logprobs BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS trajectories_of_group ON trajectories (group_id);
CREATE INDEX IF NOT EXISTS trajectories_of_episode ON trajectories (episode_id);
CREATE TABLE IF NOT EXISTS commits (
    version INTEGER PRIMARY KEY, time REAL NOT NULL, groups INTEGER NOT NULL, rolled_back INTEGER NOT NULL DEFAULT 0
);
"""


MATTERS = (
    "(state NOT IN ('trained', 'discarded') OR trained_at > ?"
    " OR EXISTS (SELECT 1 FROM episodes WHERE group_id = groups.id AND NOT settled))"
)
"""What `load` brings back of `groups`: all but what `Replay.forget` would drop."""


class Clock(msgspec.Struct, frozen=True):
    """The state machine's own numbers; see the columns of the same names."""

    version: int = 0
    served: int | None = None
    next_group: int = 0
    recovered_from: int | None = None
    checkpointed: int = 0


class CommitRow(msgspec.Struct, frozen=True):
    """The step that made `version`, at `time` (seconds since the epoch), from `groups` groups."""

    version: int
    time: float
    groups: int


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    try:
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=BUSY_S
        )
    except sqlite3.Error as error:
        raise StoreError(f"cannot open the buffer {path}: {error}") from None


class Store:
    """The only writer of one file. Every method raises StoreError when SQLite does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = _connect(path, "rwc")
        try:
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, SCHEMA_VERSION):
                raise StoreError(f"{path} has schema {found}, this program knows {SCHEMA_VERSION}")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(SCHEMA)
            self._db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        except StoreError:
            self._db.close()
            raise
        except sqlite3.Error as error:
            self._db.close()
            raise StoreError(f"cannot prepare the buffer {path}: {error}") from None

    def close(self) -> None:
        self._db.close()

    def save(
        self,
        clock: Clock,
        groups: Iterable[Group],
        trajectories: Iterable[tuple[str, Trajectory]] = (),
        commits: Iterable[CommitRow] = (),
        rolled_back_to: int | None = None,
    ) -> None:
        """Store in one transaction what changed: groups with all their episodes, new trajectories with the ids of their
        episodes, new commits, and that the commits after `rolled_back_to`, these included, no longer count."""
        try:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("REPLACE INTO clock VALUES (0, ?, ?, ?, ?, ?)", msgspec.structs.astuple(clock))
            for g in groups:
                self._db.execute(
                    "REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?)",
                    (g.id, g.state, g.attempt, g.worker, g.wish, g.leased_at, g.trained_at),
                )
                self._db.executemany(
                    "REPLACE INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [_episode_row(g.id, e) for e in g.episodes.values()],
                )
            self._db.executemany(
                "INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(t.id, episode_id, t.group_id, t.reward, *wire.encode(t)) for episode_id, t in trajectories],
            )
            rows = [msgspec.structs.astuple(commit) for commit in commits]
            self._db.executemany("INSERT INTO commits VALUES (?, ?, ?, 0)", rows)
            if rolled_back_to is not None:
                self._db.execute("UPDATE commits SET rolled_back = 1 WHERE version > ?", (rolled_back_to,))
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise StoreError(f"cannot write the buffer {self.path}: {error}") from None

    def trajectories(self, group_id: int) -> list[Trajectory]:
        """All trajectories of a group that were kept, by member and branch."""
        return self._trajectories("group_id = ?", group_id)

    def episode(self, episode_id: str) -> list[Trajectory]:
        """The branches of one delivered episode."""
        return self._trajectories("episode_id = ?", episode_id)

    def _trajectories(self, where: str, value: object) -> list[Trajectory]:
        try:
            rows = self._db.execute(
                "SELECT header, token_ids, loss_mask, behavior_logprobs FROM trajectories WHERE " + where,
                (value,),
            ).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"cannot read the buffer {self.path}: {error}") from None
        return sorted((wire.decode(Trajectory, row) for row in rows), key=lambda t: (t.member, t.branch))

    def load(self) -> tuple[Clock, list[Group]]:
        """The clock, and every group that still matters: unfinished, rollable, not served yet, or with episodes that may still
        report."""
        try:
            row = self._db.execute(
                "SELECT version, served, next_group, recovered_from, checkpointed FROM clock"
            ).fetchone()
            clock = Clock(*row) if row else Clock()
            settled_at = min(clock.checkpointed, -1 if clock.served is None else clock.served)
            columns = "id, state, attempt, worker, wish, leased_at, trained_at"
            groups = {
                row[0]: Group(**dict(zip(columns.split(", "), row, strict=True)), episodes={})
                for row in self._db.execute(f"SELECT {columns} FROM groups WHERE {MATTERS}", (settled_at,))
            }
            rows = self._db.execute(
                f"SELECT * FROM episodes WHERE group_id IN (SELECT id FROM groups WHERE {MATTERS})", (settled_at,)
            ).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"cannot read the buffer {self.path}: {error}") from None
        for episode_id, group_id, account, generated, _, trained, reason, settled, by_version, outcome in rows:
            groups[group_id].episodes[episode_id] = Episode(
                id=episode_id,
                account=account,
                generated=generated,
                by_version=msgspec.json.decode(by_version, type=tuple[tuple[int, int], ...]),
                settled=bool(settled),
                trained=trained,
                reason=reason,
                outcome=msgspec.json.decode(outcome, type=Outcome) if outcome else None,
            )
        return clock, list(groups.values())


def _episode_row(group_id: int, e: Episode) -> tuple[object, ...]:
    by_version = msgspec.json.encode(e.by_version).decode()
    outcome = msgspec.json.encode(e.outcome).decode() if e.outcome else None
    return (e.id, group_id, e.account, e.generated, e.sampled, e.trained, e.reason, e.settled, by_version, outcome)


def ledger_of(path: Path) -> Ledger:
    """The ledger of a buffer file, by SQL over its episodes; the run may be going on.

    Raises:
        StoreError: there is no such file, or it is not a buffer.
    """
    if not path.exists():
        raise StoreError(f"there is no buffer at {path}")
    db = _connect(path, "ro")
    try:
        db.execute("BEGIN")  # both queries see one state
        sums = db.execute(
            "SELECT coalesce(sum(generated), 0),"
            " coalesce(sum(generated) FILTER (WHERE account = 'in_flight'), 0),"
            " coalesce(sum(sampled) FILTER (WHERE account = 'ready'), 0),"
            " coalesce(sum(trained) FILTER (WHERE account = 'trained'), 0),"
            " coalesce(sum(sampled - trained) FILTER (WHERE account = 'trained'), 0) FROM episodes"
        ).fetchone()
        reasons = db.execute(
            "SELECT reason, sum(generated) FROM episodes"
            " WHERE account = 'discarded' GROUP BY reason HAVING sum(generated) > 0 ORDER BY reason"
        ).fetchall()
    except sqlite3.Error as error:
        raise StoreError(f"{path} is not a buffer: {error}") from None
    finally:
        db.close()
    return Ledger(*sums, discarded=dict(reasons))
