"""The durable store: one SQLite file (WAL) that holds groups, episodes, trajectories and the clock.

Invariants:
- What was stored in one `save` is there whole or not at all; after SIGKILL of any process it is as of the last `save`.
- A trajectory's arrays are written once, with the delivery of its episode, and never changed; `shrink` may drop those that nobody
  can train on again.
- No token disappears from the file: what `shrink` drops as rows is in `archive` as sums.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import StoreError, WireError
from . import wire
from .group import Episode, Group
from .ledger import Counts
from .rules import Clock
from .schema import SCHEMA, SCHEMA_VERSION, bucket
from .trajectory import Outcome, Trajectory

T = TypeVar("T")

BUSY_S = 10.0
"""How long SQLite waits for another connection that holds the file."""

SETTLED = (
    "(state = 'discarded' OR (state = 'trained' AND trained_at <= :over))"
    " AND NOT EXISTS (SELECT 1 FROM episodes WHERE group_id = groups.id AND NOT settled)"
)
"""Groups that nothing can happen to any more; `:over` is the last version that is both served and in a checkpoint."""

GROUPS_AT_ONCE = 256
"""Groups that `shrink` drops in one transaction: more would keep the answers of a round waiting."""

SLACK = 0.9
"""`shrink` goes down to this share of the limit, so that it is not needed again at once."""


class CommitRow(msgspec.Struct, frozen=True):
    """The step that made `version`, at `time` (seconds since the epoch), from `groups` groups."""

    version: int
    time: float
    groups: int


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """Open the file; `mode` as in SQLite's URIs. Raises StoreError."""
    try:
        return sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=BUSY_S
        )
    except sqlite3.Error as error:
        raise StoreError(f"cannot open the buffer {path}: {error}") from None


