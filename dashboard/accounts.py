"""The dashboard's page of the token ledger: the tokens of a run by account, version and length, by the store's own views, a part at
a time.

Invariants:
- Groups that can no longer change are summed up once and kept in memory; a request reads only the others.
- A query has the groups of one part, so that none is long.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from ..buffer.retention import SETTLED
from .store import ReadConnection, StoreReader

PART = 128  # groups of one query: a few thousand episodes
SUMS = "SELECT version, bucket(length), account, sum(tokens) FROM accounts WHERE group_id BETWEEN :first AND :last GROUP BY 1, 2, 3"
OPEN = f"SELECT count(*) FROM groups WHERE id BETWEEN :first AND :last AND NOT ({SETTLED})"
ARCHIVE = "SELECT version, length, account, sum(tokens) FROM archive GROUP BY 1, 2, 3"
Sums = Counter[tuple[int, int, str]]  # (version, length bucket, account) -> tokens


class TokenAccounts:
    """Of one run; from any thread."""

    def __init__(self, store: StoreReader) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._settled: dict[int, Sums] = {}  # by the number of the part
        self._archive: Sums = Counter()

    def read(self) -> dict[str, Any]:
        """Tokens by account, and by account of each length and version. Raises StoreError."""
        with self._lock, self._store.open() as db:
            total = self._read(db)
        by_account: Counter[str] = Counter()
        by_length: dict[int, Counter[str]] = {}
        by_version: dict[int, Counter[str]] = {}
        for (version, length, account), tokens in total.items():
            by_account[account] += tokens
            by_length.setdefault(length, Counter())[account] += tokens
            by_version.setdefault(version, Counter())[account] += tokens
        return {
            "generated": sum(by_account.values()),
            "accounts": dict(by_account.most_common()),
            "by_length": [{"length": length, "accounts": dict(found)} for length, found in sorted(by_length.items())],
            "by_version": [
                {"version": version, "accounts": dict(found)} for version, found in sorted(by_version.items())
            ],
        }

    def _read(self, db: ReadConnection) -> Sums:
        archive: Sums = Counter({(v, n, a): tokens for v, n, a, tokens in db.all(ARCHIVE)})
        if archive != self._archive:
            self._archive, self._settled = archive, {}  # rows became sums: parts have fewer tokens than they had
        counters = db.counters()
        settled = counters.settled if counters else -1
        total = Counter(archive)
        bounds = db.one("SELECT min(id), max(id) FROM groups")
        if bounds is None or bounds[0] is None:
            return total
        begun = db.newest_group()
        for part in range(bounds[0] // PART, bounds[1] // PART + 1):
            sums = self._settled.get(part)
            if sums is None:
                groups = {"first": part * PART, "last": (part + 1) * PART - 1}
                sums = Counter({(v, n, a): tokens for v, n, a, tokens in db.all(SUMS, **groups)})
                (still_open,) = db.one(OPEN, **groups, settled=settled) or (1,)
                if not still_open and begun > groups["last"]:
                    self._settled[part] = sums
            total.update(sums)
        return total
