"""`slipstream bench tools`: what tools cost a worker: episodes with a sandboxed call of `python` in each turn over the same
episodes without, and how many episodes with a tool that only waits one worker holds.

Invariants:
- Both play the same tasks on the same server, by turns, each episode of the contender in a sandbox of its own, which is started
  and closed within the round.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import psutil

from ..common.process import set_parent_death_signal
from ..configs.environments import PythonEnv
from ..configs.schema import Config
from ..launch.launchers.local import free_ports
from .models import SLEEP_S, TURNS, make_policy
from .overhead import CONCURRENCY, EPISODES, STOP_S, Played, Round, in_process, play, run_coroutine, store
from .result import Result, Row, by_rounds
from .serving import Policies, Serving, configure, make_publisher, serving

ROUNDS = 3
SLEEPERS = 1000
TICK_S = 0.01
"""Between two looks at the clock of the event loop."""


class Held(msgspec.Struct, frozen=True):
    """What a worker with many episodes was like."""

    seconds: float
    lag_p99: float  # seconds that the event loop was late
    lag_max: float
    rss: int  # bytes at the end


async def tools(folder: Path, size: str) -> tuple[Result, ...]:
    """Tokens per second with and without sandboxed calls, then the sleepers."""
    make_policy(folder / "model", size)
    config = _configure(folder / "model", EPISODES, CONCURRENCY)
    rates: dict[str, list[float]] = {"Talk": [], "TalkAndCompute": []}
    async with serving(config, folder) as served:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), set_parent_death_signal) as processes:
            version = await _push(served, folder)
            for number in range(ROUNDS + 1):
                for half, (name, kept) in enumerate(rates.items()):
                    played: Played = await _round(processes, served, name, version, 2 * number + half, play)
                    if number:  # the first round warms up
                        kept.append(played.rate)
    called = Result(
        f"a worker whose episodes call python in each of {TURNS} turns",
        "with the tool",
        "without",
        (by_rounds(f"{size}, {CONCURRENCY} episodes at once", rates["TalkAndCompute"], rates["Talk"], "tokens/s"),),
    )
    return called, await _sleepers(folder / "sleepers", folder / "model")


async def _sleepers(folder: Path, model: Path) -> Result:
    config = _configure(model, SLEEPERS, SLEEPERS)
    async with serving(config, folder) as served:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), set_parent_death_signal) as processes:
            version = await _push(served, folder)
            held: Held = await _round(processes, served, "TalkAndSleep", version, 0, _watched)
    note = (
        f"event loop late by {1e3 * held.lag_p99:.0f} ms at the 99th percentile, {1e3 * held.lag_max:.0f} ms at most; "
        f"{held.rss >> 20} MiB resident"
    )
    row = Row(f"{SLEEPERS} episodes of {TURNS} turns of {SLEEP_S:g} s", held.seconds, TURNS * SLEEP_S, "s", note)
    return Result("one worker holds episodes whose tools wait", "the round", "the waits of one", (row,))


def _configure(model: Path, episodes: int, concurrent: int) -> Config:
    config = configure(model, replicas=1)
    return msgspec.structs.replace(
        config,
        agent=msgspec.structs.replace(config.agent, max_tokens_per_turn=48 if episodes == EPISODES else 4),
        buffer=msgspec.structs.replace(config.buffer, groups_per_batch=episodes // config.buffer.group_size),
        rollout=msgspec.structs.replace(
            config.rollout, engine=msgspec.structs.replace(config.rollout.engine, max_concurrent=concurrent)
        ),
    )


async def _push(served: Serving, folder: Path) -> int:
    publisher = make_publisher(served.engines, folder)
    version = (await Policies(Path(served.job.config.model.path)).push(publisher)).version
    publisher.close()
    return version


async def _round(
    processes: ProcessPoolExecutor, served: Serving, name: str, version: int, number: int, work: Any
) -> Any:
    """All episodes of the environment `name` through a worker and a buffer of their own."""
    env = PythonEnv(factory=f"slipstream.benchmarks.models:{name}")
    job = msgspec.structs.replace(served.job, config=msgspec.structs.replace(served.job.config, env=env))
    this = Round(job, served.replicas, version, number, f"tcp://127.0.0.1:{free_ports(1)[0]}")
    buffer = multiprocessing.get_context("spawn").Process(target=run_coroutine, args=(store, this), daemon=True)
    buffer.start()
    try:
        return await in_process(processes, work, this)
    finally:
        buffer.terminate()
        await asyncio.to_thread(buffer.join, STOP_S)


async def _watched(this: Round) -> Held:
    """Play, and look how late the event loop is."""
    late = list[float]()

    async def look() -> None:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            late.append(time.perf_counter() - due)

    watching = asyncio.create_task(look())
    try:
        played = await play(this)
    finally:
        watching.cancel()
    late.sort()
    return Held(played.seconds, late[int(0.99 * len(late))], late[-1], psutil.Process().memory_info().rss)
