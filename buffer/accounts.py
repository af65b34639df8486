"""The accounts of a buffer's file, by SQL over its rows: independent of the running sums of the state machine.

Invariants:
- Only reads; the run may be going on. Everything returned by one call is of one instant.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import StoreError
from .ledger import Ledger, total_of
from .store import connect, require_schema

T = TypeVar("T")

MISCOUNTED = """
SELECT count(*) FROM episodes e WHERE account NOT IN ('in_flight', 'ready', 'trained', 'discarded')
    OR length <> (SELECT coalesce(sum(value), 0) FROM json_each(e.generated))
    OR account IN ('ready', 'trained') AND (
        EXISTS (SELECT 1 FROM json_each(e.kept) AS k
            WHERE k.value > coalesce((SELECT value FROM json_each(e.generated) AS g WHERE g.key = k.key), 0))
        OR (SELECT coalesce(sum(value), 0) FROM json_each(e.kept)) <> (
            SELECT CASE WHEN count(*) > count(loss_mask) THEN (SELECT coalesce(sum(value), 0) FROM json_each(e.kept))
                ELSE coalesce(sum(length(hex(loss_mask)) - length(replace(hex(loss_mask), '1', ''))), 0) END
            FROM trajectories t WHERE t.episode_id = e.id))
"""
"""Episodes that contradict themselves: in no account, of another length than their tokens, with more tokens of a version kept than
generated, or with arrays, while they are there, that hold another number of sampled tokens."""

UNREADABLE = """
SELECT id FROM episodes WHERE NOT (json_valid(generated) AND json_valid(kept)) LIMIT 1
"""
"""An episode whose counts are damaged."""


class Accounts(msgspec.Struct, frozen=True):
    """A run's tokens.

    Attributes:
        total: all of them.
        by_version: policy version -> its ledger.
        by_length: an episode's tokens, rounded down to a power of two -> the ledger of such episodes.
        generated_length: mean length of an episode, over generated tokens.
        trained_length: the same over tokens that carried loss; None before the first step. Where it is smaller, long episodes
            are filtered out.
        miscounted: episodes whose rows or arrays contradict their accounts.
    """

    total: Ledger
    by_version: dict[int, Ledger]
    by_length: dict[int, Ledger]
    generated_length: float
    trained_length: float | None
    miscounted: int

    @property
    def closes(self) -> bool:
        """Whether every generated token is in an account, for each version, and no row contradicts the accounts."""
        return self.miscounted == 0 and all(ledger.closes for ledger in self.by_version.values())

    def told(self) -> dict[str, object]:
        """As JSON: the accounts of `total`, then everything else by its name."""
        values = msgspec.to_builtins(self, str_keys=True)
        return {**values.pop("total"), **values, "closes": self.closes}


def accounts_of(path: Path) -> Accounts:
    """The accounts of a buffer file.

    Raises:
        StoreError: there is no such file, it is not a buffer of this version, or a row of it is damaged.
    """
    return _read(path, _accounts)


def ledgers_of(path: Path) -> dict[int, Ledger]:
    """Policy version -> its ledger. Raises as `accounts_of`."""
    return _read(path, lambda db: _ledgers(db, "version"))


def _read(path: Path, query: Callable[[sqlite3.Connection], T]) -> T:
    if not path.exists():
        raise StoreError(f"there is no buffer at {path}")
    db = connect(path, "ro")
    try:
        require_schema(db, path)
        db.execute("BEGIN")  # all queries see one state
        damaged = db.execute(UNREADABLE).fetchone()
        if damaged:
            raise StoreError(f"the buffer {path} is damaged at episode {damaged[0]}: its counts are not JSON")
        return query(db)
    except sqlite3.Error as error:
        raise StoreError(f"cannot read the buffer {path}: {error}") from None
    finally:
        db.close()


def _accounts(db: sqlite3.Connection) -> Accounts:
    by_version = _ledgers(db, "version")
    return Accounts(
        total=total_of(by_version.values()),
        by_version=by_version,
        by_length=_ledgers(db, "bucket(length)"),
        generated_length=_length(db, "1") or 0.0,
        trained_length=_length(db, "account = 'trained'"),
        miscounted=db.execute(MISCOUNTED).fetchone()[0],
    )


def _ledgers(db: sqlite3.Connection, key: str) -> dict[int, Ledger]:
    ledgers: dict[int, Ledger] = {}
    generated = f"SELECT {key}, sum(generated) FROM sampled GROUP BY 1 UNION ALL SELECT {key}, sum(tokens) FROM archive GROUP BY 1"
    for name, tokens in db.execute(generated):
        ledgers.setdefault(name, Ledger()).generated += tokens
    for name, account, tokens in db.execute(f"SELECT {key}, account, sum(tokens) FROM ledger GROUP BY 1, 2"):
        ledgers.setdefault(name, Ledger()).add(account, tokens)
    return dict(sorted(ledgers.items()))


def _length(db: sqlite3.Connection, where: str) -> float | None:
    return db.execute(f"SELECT sum(weight) / sum(tokens) FROM ledger WHERE {where}").fetchone()[0]
