"""A store that is written while pages read it, and whose dashboard is killed, is the store that it would be alone."""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from slipstream.launch.run_lock import CONTROL, run_lock
from slipstream.tests.dashboard_runs import DashboardRun
from slipstream.tests.dashboards import Dashboard
from slipstream.tests.runs import WAIT_S

READERS = 3
VIEWS = ("now", "curves", "trajectories?sort=reward", "tokens", "timeline", "environments", "staleness")
STEPS = 120  # write more than twice what the WAL may hold
CHECKPOINT_PAGES = 1000  # after which SQLite writes its WAL back
PAGE = 4096


def written(run: DashboardRun, path: Path) -> int:
    """Write as a run does; the most bytes that its WAL had."""
    wal, largest = path.with_name("buffer.sqlite-wal"), 0
    for _ in range(STEPS):
        run.play()
        run.step()
        largest = max(largest, wal.stat().st_size)
    return largest


def digests(folder: Path) -> dict[str, str]:
    """Of the store's files, once it is closed."""
    paths = [folder / "buffer.sqlite", *sorted((folder / "buffer.arrays").iterdir())]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


@contextlib.contextmanager
def readers(url: str) -> Iterator[list[int]]:
    """Ask for every view, again and again; the number of answers that each got."""
    stop, answers = threading.Event(), [0] * READERS

    def look(number: int) -> None:
        while not stop.is_set():
            for view in VIEWS:
                try:
                    with urllib.request.urlopen(f"{url}api/runs/run/{view}", timeout=WAIT_S) as response:
                        assert response.status == 200
                        response.read()
                except OSError:  # the server was killed
                    return
                answers[number] += 1

    threads = [threading.Thread(target=look, args=(number,)) for number in range(READERS)]
    for thread in threads:
        thread.start()
    try:
        yield answers
    finally:
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()


@pytest.mark.full
def test_a_store_does_not_notice_who_reads_it(tmp_path: Path) -> None:
    alone, looked_at = DashboardRun(tmp_path / "alone" / "run"), DashboardRun(tmp_path / "looked_at" / "run")
    written(alone, alone.folder / "buffer.sqlite")
    alone.close()
    with run_lock(looked_at.folder):
        (looked_at.folder / CONTROL).write_text("{}")  # as of a run that goes on
        with Dashboard(looked_at.folder) as dashboard:
            with readers(dashboard.url) as answers:
                until = time.monotonic() + WAIT_S
                while min(answers) < len(VIEWS):
                    assert time.monotonic() < until, "no answers"
                    threading.Event().wait(0.01)
                largest = written(looked_at, looked_at.folder / "buffer.sqlite")
                during = sum(answers)
                dashboard.process.kill()
            assert during > READERS * len(VIEWS)
        # What a killed reader leaves keeps nothing from being written back.
        with contextlib.closing(sqlite3.connect(looked_at.folder / "buffer.sqlite", timeout=1.0)) as db:
            assert db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0
        (looked_at.folder / CONTROL).unlink()
    looked_at.close()
    assert largest < 1.5 * CHECKPOINT_PAGES * PAGE
    assert digests(looked_at.folder) == digests(alone.folder)
