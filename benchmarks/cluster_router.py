"""`bench cluster`: a worker's router over many simulated replicas, in this process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path

from ..agents.base import Completion
from ..buffer.trajectory import VersionSpan
from ..common.images import PromptImage
from ..rollout.engines.base import PartialCompletion, SamplingParams
from ..rollout.engines.vllm.client import VllmEngine
from ..rollout.router import Router
from ..rpc import wire
from ..weightsync.fleet import Fleet, ReplicaInfo
from .cluster_processes import growth, measured
from .cluster_replicas import fleet_of, serve_replicas
from .result import Result

SIZES = (10, 32, 100, 316, 1000)
"""Replicas."""

REQUESTS = 2000
EPISODES = 64
"""Requests under way at once."""

PROMPT, SAMPLED = 512, 64

SNAPSHOTS = 20
LOAD_ROUNDS = 3


class InstantEngine(VllmEngine):
    """Answers a completion without a server; its load is asked for over HTTP, as that of a real one."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        growing: PartialCompletion | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Completion:
        await asyncio.sleep(0)
        return Completion(tuple(range(SAMPLED)), (0.0,) * SAMPLED, (VersionSpan(0, SAMPLED, version or 0),), "stop")


def _engine(replica: ReplicaInfo) -> InstantEngine:
    return InstantEngine(replica.name, replica.url, vocab_size=1 << 17, max_model_len=1 << 15)


async def router(folder: Path, sizes: Sequence[int] = SIZES, requests: int = REQUESTS) -> Result:
    """CPU of one worker's router: for a request, for a snapshot of the fleet, and for the load of the servers each second."""
    costs: dict[str, list[tuple[int, float]]] = {"request": [], "snapshot": [], "load": []}
    async with measured(serve_replicas) as servers:
        for size in sizes:
            one = Router(_engine, max_concurrent=256, request_s=60.0, start_s=60.0, partial="recompute")
            async with one:
                one.update(fleet_of(size, *servers.addresses, version=1))
                costs["request"].append((size, 1e6 * await _requests(one, requests)))
                costs["snapshot"].append((size, 1e3 * _snapshots(one, size, *servers.addresses)))
                costs["load"].append((size, 1e3 * await _loads(one)))
    rows = (
        growth("a request", "us", "replica", costs["request"], f"prompt of {PROMPT} tokens"),
        growth("a snapshot of the fleet", "ms", "replica", costs["snapshot"], "decoded and taken over"),
        growth("the load of the servers, once a second", "ms", "replica", costs["load"]),
    )
    title = "CPU of a worker's router by replicas"
    return Result(title, f"at {sizes[-1]:,}", f"at {sizes[0]:,}", rows)


async def _requests(router: Router, requests: int) -> float:
    """Seconds of CPU for one request."""
    sampling, prompt, numbers = SamplingParams(SAMPLED), tuple(range(PROMPT)), itertools.count()

    async def episode(name: str) -> None:
        while next(numbers) < requests:
            await router.generate(name, prompt, sampling, 0)

    began = time.process_time()
    await asyncio.gather(*(episode(f"{i}.0.0") for i in range(EPISODES)))
    return (time.process_time() - began) / requests


def _snapshots(router: Router, size: int, address: str) -> float:
    """Seconds of CPU for one snapshot in which a version has changed."""
    frames = [wire.encode(fleet_of(size, address, version, version)) for version in range(2, 2 + SNAPSHOTS)]
    began = time.process_time()
    for frame in frames:
        router.update(wire.decode(Fleet, frame))
    return (time.process_time() - began) / SNAPSHOTS


async def _loads(router: Router) -> float:
    """Seconds of CPU for one round of questions."""
    await router.engine_loads()  # connections are made
    began = time.process_time()
    for _ in range(LOAD_ROUNDS):
        await router.engine_loads()
    return (time.process_time() - began) / LOAD_ROUNDS
