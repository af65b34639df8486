"""The floors of `bench buffer` store and send the frames that a trajectory has today; what a process counts, and what it spends."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from slipstream.benchmarks.buffer_floors import (
    bare_table,
    delivery,
    encoded,
    insert_rows,
    receive_and_insert,
    send,
)
from slipstream.benchmarks.buffer_traffic import LONGER, Count, Round, Rounds, Took
from slipstream.buffer import messages as m
from slipstream.buffer.schema import connect
from slipstream.errors import DeadlineExceeded
from slipstream.launch.launchers.local import free_ports
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


def test_the_floor_of_both_inserts_what_a_producer_sends(tmp_path: Path) -> None:
    """Until the round is over; what is left is received, so that the producer ends. A round of a busy machine has to be longer."""
    delivery(1000, 0)  # its trajectory is made before the first round
    for seconds in (0.3, 2.0, 8.0, 32.0):
        path, now = tmp_path / f"{seconds}.sqlite", time.monotonic()
        this = Round(f"tcp://127.0.0.1:{free_ports(1)[0]}", "", path, 1000, 1, now, now + seconds)
        producer = threading.Thread(target=send, args=(this, 4, 0))
        producer.start()
        took = receive_and_insert(this, 4, 2)
        producer.join()
        if took.trajectories:
            break
    db = connect(path, "ro")
    rows, arrays = db.execute("SELECT count(*), sum(length(arrays)) FROM bare").fetchone()
    db.close()
    assert rows == took.trajectories + 2 > 2  # the count begins after the first transaction
    assert arrays == 9000 * rows


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


async def test_a_round_in_which_nothing_is_counted_is_followed_by_a_longer_one(tmp_path: Path) -> None:
    lasted = list[float]()

    async def measured(this: Round) -> Took:
        lasted.append(this.until - this.counts_from)
        return Took(7 if len(lasted) == wanted else 0, 1.0)

    rounds, wanted = Rounds(tmp_path), 3
    assert (await rounds.count(8, 0.5, measured)).trajectories == 7
    assert lasted == pytest.approx([0.5, 1.0, 2.0])
    lasted, wanted = [], 0
    with pytest.raises(DeadlineExceeded, match=r"the benchmark waited 8 s for a second lot of trajectories"):
        await rounds.count(8, 0.5, measured)
    assert len(lasted) == LONGER
