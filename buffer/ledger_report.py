"""The token ledger of a buffer's files, by SQL over their rows: independent of the running sums of the state machine.

Invariants:
- Only reads; the run may be active. What is read of one file is of one instant. Of a buffer with shards the ledgers of all are
  added up, each of which balances by itself.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from ..errors import StoreError
from .ledger import Ledger, total_of
from .run_stores import read_mode, shard_paths
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


class _Report(NamedTuple):
    """Of one file; `generated` and `trained` are (sum over tokens of the length of their episodes, tokens)."""

    by_version: dict[int, Ledger]
    by_length: dict[int, Ledger]
    generated: tuple[float, int]
    trained: tuple[float, int]
    miscounted: int


def ledger_report(path: Path, *, active: bool = True) -> LedgerReport:
    """The ledger of the buffer whose file, or whose clock's file, is at `path`; `active` where a process may write to the run.

    Raises:
        StoreError: there is no such file, it is not a buffer of this version, or a row of it is damaged.
    """
    found = [_read(one, _report, active=active) for one in shard_paths(path)]
    by_version = _merged([one.by_version for one in found])
    return LedgerReport(
        total=total_of(by_version.values()),
        by_version=by_version,
        by_length=_merged([one.by_length for one in found]),
        generated_length=_mean([one.generated for one in found]) or 0.0,
        trained_length=_mean([one.trained for one in found]),
        miscounted=sum(one.miscounted for one in found),
    )


def ledgers_by_version(path: Path) -> dict[int, Ledger]:
    """Policy version -> its ledger. Raises as `ledger_report`."""
    return _read(path, lambda db: _ledgers(db, "version"))


def _read(path: Path, query: Callable[[sqlite3.Connection], T], *, active: bool = True) -> T:
    if not path.exists():
        raise StoreError(f"there is no buffer at {path}")
    db = connect(path, read_mode(path, active=active))
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


def _report(db: sqlite3.Connection) -> _Report:
    return _Report(
        by_version=_ledgers(db, "version"),
        by_length=_ledgers(db, "bucket(length)"),
        generated=_lengths(db, "1"),
        trained=_lengths(db, "account = 'trained'"),
        miscounted=db.execute(MISCOUNTED).fetchone()[0],
    )


def _merged(parts: Sequence[dict[int, Ledger]]) -> dict[int, Ledger]:
    """The sums of the ledgers that have the same key."""
    keys = sorted({key for part in parts for key in part})
    return {key: total_of(part[key] for part in parts if key in part) for key in keys}


def _mean(parts: Sequence[tuple[float, int]]) -> float | None:
    tokens = sum(tokens for _, tokens in parts)
    return sum(weight for weight, _ in parts) / tokens if tokens else None


def _ledgers(db: sqlite3.Connection, key: str) -> dict[int, Ledger]:
    ledgers: dict[int, Ledger] = {}
    generated = f"SELECT {key}, sum(generated) FROM sampled GROUP BY 1 UNION ALL SELECT {key}, sum(tokens) FROM archive GROUP BY 1"
    for name, tokens in db.execute(generated):
        ledgers.setdefault(name, Ledger()).generated += tokens
    for name, account, tokens in db.execute(f"SELECT {key}, account, sum(tokens) FROM ledger GROUP BY 1, 2"):
        ledgers.setdefault(name, Ledger()).add(account, tokens)
    return dict(sorted(ledgers.items()))


def _lengths(db: sqlite3.Connection, where: str) -> tuple[float, int]:
    return db.execute(f"SELECT total(weight), coalesce(sum(tokens), 0) FROM ledger WHERE {where}").fetchone()
