"""`slipstream bench buffer`: what the buffer's parts can do alone and one behind the other: the frames of trajectories through bare
ZeroMQ, into a bare SQLite file, and through the one into the other.

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

import msgspec
import zmq

from ..buffer import messages as m
from ..buffer.encoded import EncodedTrajectory
from ..buffer.messages import Lease
from ..buffer.schema import connect
from ..buffer.store import Store
from ..buffer.trajectory import FINISHED
from ..rpc import wire
from ..rpc.server import BACKLOG
from .buffer_traffic import BUFFER, Count, Crew, Round, Took
from .buffer_trajectories import KINDS, sampled, stamped

POLL_MS = 20

ZEROMQ_BACKLOG = 1000
"""Messages of one connection that wait at each end, by libzmq's own choice."""

DRAIN_S = 0.5
"""For what is still on its way when a round is over: libzmq aborts a process that drops half of a message."""


async def through_zeromq(crew: Crew, this: Round, producers: int) -> Took:
    """The messages of deliveries from `producers` processes into one, which drops them."""
    seconds = this.until + DRAIN_S - time.monotonic()
    took, _ = await asyncio.gather(
        crew.in_learner(seconds, receive, this), crew.in_producers(producers, seconds, send, this, ZEROMQ_BACKLOG)
    )
    return took


async def through_zeromq_into_sqlite(crew: Crew, this: Round, producers: int, per_transaction: int) -> Took:
    """The messages of deliveries from `producers` processes into one, which inserts their frames into a file."""
    seconds = this.until + DRAIN_S - time.monotonic()
    backlog = max(1, BACKLOG // producers)  # all that waits leaves within `DRAIN_S`
    took, sent = await asyncio.gather(
        crew.in_buffer(seconds, receive_and_insert, this, backlog, per_transaction),
        crew.in_producers(producers, seconds, send, this, backlog),
    )
    return msgspec.structs.replace(took, cores={**took.cores, "producers": sum(one.cores["producers"] for one in sent)})


async def into_sqlite(crew: Crew, this: Round, per_transaction: int) -> Took:
    """The rows of deliveries into a file."""
    return await crew.in_buffer(this.until - time.monotonic(), insert, this, per_transaction)


def send(this: Round, backlog: int, number: int) -> Took:
    """Push messages until the round is over; at most `backlog` wait to leave."""
    messages = [delivery(this.tokens, kind) for kind in range(KINDS)]
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, int(1000 * DRAIN_S))
    socket.setsockopt(zmq.SNDTIMEO, POLL_MS)
    socket.setsockopt(zmq.SNDHWM, backlog)
    socket.connect(this.address)
    count = Count(this.counts_from, "producers")
    try:
        for frames in itertools.cycle(messages):
            if time.monotonic() >= this.until:
                break
            try:
                socket.send_multipart(frames, copy=False)
                count.add(1)
            except zmq.Again:
                continue
        return count.took()
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


def receive_and_insert(this: Round, backlog: int, per_transaction: int) -> Took:
    """Pull messages, and insert their frames, until the round is over."""
    db = bare_table(this.path)
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVTIMEO, POLL_MS)
    socket.setsockopt(zmq.RCVHWM, backlog)
    socket.bind(this.address)
    count, lot = Count(this.counts_from, "SQLite"), list[list[memoryview]]()
    took = count.took()
    try:
        while (now := time.monotonic()) < this.until + DRAIN_S:
            try:
                lot.append([frame.buffer for frame in socket.recv_multipart(copy=False)])
            except zmq.Again:
                continue
            if now >= this.until:
                lot.clear()  # it is received only so that its sender can end
            elif len(lot) == per_transaction:
                insert_rows(db, lot)
                count.add(len(lot))
                lot.clear()
                took = count.took()
        return took
    finally:
        context.destroy()
        db.close()


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
