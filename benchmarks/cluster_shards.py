"""`bench cluster`: a buffer with shards, each of its processes by itself; workers and learner are in this one.

Invariants:
- CPU is what is compared: on a machine with fewer cores than processes the rate says how many cores there are. The process that
  needs most for a trajectory is the first to fill a core, so that its CPU bounds what the buffer takes where there are enough.
- Batches and workers grow with the shards: each has as much to do at once as the one process has, and stores as much at once.
- The clock's CPU counts by step, whatever else it does meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..buffer.client import BufferClient
from ..buffer.schema import process_names
from ..launch.launchers.local import free_ports
from ..rpc.security import make_pair
from .cluster_buffer import GROUPS, serve_buffer, traffic
from .cluster_processes import measured, shared_context
from .result import Result, Row

NUMBERS = (1, 2, 4)
"""Of shards; the first is the floor."""

WORKERS = 32
"""Of each shard."""

TRAFFIC_S = 8.0
ALLOWED_MS = 100.0
"""CPU that the clock may need for a step: a tenth of a core where there is a step each second."""


class _Measured(NamedTuple):
    rate: float  # trajectories per second
    busiest_s: float  # CPU for a trajectory, of the process that needs most
    clock_s: float  # CPU of the clock for a step; of one process, of all that it does


async def shards(folder: Path, numbers: Sequence[int] = NUMBERS) -> Result:
    """What a buffer of several processes takes, over one of one process."""
    found = {number: await _measure(folder, number) for number in numbers}
    one, *others = numbers
    rows = list[Row]()
    for number in others:
        now, floor = found[number], found[one]
        name = f"{number} shards"
        rows += [
            Row(f"{name}, where each has a core", 1 / now.busiest_s, 1 / floor.busiest_s, "traj/s",
                f"CPU of the busiest process: {1e6 * now.busiest_s:.3g} us for a trajectory, of one {1e6 * floor.busiest_s:.3g}"),
            Row(f"{name}, on this machine", now.rate, floor.rate, "traj/s", "workers and learner share its cores"),
            Row(f"{name}, the clock's CPU for a step", 1e3 * now.clock_s, ALLOWED_MS, "ms",
                f"a step of {GROUPS * number} groups; the other column is a tenth of a core at one step a second"),
        ]  # fmt: skip
    return Result("A buffer with shards", "shards", "one process", tuple(rows))


async def _measure(folder: Path, number: int) -> _Measured:
    names = process_names(number)
    roles = (*names, "learner-0", *(f"worker-{i}" for i in range(WORKERS * number)))
    keys = {role: make_pair() for role in roles}
    (port,) = free_ports(1)
    fleet = f"tcp://127.0.0.1:{port}"
    async with contextlib.AsyncExitStack() as stack:
        processes = [
            await stack.enter_async_context(
                measured(serve_buffer, folder / f"{name} of {number}.sqlite", keys, fleet, shard, number)
            )
            for shard, name in enumerate(names)
        ]
        context = shared_context()
        stack.callback(context.term)
        clock, *addresses = [process.addresses[0] for process in processes]
        learner, *workers = [
            await stack.enter_async_context(BufferClient(clock, name, addresses, pair=keys[name], context=context))
            for name in roles[len(names) :]
        ]
        async with traffic(fleet, learner, workers) as done:
            await asyncio.sleep(TRAFFIC_S / 3)
            began, before = time.monotonic(), [process.cpu_s() for process in processes]
            trajectories, steps = done.trajectories, done.steps
            await asyncio.sleep(TRAFFIC_S)
            used = [process.cpu_s() - cpu_s for process, cpu_s in zip(processes, before, strict=True)]
            seconds = time.monotonic() - began
            trajectories, steps = done.trajectories - trajectories, done.steps - steps
    return _Measured(trajectories / seconds, max(used) / max(1, trajectories), used[0] / max(1, steps))
