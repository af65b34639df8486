"""`bench cluster`: the learner's publisher, which pushes a version to many simulated replicas, in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ..errors import SlipstreamError
from ..weightsync.publisher import Publisher
from .cluster_processes import growth, measured
from .cluster_replicas import LOGPROB, client_of, fleet_of, serve_replicas
from .result import Result

SIZES = (10, 32, 100, 316, 1000)
"""Replicas."""

PUSHES = 2
PUSH_S = 300.0
CANARY = tuple(range(32))


async def publisher(folder: Path, sizes: Sequence[int] = SIZES) -> Result:
    """CPU of rank 0 for a push of next to no weights: what it does for each replica."""
    costs = list[tuple[int, float]]()
    async with measured(serve_replicas) as servers:
        for size in sizes:
            engines = [client_of(info) for info in fleet_of(size, *servers.addresses, version=0).replicas]
            pushing = make_publisher(folder / str(size))
            try:
                pushing.update(engines)
                await _push(pushing, 1, size)  # the first makes the connections
                began = time.process_time()
                for version in range(2, 2 + PUSHES):
                    await _push(pushing, version, size)
                costs.append((size, 1e3 * (time.process_time() - began) / PUSHES))
            finally:
                pushing.close()
                await asyncio.gather(*(engine.close() for engine in engines))
    row = growth("a push", "ms", "replica", costs, "by `disk`, a quarter of the fleet at a time")
    return Result("CPU of the publisher by replicas", f"at {sizes[-1]:,}", f"at {sizes[0]:,}", (row,))


def make_publisher(folder: Path) -> Publisher:
    """One that has no replicas yet, and keeps its files in `folder`."""
    folder.mkdir(exist_ok=True)
    return Publisher(
        (),
        transport="disk",
        folder=folder / "weights",
        spool=folder,
        host="127.0.0.1",
        backend="gloo",
        device=torch.device("cpu"),
        bucket_bytes=1 << 20,
        push_s=PUSH_S,
        canary_tolerance=0.1,
    )


async def _push(publisher: Publisher, version: int, replicas: int) -> None:
    """Raises SlipstreamError where it did not reach all."""
    weights = [("weight", torch.full((8,), float(version)))]
    report = await publisher.publish(version, weights, CANARY, (LOGPROB,) * (len(CANARY) - 1))
    if len(report.pushed) < replicas:
        name, why = next(iter(report.failed.items()))
        raise SlipstreamError(f"a push reached {len(report.pushed)} of {replicas} replicas; {name}: {why}")
