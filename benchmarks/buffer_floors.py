"""What the buffer's parts can do alone: the frames of trajectories through bare ZeroMQ, and into a bare SQLite file.

Invariants:
- The bytes are those that the buffer receives and stores: `wire.encode` of the same trajectories, encoded beforehand.
- Nothing is decoded, checked, answered or read back.
- SQLite is as it comes (pages of 4 KiB), made durable as the store's rows are (WAL, synchronous=FULL), with transactions as large
  as the service's and a table without an index.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import zmq

from ..buffer import messages as m
from ..buffer.messages import Lease
from ..buffer.schema import connect
from ..buffer.store import Store
from ..buffer.trajectory import FINISHED, EncodedTrajectory
from ..rpc import wire
from .buffer_traffic import BUFFER, KINDS, Count, Crew, Round, Took, sampled, stamped

POLL_MS = 20

DRAIN_S = 0.5
"""For what is still on its way when a round is over: libzmq aborts a process that drops half of a message."""


async def through_zeromq(crew: Crew, this: Round, producers: int) -> Took:
    """The messages of deliveries from `producers` processes into one, which drops them."""
    seconds = this.until + DRAIN_S - time.monotonic()
    took, _ = await asyncio.gather(
        crew.in_learner(seconds, receive, this), crew.in_producers(producers, seconds, send, this)
    )
    return took


async def into_sqlite(crew: Crew, this: Round, per_transaction: int) -> Took:
    """The rows of deliveries into a file."""
    return await crew.in_buffer(this.until - time.monotonic(), insert, this, per_transaction)


def send(this: Round, number: int) -> int:
    """Push messages until the round is over; how many."""
    messages = [delivery(this.tokens, kind) for kind in range(KINDS)]
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, int(1000 * DRAIN_S))
    socket.setsockopt(zmq.SNDTIMEO, POLL_MS)
    socket.connect(this.address)
    sent = 0
    try:
        for frames in itertools.cycle(messages):
            if time.monotonic() >= this.until:
                return sent
            try:
                socket.send_multipart(frames, copy=False)
                sent += 1
            except zmq.Again:
                continue
        return sent
    finally:
        socket.close()
        context.term()


def receive(this: Round) -> Took:
    """Pull messages until the round is over."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVTIMEO, POLL_MS)
    socket.bind(this.address)
    count = Count(this.counts_from, "ZeroMQ")
    try:
        while (now := time.monotonic()) < this.until + DRAIN_S:
            try:
                socket.recv_multipart()
            except zmq.Again:
                continue
            if now < this.until:
                count.add(1)
        return count.took()
    finally:
        context.destroy()


def insert(this: Round, per_transaction: int) -> Took:
    """Insert rows until the round is over."""
    rows = [wire.encode(encoded(this.tokens, kind)) for kind in range(KINDS)]
    lot = [rows[i % KINDS] for i in range(per_transaction)]
    db = bare_table(this.path)
    count = Count(this.counts_from, "SQLite")
    while time.monotonic() < this.until:
        insert_rows(db, lot)
        count.add(len(lot))
    db.close()
    return count.took()


def encoded(tokens: int, kind: int) -> EncodedTrajectory:
    """What the store keeps of one trajectory."""
    return EncodedTrajectory.of(stamped(tokens, Lease(0, 0, (), 0, 0), kind))


def delivery(tokens: int, kind: int) -> list[wire.Frame]:
    """The frames of one delivery."""
    trajectory = stamped(tokens, Lease(kind, 0, (0,), 0, 0), kind % BUFFER.group_size)
    request = m.DeliverEpisode(
        "worker-0", trajectory.episode, {0: sampled(tokens)}, FINISHED, (EncodedTrajectory.of(trajectory),)
    )
    return wire.encode(m.Envelope(kind, request))


def bare_table(path: Path) -> sqlite3.Connection:
    """A file like the store's, with a table that holds frames."""
    Store(path).close()
    db = connect(path, "rw")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("CREATE TABLE bare (id INTEGER PRIMARY KEY, header, arrays)")
    return db


def insert_rows(db: sqlite3.Connection, rows: Sequence[Sequence[wire.Frame]]) -> None:
    """One transaction."""
    db.execute("BEGIN IMMEDIATE")
    db.executemany("INSERT INTO bare VALUES (NULL, ?, ?)", rows)
    db.execute("COMMIT")
