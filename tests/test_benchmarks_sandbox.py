"""`bench sandbox` measures every row on each kind of sandbox, here with as little as possible."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from slipstream.benchmarks import sandbox


async def test_every_row_of_every_kind(tmp_path, monkeypatch):
    for name, value in {"AT_ONCE": 3, "ROUNDS": 1, "CELLS": 3}.items():
        monkeypatch.setattr(sandbox, name, value)
    results = await sandbox.sandbox(tmp_path)
    measured = [result for result in results if result.rows]
    assert measured
    for result in measured:
        assert [row.name for row in result.rows] == ["one", "3 at once", "3 ready", "a cell", "a command"]
        assert all(row.contender > 0 and row.floor > 0 for row in result.rows)
    assert len(results) == 2


LIMITS_MS = {"64 at once": (1500.0, 280.0), "64 ready": (50.0, 280.0), "a cell": (2.0, 12.0)}
"""What bubblewrap was to keep on two cores, and what the same bare processes take there while nothing else runs."""


@pytest.mark.full
async def test_bubblewrap_is_as_fast_as_it_was_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the best of a few rounds. A machine on which bare processes take longer, too, has as much more time."""
    monkeypatch.setattr(sandbox, "KINDS", ("bubblewrap",))
    monkeypatch.setattr(sandbox, "ROUNDS", 1)
    best = dict.fromkeys(LIMITS_MS, math.inf)
    for _ in range(4):
        (result,) = await sandbox.sandbox(tmp_path)
        for row in result.rows:
            if row.name in best:
                limit, bare = LIMITS_MS[row.name]
                best[row.name] = min(best[row.name], row.contender / max(1.0, row.floor / bare) / limit)
        if max(best.values()) <= 1:
            return
    pytest.fail(f"of their limits these took {best}")
