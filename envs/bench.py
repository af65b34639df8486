"""The speed of an environment: resets and steps a second, their latencies, and how long it holds up the event loop.

Invariants:
- The policies are the scripted ones of `check.py`, which answer at once: what is measured is the environment.
- Only episodes that did not fail count; a failure ends the measurement with its reason.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Sequence

import msgspec

from .base import TaskSource
from .check import in_time, step
from .scripted_policy import scripted
from .tools import in_thread

BEAT_S = 0.001  # between two looks at the event loop


class Latency(msgspec.Struct, frozen=True):
    """Calls a second, and quantiles of the seconds that one takes."""

    per_s: float
    p50: float
    p95: float
    p99: float


class EnvSpeed(msgspec.Struct, frozen=True):
    """`episodes` were played in `seconds`, `concurrent` at a time; `loop_lag` is the longest stand-still of the event loop in
    seconds."""

    concurrent: int
    episodes: int
    seconds: float
    reset: Latency
    step: Latency
    loop_lag: float


async def measure(source: TaskSource, concurrent: int, seconds: float) -> EnvSpeed:
    """Play for about `seconds`. Raises ContractViolation: a call failed or took too long."""
    resets: list[float] = []
    steps: list[float] = []
    indices, until, lag = itertools.count(), time.perf_counter() + seconds, [0.0]
    beating = asyncio.create_task(_beat(lag), name="beat")
    started = time.perf_counter()
    try:
        makes = asyncio.Lock()  # a source makes one task at a time
        players = (_play_until(until, source, indices, makes, resets, steps) for _ in range(concurrent))
        episodes = sum(await asyncio.gather(*players))
    finally:
        beating.cancel()
    took = time.perf_counter() - started
    return EnvSpeed(concurrent, episodes, took, _latency(resets, took), _latency(steps, took), lag[0])


async def _play_until(
    until: float,
    source: TaskSource,
    indices: Iterator[int],
    makes: asyncio.Lock,
    resets: list[float],
    steps: list[float],
) -> int:
    """Play one episode after the other, one at least; returns how many."""
    played = 0
    while played == 0 or time.perf_counter() < until:
        index = next(indices)
        async with makes:
            task = await in_time(in_thread(source.task, index), f"task {index}")
        env = source.make()
        try:
            began = time.perf_counter()
            opening = await in_time(env.reset(task), "reset")
            resets.append(time.perf_counter() - began)
            async with scripted(source, opening, index) as messages:
                for message in messages:
                    began = time.perf_counter()
                    result = await step(env, message, bool(opening.tools))
                    steps.append(time.perf_counter() - began)
                    if result.done:
                        break
        finally:
            await in_time(env.close(), "close")
        played += 1
    return played


async def _beat(lag: list[float]) -> None:
    last = time.perf_counter()
    while True:
        await asyncio.sleep(BEAT_S)
        now = time.perf_counter()
        lag[0], last = max(lag[0], now - last - BEAT_S), now


def _latency(took: Sequence[float], seconds: float) -> Latency:
    ordered = sorted(took)
    p50, p95, p99 = (ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.95, 0.99))
    return Latency(len(ordered) / seconds, p50, p95, p99)