class Store:
    """The only writer of one file. Every method raises StoreError when SQLite does, or when a row is not what was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db = connect(path, "rwc")
        try:
            found = self._db.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, SCHEMA_VERSION):
                raise StoreError(f"{path} has schema {found}, this program knows {SCHEMA_VERSION}")
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")  # what is acknowledged survives the host, too
            self._db.create_function("bucket", 1, bucket, deterministic=True)
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
            row = (msgspec.json.encode(clock).decode(),)
            self._db.execute("REPLACE INTO clock VALUES (0, ?)", row)
            for g in groups:
                self._db.execute(
                    "REPLACE INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (g.id, g.env, g.task, g.state, g.attempt, g.wish, g.leased_at, g.trained_at),
                )
                self._db.executemany(
                    "REPLACE INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
            self._undo()
            raise StoreError(f"cannot write the buffer {self.path}: {error}") from None

    def trajectories(self, group_id: int) -> list[Trajectory]:
        """All trajectories of a group that were kept, by member and branch."""
        return self._trajectories("group_id = ?", group_id)

    def episode(self, episode_id: str) -> list[Trajectory]:
        """The branches of one delivered episode."""
        return self._trajectories("episode_id = ?", episode_id)

    def _trajectories(self, where: str, value: object) -> list[Trajectory]:
        columns = "id, header, token_ids, loss_mask, behavior_logprobs"
        try:
            rows = self._db.execute(f"SELECT {columns} FROM trajectories WHERE {where}", (value,)).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"cannot read the buffer {self.path}: {error}") from None
        found = []
        for trajectory_id, *frames in rows:
            try:
                trajectory = wire.decode(Trajectory, frames)
                trajectory.check()
            except WireError as error:
                raise StoreError(f"the buffer {self.path} is damaged at trajectory {trajectory_id}: {error}") from None
            found.append(trajectory)
        return sorted(found, key=lambda t: (t.member, t.branch))

    def load(self) -> tuple[Clock, list[Group]]:
        """The clock, and by id every group that still matters: unfinished, rollable, not served yet, or with episodes that may
        still report."""
        try:
            row = self._db.execute("SELECT value FROM clock").fetchone()
            clock = self._json(row[0], Clock, "the clock") if row else Clock()
            over = min(clock.checkpointed, -1 if clock.served is None else clock.served)
            columns = "id, env, task, state, attempt, wish, leased_at, trained_at"
            wanted = f"SELECT {columns} FROM groups WHERE NOT ({SETTLED}) ORDER BY id"
            groups = {
                row[0]: Group(**dict(zip(columns.split(", "), row, strict=True)), episodes={})
                for row in self._db.execute(wanted, {"over": over})
            }
            ids = f"SELECT id FROM groups WHERE NOT ({SETTLED})"
            rows = self._db.execute(f"SELECT * FROM episodes WHERE group_id IN ({ids})", {"over": over}).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"cannot read the buffer {self.path}: {error}") from None
        for episode_id, group_id, worker, account, _, generated, kept, *flags, loss_from, reason, outcome in rows:
            what = f"episode {episode_id}"
            settled, final, late = map(bool, flags)
            groups[group_id].episodes[episode_id] = Episode(
                id=episode_id,
                worker=worker,
                account=account,
                generated=self._json(generated, Counts, what),
                kept=self._json(kept, Counts, what),
                settled=settled,
                final=final,
                late=late,
                loss_from=loss_from,
                reason=reason,
                outcome=self._json(outcome, Outcome, what) if outcome else None,
            )
        return clock, list(groups.values())

    def shrink(self, limit: int, over: int) -> bool:
        """Bring the file towards `limit` bytes: drop arrays of settled groups, the oldest first, then make archived sums of their
        rows. Does a part at a time; returns whether there is more to do and something left to drop.

        Args:
            over: the last version that is both served and in a checkpoint.
        """
        if self._size() <= limit:
            return False
        arrays = f"SELECT id FROM groups WHERE {SETTLED} AND EXISTS {HELD} ORDER BY id LIMIT {GROUPS_AT_ONCE}"
        rows = f"SELECT id FROM groups WHERE {SETTLED} ORDER BY id LIMIT {GROUPS_AT_ONCE}"
        try:
            self._db.execute("CREATE TEMP TABLE IF NOT EXISTS leaving (id INTEGER PRIMARY KEY)")
            self._db.execute("BEGIN IMMEDIATE")
            left = 0
            for chosen, drop in ((arrays, DROP_ARRAYS), (rows, DROP_ROWS)):
                self._db.execute("DELETE FROM leaving")
                left = self._db.execute(f"INSERT INTO leaving {chosen}", {"over": over}).rowcount
                if left:
                    for statement in drop:
                        self._db.execute(statement)
                    break
            self._db.execute("COMMIT")
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
            return left > 0 and self._size() > SLACK * limit
        except sqlite3.Error as error:
            self._undo()
            raise StoreError(f"cannot write the buffer {self.path}: {error}") from None

    def _size(self) -> int:
        """Bytes of the file that are in use."""
        page, pages, free = (
            self._db.execute(f"PRAGMA {what}").fetchone()[0] for what in ("page_size", "page_count", "freelist_count")
        )
        return page * (pages - free)

    def _undo(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _json(self, text: str, kind: type[T], what: str) -> T:
        try:
            return msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise StoreError(f"the buffer {self.path} is damaged at {what}: {error}") from None


HELD = "(SELECT 1 FROM trajectories WHERE group_id = groups.id AND token_ids IS NOT NULL)"
LEAVING = "(SELECT id FROM leaving)"

DROP_ARRAYS = (
    f"UPDATE trajectories SET token_ids = NULL, loss_mask = NULL, behavior_logprobs = NULL WHERE group_id IN {LEAVING}",
)
DROP_ROWS = (
    "INSERT INTO archive SELECT version, bucket(length), account, sum(tokens) FROM placed"
    f" WHERE group_id IN {LEAVING} GROUP BY 1, 2, 3"
    " ON CONFLICT DO UPDATE SET tokens = tokens + excluded.tokens",
    f"DELETE FROM trajectories WHERE group_id IN {LEAVING}",
    f"DELETE FROM episodes WHERE group_id IN {LEAVING}",
    f"DELETE FROM groups WHERE id IN {LEAVING}",
)


def _episode_row(group_id: int, e: Episode) -> tuple[object, ...]:
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
        e.late,
        e.loss_from,
        e.reason,
        msgspec.json.encode(e.outcome).decode() if e.outcome else None,
    )
