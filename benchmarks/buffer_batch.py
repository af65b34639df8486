"""`slipstream bench buffer`: how long a learner waits for its batch, and what the buffer's process holds when very many
trajectories went through it.

    latency    from the call of the last delivery that a batch needs, to the batch in the learner's hands
    its floor  the same message to a bare socket, one row into bare SQLite, an empty message back, and the batch's bytes read from
               a file

Invariants:
- The learner's request waits at the service before the last delivery begins.
- Memory is that of the process as the kernel counts it (resident), sampled as batches are committed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import msgspec
import uvloop
import zmq

from ..buffer.messages import Lease
from ..buffer.segments import segments_path
from ..buffer.trajectory import FINISHED
from ..rpc import wire
from .buffer_floors import bare_table, delivery, encoded, insert_rows
from .buffer_traffic import BUFFER, Crew, Round, produce, publishing_fleet, serve, take_batches
from .buffer_trajectories import sampled, stamped

TURNS = 6
"""Batches in a round."""

WAIT_MS = 30_000


async def buffer_latency(crew: Crew, this: Round) -> list[float]:
    """Seconds of each of `TURNS` batches."""
    seconds = this.until - time.monotonic()
    serving = asyncio.ensure_future(crew.in_buffer(seconds, serve, this))
    try:
        return await crew.in_learner(seconds, await_batches, this)
    finally:
        os.kill(crew.buffer_pid, signal.SIGTERM)
        await serving


async def floor_latency(crew: Crew, this: Round) -> list[float]:
    """Seconds of each of `TURNS` batches."""
    seconds = this.until - time.monotonic()
    waited, _ = await asyncio.gather(crew.in_learner(seconds, ask, this), crew.in_buffer(seconds, answer, this))
    return waited


def await_batches(this: Round) -> list[float]:
    return uvloop.run(_await_batches(this))


async def _await_batches(this: Round) -> list[float]:
    waited = []

    async def deliver(lease: Lease, member: int) -> None:
        trajectory = stamped(this.tokens, lease, member)
        generated = {lease.version: sampled(this.tokens)}
        await worker.deliver(trajectory.episode, generated, FINISHED, (trajectory,))

    async with (
        this.client("worker-0") as worker,
        this.client("learner-0") as learner,
        publishing_fleet(this.fleet) as served,
    ):
        await worker.register()
        served(0)
        for version in range(TURNS):
            leases = [await worker.lease() for _ in range(this.groups)]
            *most, last = [(lease, member) for lease in leases for member in lease.members]
            await asyncio.gather(*(deliver(*episode) for episode in most))
            async with asyncio.TaskGroup() as tasks:
                taking = tasks.create_task(learner.take(version, WAIT_MS / 1e3))
                await asyncio.sleep(0)
                await learner.stats()  # answered after the request for the batch was read
                began = time.perf_counter()
                tasks.create_task(deliver(*last))
                await taking
                waited.append(time.perf_counter() - began)
            await learner.commit(version)
            served(version + 1)
    return waited


def ask(this: Round) -> list[float]:
    """Send the last delivery, and read the batch as soon as it is answered."""
    message, waited = delivery(this.tokens, 0), []
    sizes = [len(frame) for frame in wire.encode(encoded(this.tokens, 0))] * this.groups * BUFFER.group_size
    context = zmq.Context()
    socket = _pair(context)
    socket.connect(this.address)
    try:
        for _ in range(TURNS):
            began = time.perf_counter()
            socket.send_multipart(message, copy=False)
            socket.recv()
            with _batch(this).open("rb", buffering=0) as file:
                rows = [file.read(size) for size in sizes]
            waited.append(time.perf_counter() - began)
            assert sum(map(len, rows)) == sum(sizes)
        return waited
    finally:
        context.destroy()


def answer(this: Round) -> None:
    """Receive a delivery, insert its row, answer."""
    _batch(this).write_bytes(b"".join(wire.encode(encoded(this.tokens, 0))) * this.groups * BUFFER.group_size)
    db = bare_table(this.path)
    context = zmq.Context()
    socket = _pair(context)
    socket.bind(this.address)
    try:
        for _ in range(TURNS):
            insert_rows(db, [socket.recv_multipart()])
            socket.send(b"")
        socket.close(linger=WAIT_MS)
        context.term()
    finally:
        context.destroy()
        db.close()


def _batch(this: Round) -> Path:
    return this.path.with_name("batch")


def _pair(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    return socket


# --- memory ---------------------------------------------------------------------------------------------------------


class Memory(msgspec.Struct, frozen=True):
    """After so many `trajectories`: bytes resident in the service's process, and of its file."""

    trajectories: int
    resident: int
    file: int


async def buffer_memory(crew: Crew, this: Round, producers: int) -> list[Memory]:
    """Samples while trajectories go through the service, one for each batch."""
    seconds = this.until - time.monotonic()
    samples, _, _ = await asyncio.gather(
        crew.in_learner(seconds, watch, this, crew.buffer_pid),
        crew.in_buffer(seconds, serve, this),
        crew.in_producers(producers, seconds, produce, this),
    )
    return samples


def watch(this: Round, buffer_pid: int) -> list[Memory]:
    """Take and commit, and measure the service's process after every batch."""
    samples = list[Memory]()

    def look(taken: int) -> None:
        pages = int(Path(f"/proc/{buffer_pid}/statm").read_text().split()[1])
        samples.append(Memory(taken, pages * os.sysconf("SC_PAGE_SIZE"), _size(this.path)))

    uvloop.run(take_batches(this, look))
    return samples


def _size(path: Path) -> int:
    """Bytes of the service's files; what goes while we look counts for nothing."""
    found = 0
    for file in (path, *segments_path(path).iterdir()):
        with contextlib.suppress(FileNotFoundError):
            found += file.stat().st_size
    return found
