"""`slipstream bench rollout`: what weight pushes cost the generation: cohorts against stopping all replicas, and keeping
requests against restarting them.

Invariants:
- The modes of a row run by turns on the same servers under the same load; tokens are the servers' own count.
- The global stop is done as well as it can be: all replicas pause at the same time, receive in parallel, swap and resume.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from ..agents.base import Completion
from ..launch.supervisor.factory import make_engine
from ..rollout.engines.access import ServerAccess
from ..rollout.engines.base import SamplingParams
from ..rollout.engines.http_engine import HttpEngine
from ..rollout.router import Router
from ..weightsync.plan import TransferPlan
from ..weightsync.publisher import Publisher
from .models import make_policy
from .result import Result, by_rounds
from .serving import Policies, Serving, background_tasks, configure, make_publisher, serving

PUSH_EVERY_S = 4.0

WINDOW_S = 8.0
"""One mode's turn: short, so that what else the machine does falls on all of them alike."""

ROUNDS = 12

CLIENTS = 16
"""Requests under way per replica."""

LENGTHS = (50, 350)
"""Tokens of each of them, drawn uniformly: equal ones would all end at the same time, and begin background_tasks again."""

PROMPT = tuple(range(10, 42))


async def rolling(folder: Path, size: str, replicas: int) -> Result:
    """Tokens per second with rolling pushes, and with global stops, over those without any push."""
    make_policy(folder / "model", size)
    policies = Policies(folder / "model")
    async with serving(configure(folder / "model", replicas=replicas), folder) as served:
        stopping = [make_engine(served.job, ServerAccess(), replica) for replica in served.replicas]
        for engine in stopping:
            engine.receive_weights = functools.partial(_receive_paused, engine, engine.receive_weights)
        publishers = {
            "none": None,
            "rolling": make_publisher(served.engines, folder),
            "stop": make_publisher(stopping, folder, cohort=replicas),
        }
        rates: dict[str, list[float]] = {mode: [] for mode in publishers}
        assert publishers["rolling"] is not None
        version = (await policies.push(publishers["rolling"])).version
        async with (
            served.router(version) as router,
            background_tasks(_client(router, i) for i in range(CLIENTS * replicas)),
        ):
            await asyncio.sleep(PUSH_EVERY_S)
            for mode, publisher in [*publishers.items()] * ROUNDS:
                async with _pushes(served, router, policies, publisher):
                    rates[mode].append(await served.rate(WINDOW_S))
        for publisher in publishers.values():
            if publisher is not None:
                publisher.close()
        for engine in stopping:
            await engine.close()
    what = f"{size}, {replicas} replicas"
    return Result(
        f"generation with a push every {PUSH_EVERY_S:g} s over generation without",
        "with pushes",
        "without",
        (
            by_rounds(f"{what}: rolling", rates["rolling"], rates["none"], "tokens/s"),
            by_rounds(f"{what}: global stop", rates["stop"], rates["none"], "tokens/s"),
        ),
    )


async def _receive_paused(
    engine: HttpEngine, receive: Callable[[TransferPlan], Awaitable[None]], plan: TransferPlan
) -> None:
    """Receive while paused, as a server without a staging buffer must; a push that succeeds resumes the engine."""
    await engine.pause("recompute")
    try:
        await receive(plan)
    except BaseException:
        await engine.resume()
        raise


async def _client(router: Router, number: int) -> None:
    """One request after the other, for ever."""
    lengths = random.Random(number)
    for turn in itertools.count():
        await _finish(router, f"{number}.{turn}", lengths.randint(*LENGTHS))


async def _finish(router: Router, episode: str, length: int) -> int:
    """A completion of `length` tokens, in as many parts as it takes; tokens that were sampled for it."""
    ids = list(PROMPT)
    while (left := len(PROMPT) + length - len(ids)) > 0:
        part = await router.generate(episode, ids, SamplingParams(left), 0)
        ids += part.token_ids
    router.end_episode(episode)
    return length


@contextlib.asynccontextmanager
async def _pushes(
    served: Serving, router: Router, policies: Policies, publisher: Publisher | None
) -> AsyncIterator[None]:
    """A push every `PUSH_EVERY_S` beside the body; the last one ends before the context does. None: no pushes."""
    over = asyncio.Event()

    async def push(publisher: Publisher) -> None:
        while not over.is_set():
            began = time.perf_counter()
            report = await policies.push(publisher)
            served.set_version(router, report.version)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), max(0.0, PUSH_EVERY_S - (time.perf_counter() - began)))

    async with asyncio.TaskGroup() as tasks:
        if publisher is not None:
            tasks.create_task(push(publisher))
        try:
            yield
        finally:
            over.set()


# --- partial rollouts -----------------------------------------------------------------------------------------------

PARTIAL_CLIENTS = 32
PARTIAL_WINDOW_S = 40.0
"""Long against the longest requests."""

PARTIAL_ROUNDS = 2

LONGEST = 900


def skewed(number: int) -> int:
    """The length of the `number`-th request: most are short, a few take many pushes (log-normal, mean about 200 tokens)."""
    return min(LONGEST, max(8, int(random.Random(number).lognormvariate(4.7, 1.1))))


async def partial(folder: Path, size: str) -> Result:
    """Tokens of finished requests per second: kept over a push, against aborted by it and begun anew."""
    make_policy(folder / "model", size)
    policies = Policies(folder / "model")
    useful: dict[str, list[float]] = {"kept": [], "restarted": []}
    config = configure(folder / "model", replicas=1)
    async with serving(config, folder) as served:
        engine = served.engines[0]
        publishers = {
            "kept": make_publisher(served.engines, folder, partial="recompute"),
            "restarted": make_publisher(served.engines, folder, partial="abort_resume"),
        }
        version = (await policies.push(publishers["kept"])).version
        for mode, publisher in [*publishers.items()] * PARTIAL_ROUNDS:
            done = 0
            numbers = itertools.count()

            async def client(keep: bool) -> None:
                nonlocal done
                for number in numbers:  # noqa: B023
                    length = skewed(number)
                    while True:
                        answer: Completion = await engine.generate(PROMPT, SamplingParams(length))
                        if answer.finish_reason != "abort":
                            break
                        assert not keep
                    done += length

            async with served.router(version) as router:
                clients = [client(mode == "kept") for _ in range(PARTIAL_CLIENTS)]
                async with background_tasks(clients), _pushes(served, router, policies, publisher):
                    began = time.perf_counter()
                    await asyncio.sleep(PARTIAL_WINDOW_S)
                    useful[mode].append(done / (time.perf_counter() - began))
        for publisher in publishers.values():
            publisher.close()
    what = f"{size}, lengths to {LONGEST}, a push every {PUSH_EVERY_S:g} s"
    row = by_rounds(what, useful["kept"], useful["restarted"], "useful tokens/s")
    return Result("partial rollouts kept over aborted and begun anew", "kept", "begun anew", (row,))
