"""`bench sandbox` measures every row on each kind of sandbox, here with as little as possible."""

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
