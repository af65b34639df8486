"""What `bench cluster` measures with: the CPU of another process, and how a cost grows with a number.

Invariants:
- The part that is measured is alone in its process; what it is asked comes from this one.
- A cost is CPU of all threads of that process, libzmq's included, so that a busy machine changes it little.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import AsyncIterator, Callable, Sequence
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from ..common.process import set_parent_death_signal
from ..errors import SlipstreamError, with_deadline
from .result import Row

READY_S = 120.0
END_S = 10.0

SOCKETS = 1 << 14
"""Of one context; libzmq's default is 1,023."""

Job = Callable[..., None]


class MeasuredProcess(msgspec.Struct, frozen=True):
    """A process that is measured, and the addresses at which it listens."""

    pid: int
    addresses: tuple[str, ...]

    def cpu_s(self) -> float:
        """Seconds of CPU that it has used so far: Linux names the CPU clock of a process by its id (clock_getcpuclockid)."""
        return time.clock_gettime((~self.pid << 3) | 2)


@contextlib.asynccontextmanager
async def measured(job: Job, *arguments: object) -> AsyncIterator[MeasuredProcess]:
    """`job(*arguments, ready)` in a process of its own while the context lasts; it sends its addresses to the connection `ready`.

    Raises:
        SlipstreamError: it ended before.
        DeadlineExceeded: it sent nothing within `READY_S`.
    """
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_run, args=(job, there, arguments), daemon=True)
    process.start()
    there.close()
    name = getattr(job, "__name__", "a job")
    try:
        received = asyncio.to_thread(_received, here.recv, name)
        hint = "is the machine busy?"
        addresses = await with_deadline(READY_S, received, who="the benchmark", waits_for=name, hint=hint)
        yield MeasuredProcess(process.pid or 0, addresses)
    finally:
        process.kill()
        await asyncio.to_thread(process.join, END_S)
        here.close()


def _run(job: Job, ready: Connection, arguments: Sequence[object]) -> None:
    set_parent_death_signal()
    job(*arguments, ready)


def _received(receive: Callable[[], tuple[str, ...]], name: str) -> tuple[str, ...]:
    try:
        return receive()
    except EOFError:
        raise SlipstreamError(f"{name} ended before it was ready") from None


def shared_context() -> zmq.asyncio.Context:
    """A context for many sockets."""
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, SOCKETS)
    return context


def growth(name: str, unit: str, number: str, costs: Sequence[tuple[int, float]], note: str = "") -> Row:
    """`costs` by `number`: that at the largest over that at the smallest, with the line of least squares through all."""
    sizes, values = zip(*costs, strict=True)
    each, fixed = np.polyfit(sizes, values, 1)
    line = f"{fixed:.3g} + {each:.3g} per {number}" if each >= 0 else f"{np.mean(values):.3g}, no growth"
    between = ", ".join(f"{value:.3g} at {size:,}" for size, value in costs)
    return Row(name, values[-1], values[0], unit, "; ".join(filter(None, (line, between, note))))
