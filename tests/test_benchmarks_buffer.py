"""The floors of `bench buffer` store and send the frames that a trajectory has today."""

from __future__ import annotations

from pathlib import Path

from slipstream.benchmarks.buffer_floors import bare_table, delivery, encoded, insert_rows
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
