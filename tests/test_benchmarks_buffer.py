"""The floors of `bench buffer` store and send the frames that a trajectory has today; what a process counts, and what it spends."""

from __future__ import annotations

import time
from pathlib import Path

from slipstream.benchmarks.buffer_floors import bare_table, delivery, encoded, insert_rows
from slipstream.benchmarks.buffer_traffic import Count
from slipstream.buffer import messages as m
from slipstream.rpc import wire


def test_the_sqlite_floor_stores_the_frames_of_a_trajectory(tmp_path: Path) -> None:
    frames = wire.encode(encoded(1000, 0))
    db = bare_table(tmp_path / "floor.sqlite")
    insert_rows(db, [frames, delivery(1000, 0)])
    sizes = db.execute("SELECT length(arrays) FROM bare").fetchall()
    db.close()
    assert sizes == [(9000,), (9000,)]  # 9 bytes a token


def test_the_zeromq_floor_sends_a_delivery() -> None:
    envelope = wire.decode(m.Envelope, delivery(1000, 0))
    assert isinstance(envelope.message, m.DeliverEpisode)


def test_a_count_begins_with_the_measured_part_and_says_how_many_cores_its_process_kept_busy() -> None:
    cpu_s, began = time.process_time(), time.monotonic()
    count = Count(began, "SQLite")
    count.add(5)  # the lot during which the measured part began
    spent, counts = time.process_time() + 0.02, time.monotonic()
    while time.process_time() < spent:
        pass
    time.sleep(0.02)
    count.add(3)
    least_s = time.monotonic() - counts
    took = count.took()
    assert took.trajectories == 3
    busy = took.cores["SQLite"]
    assert 0.02 / (time.monotonic() - began) <= busy <= (time.process_time() - cpu_s) / least_s
