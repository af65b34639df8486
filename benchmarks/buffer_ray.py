"""`slipstream bench buffer`: the same trajectories through Ray: its object store, and a queue actor that hands out references.

Invariants:
- It is done as well as Ray can: producers keep as many deliveries under way as the buffer's do, a queue's item is a whole group,
  and of the two ways to send it, as a reference to the object store and by value, the better one counts.
- Nothing here survives its process; the buffer's trajectories are on disk before they are acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray.util.queue import Queue

from ..buffer.messages import Lease
from ..buffer.trajectory import Trajectory
from ..errors import with_deadline
from .buffer_traffic import BUFFER, CONCURRENCY, GRACE_S, Count, Round, Took
from .buffer_trajectories import stamped

STORE_BYTES = 2 << 30
"""Ray's object store: far more than is ever outstanding."""

WAYS = {"by reference": True, "by value": False}


class Producer:
    """An actor that puts groups into the queue until the round is over."""

    async def produce(self, queue: Queue, this: Round, by_reference: bool) -> None:
        numbers = itertools.count()

        async def groups() -> None:
            while True:
                lease = Lease(next(numbers), 0, tuple(range(BUFFER.group_size)), 0, 0)
                group = [stamped(this.tokens, lease, member) for member in lease.members]
                await queue.put_async([ray.put(group)] if by_reference else group)

        stamped(this.tokens, Lease(0, 0, (0,), 0, 0), 0)  # made before the first group
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(this.until - time.monotonic()):
                await asyncio.gather(*(groups() for _ in range(CONCURRENCY // BUFFER.group_size)))


class Learner:
    """An actor that takes batches out of the queue until the round is over."""

    async def learn(self, queue: Queue, this: Round, by_reference: bool) -> Took:
        count = Count(this.counts_from, "Ray")

        async def group() -> list[Trajectory]:
            item = await queue.get_async()
            return await item[0] if by_reference else item

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(this.until - time.monotonic()):
                while True:
                    batch = await asyncio.gather(*(group() for _ in range(this.groups)))
                    count.add(sum(map(len, batch)))
        return count.took()


class RayCrew:
    """Actors that stay for all rounds."""

    def __init__(self, producers: int) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": 1000}
        self._options = options
        make: Any = ray.remote(Producer).options(**options)
        self._producers = [make.remote() for _ in range(producers)]
        self._learner: Any = ray.remote(Learner).options(**options).remote()

    async def through_ray(self, this: Round, producers: int, way: str) -> Took:
        """Send trajectories through a new queue for a round."""
        queue = Queue((BUFFER.max_staleness + 1) * this.groups, actor_options=self._options)
        by_reference = WAYS[way]
        makers = [p.produce.remote(queue, this, by_reference) for p in self._producers[:producers]]
        took = self._learner.learn.remote(queue, this, by_reference)
        try:
            seconds = this.until - time.monotonic() + GRACE_S
            ended = asyncio.gather(took, *makers)
            return (
                await with_deadline(seconds, ended, who="the benchmark", waits_for="Ray", hint="is the machine busy?")
            )[0]
        finally:
            queue.shutdown(force=True)


@contextlib.asynccontextmanager
async def ray_crew(producers: int) -> AsyncIterator[RayCrew]:
    """Ray on this machine alone, with actors that have started."""
    await asyncio.to_thread(
        ray.init,
        address="local",
        num_cpus=1,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        yield RayCrew(producers)
    finally:
        ray.shutdown()
