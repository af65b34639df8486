"""A disk that takes no more, and a file that is damaged: the run stops with that one line, and what was accepted stays."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import time
from pathlib import Path

from slipstream.tests.runs import SMALL, Background, check_accounts, leftovers, metrics, query, slipstream

ENGINE = ("rollout.engine.kind=fake", "launch.heartbeat_s=10")
"""The learner, whose buffer is gone for good, has two thirds of that to end."""

ROOM = 128 << 10
"""Bytes that the buffer's files may still grow by: a few rounds of messages."""

PAGE = 4096
"""SQLite's page size."""

STOP_S = 60.0
"""A run that has lost its buffer stops in less, on a busy machine too."""


def test_a_full_disk_stops_the_run_once_and_by_name_and_it_can_be_resumed(policy: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = ("train", "quickstart", f"model.path={policy}", f"run.dir={run}", *SMALL, *ENGINE, "learner.steps=500")
    with Background(*arguments) as going:
        going.until_step(3)
        buffer = going.roles()["buffer"]
        limit = max(path.stat().st_size for path in run.glob("buffer.sqlite*")) + ROOM
        resource.prlimit(buffer.pid, resource.RLIMIT_FSIZE, (limit, limit))
        going.until(lambda: "buffer" not in going.roles(), "the end of the buffer")
        began = time.monotonic()
        output = going.output()
        assert time.monotonic() - began < STOP_S
        assert going.process.returncode == 1, output
    log = (run / "logs" / "buffer.log").read_text().splitlines()
    assert sum("StoreError: cannot write the buffer" in line for line in log) == 1, log
    assert "restart 1 of" not in output
    last = output.splitlines()[-1]
    assert last.startswith("slipstream: RoleDied: buffer ended with exit status 3: StoreError: cannot write the buffer")
    assert "disk I/O error" in last
    assert leftovers(run) == []
    check_accounts(run)
    reached = max(row["step"] for row in metrics(run))
    accepted = query(run, "SELECT id FROM trajectories")
    slipstream("resume", str(run), f"learner.steps={reached + 1}")
    check_accounts(run)
    assert set(accepted) <= set(query(run, "SELECT id FROM trajectories"))

    path = run / "buffer.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # or the write-ahead log would repair what is damaged here
    content = bytearray(path.read_bytes())
    content[2 * PAGE : 8 * PAGE] = b"\xff" * 6 * PAGE  # behind the header and the map of free pages: roots of tables
    path.write_bytes(content)
    before = len((run / "logs" / "buffer.log").read_text().splitlines())
    done = slipstream("resume", str(run), f"learner.steps={reached + 2}", check=False)
    assert done.returncode == 1, done.stderr
    reported = done.stderr.splitlines()[-1]
    assert reported.startswith("slipstream: RoleDied: buffer ended with exit status 3: StoreError: ")
    assert "malformed" in reported or "damaged" in reported
    assert "restart 1 of" not in done.stdout
    assert sum("StoreError" in line for line in (run / "logs" / "buffer.log").read_text().splitlines()[before:]) == 1
    assert leftovers(run) == []
