"""The token ledger of a buffer's file, by SQL over its rows: independent of the running sums of the state machine.

Invariants:
- Only reads; the run may be active. Everything returned by one call is of one instant.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import StoreError
from .ledger import Ledger, total_of
from .schema import connect, require_schema
from .segments import read_arrays, segments_path, starts_of
from .trajectory import LENGTH_LIMIT, TOKEN_BYTES

T = TypeVar("T")
# Episodes that contradict themselves: in no account, of another length than their tokens, with more tokens of a version
# kept than generated, or with arrays, while they are there, that hold another number of sampled tokens.
MISCOUNTED = """
SELECT count(*) FROM episodes e WHERE account NOT IN ('in_flight', 'ready', 'trained', 'discarded')
    OR length <> (SELECT coalesce(sum(value), 0) FROM json_each(e.generated))
    OR account IN ('ready', 'trained') AND (
        EXISTS (SELECT 1 FROM json_each(e.kept) AS k
            WHERE k.value > coalesce((SELECT value FROM json_each(e.generated) AS g WHERE g.key = k.key), 0))
        OR (SELECT coalesce(sum(value), 0) FROM json_each(e.kept)) <> (
            SELECT CASE WHEN count(*) > count(sampled) THEN (SELECT coalesce(sum(value), 0) FROM json_each(e.kept))
                ELSE coalesce(sum(sampled), 0) END
            FROM (SELECT sampled_tokens(arrays, length) AS sampled FROM trajectories WHERE episode_id = e.id LIMIT -1)))
"""
# An episode whose counts are damaged.
UNREADABLE = """
SELECT id FROM episodes WHERE NOT (json_valid(generated) AND json_valid(kept)) LIMIT 1
"""


class LedgerReport(msgspec.Struct, frozen=True):
    """A run's tokens."""

    total: Ledger  # all of them
    by_version: dict[int, Ledger]  # policy version -> its ledger
    by_length: dict[int, Ledger]  # an episode's tokens, rounded down to a power of two -> the ledger of such episodes
    generated_length: float  # mean length of an episode, over generated tokens
    # The same over tokens that carried loss; None before the first step. Where it is smaller, long episodes are
    # discarded more often.
    trained_length: float | None
    miscounted: int  # episodes whose rows or arrays contradict the ledger

    @property
    def balances(self) -> bool:
        """Whether every generated token is in an account, for each version, and no row contradicts the ledger."""
        return self.miscounted == 0 and all(ledger.balances for ledger in self.by_version.values())

    def to_builtins(self) -> dict[str, object]:
        """For JSON: the accounts of `total`, then everything else by its name; `closes` is `balances`."""
        values = msgspec.to_builtins(self, str_keys=True)
        return {**values.pop("total"), **values, "closes": self.balances}


def ledger_report(path: Path) -> LedgerReport:
    """The ledger of a buffer file.

    Raises:
        StoreError: there is no such file, it is not a buffer of this version, or a row of it is damaged.
    """
    return _read(path, _report)


def ledgers_by_version(path: Path) -> dict[int, Ledger]:
    """Policy version -> its ledger. Raises as `ledger_report`."""
    return _read(path, lambda db: _ledgers(db, "version"))


def _read(path: Path, query: Callable[[sqlite3.Connection], T]) -> T:
    if not path.exists():
        raise StoreError(f"there is no buffer at {path}")
    db = connect(path, "ro")
    try:
        require_schema(db, path)
        db.create_function("sampled_tokens", 2, _counter_of(segments_path(path)))
        db.execute("BEGIN")  # all queries see one state
        damaged = db.execute(UNREADABLE).fetchone()
        if damaged:
            raise StoreError(f"the buffer {path} is damaged at episode {damaged[0]}: its counts are not JSON")
        return query(db)
    except sqlite3.Error as error:
        raise StoreError(f"cannot read the buffer {path}: {error}") from None
    finally:
        db.close()


def _counter_of(folder: Path) -> Callable[[object, object], int | None]:
    """A function that counts the sampled tokens of arrays by their position and length; None where they are gone."""
    starts = starts_of(folder)

    def sampled_tokens(position: object, length: object) -> int | None:
        if not (
            isinstance(position, int)
            and isinstance(length, int)
            and 0 <= position < 1 << 62
            and 0 < length <= LENGTH_LIMIT
        ):
            return None
        mask = read_arrays(folder, starts, position + (TOKEN_BYTES - 1) * length, length)
        return len(mask) - mask.count(0) if mask else None

    return sampled_tokens


def _report(db: sqlite3.Connection) -> LedgerReport:
    by_version = _ledgers(db, "version")
    return LedgerReport(
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
