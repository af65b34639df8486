"""The entry of every process of a run: `slipstream role NAME`, started by a launcher, never by hand.

Invariants:
- A role says why it ends before it ends: its named error is its last word to the supervisor and the last line of its log.
- SIGTERM asks a role to finish in good order; what it leaves behind is durable.
- Heavy imports happen inside a role, so that a buffer does not load torch and a worker does not load vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import uvloop

from ..errors import ConfigError, SlipstreamError, first_cause
from ..monitor.log import setup_logging
from .heart import Heart
from .job import Job, read_job
from .processes import die_with_parent

log = logging.getLogger(__name__)

CANARY_TOKENS = 32
"""Length of the prompt whose log-probs prove a push: long enough to pass through every kernel, short enough to cost nothing."""

Role = Callable[[Job, int, Heart, asyncio.Event], Awaitable[None]]


def run_role(name: str, label: str = "") -> int:
    """Be `name` (`buffer`, `engine-0`, `worker-0`, `learner-0`, `evaluator`) until done; returns the exit status."""
    die_with_parent()
    setup_logging(name)
    kind, _, index = name.partition("-")
    job = read_job()
    if kind == "engine":
        become_engine(job, int(index))
    roles: dict[str, Role] = {"buffer": buffer, "worker": worker, "learner": learner, "evaluator": evaluator(label)}
    if kind not in roles:
        raise ConfigError(f"role {name!r} is unknown; there are engine, {', '.join(roles)}")
    with Heart(job.cluster.supervisor, name) as heart:
        try:
            uvloop.run(_until_stopped(roles[kind], job, int(index or 0), heart))
        except SlipstreamError as error:
            log.error("%s: %s", type(error).__name__, error)
            heart.say(f"{type(error).__name__}: {error}", fatal=True)
            return error.exit_code
        except Exception as error:
            log.exception("%s ended by an error that nobody foresaw", name)
            heart.say(f"{type(error).__name__}: {error}", fatal=True)
            return 1
    return 0


async def _until_stopped(role: Role, job: Job, index: int, heart: Heart) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await role(job, index, heart, stop)
    except BaseExceptionGroup as group:
        raise first_cause(group) from group


def become_engine(job: Job, index: int) -> None:
    """Replace this process by the upstream server of replica `index`."""
    from ..rollout import vllm_server

    address = urlsplit(job.cluster.engines[index])
    arguments = vllm_server.command(job.config, address.hostname or vllm_server.LOOPBACK, address.port or 0)
    os.execvpe(arguments[0], arguments, {**os.environ, **vllm_server.environment(job.config)})


async def buffer(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
    from ..buffer.service import BufferService

    service = BufferService(job.config.buffer, job.dir / "buffer.sqlite", job.cluster.buffer)
    serving = asyncio.create_task(service.serve(heart.ready), name="buffer service")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    service.stop()
    await serving


async def worker(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
    from ..buffer.client import BufferClient
    from ..rollout.worker import Worker
    from .wiring import make_player, make_router

    config = job.config
    temperature = config.rollout.sampling.temperature
    async with make_router(job) as router:
        player = make_player(config, router, split="train", temperature=temperature)
        async with BufferClient(job.cluster.buffer, f"worker-{index}") as client:
            heart.ready()
            slots, group_size = config.rollout.episodes_per_worker, config.buffer.group_size
            await Worker(player, client, slots, group_size).run(stop)


def evaluator(label: str) -> Role:
    """A role that evaluates what the engines serve and appends to `evaluations.json`."""

    async def evaluate_once(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
        from ..rollout.evaluation import evaluate
        from .wiring import make_player, make_router

        config = job.config
        async with make_router(job) as router:
            player = make_player(config, router, split="eval", temperature=config.evaluation.temperature)
            heart.ready()
            result = await evaluate(
                player, label, config.evaluation.tasks, concurrency=config.rollout.episodes_per_worker
            )
        append_json(job.dir / "evaluations.json", result)
        heart.say(
            f"{label}: reward {result.reward_mean:.3f} ± {result.reward_stderr:.3f} over {result.tasks} fresh tasks"
        )

    return evaluate_once


def append_json(path: Path, item: msgspec.Struct) -> None:
    """Append to a JSON list in a file, whole or not at all."""
    items = msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw]) if path.exists() else []
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode([*items, item])))
    new.replace(path)


async def learner(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
    from ..buffer.client import BufferClient
    from ..learner.loop import TrainingLoop
    from ..learner.metrics import StepMetrics
    from ..monitor.metrics import MetricsWriter, scalars
    from ..monitor.trackers import open_trackers
    from .wiring import make_backend, make_canary, make_publisher

    config = job.config
    backend = make_backend(config, temperature=config.rollout.sampling.temperature)
    first = index == 0
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(backend.close)
        client = await stack.enter_async_context(BufferClient(job.cluster.buffer, f"learner-{index}"))
        publisher = await stack.enter_async_context(make_publisher(job, backend.device)) if first else None
        writer = stack.enter_context(MetricsWriter(job.dir / "metrics.jsonl")) if first else None
        trackers = open_trackers(config.monitor.trackers, job.dir, config) if first else []
        for tracker in trackers:
            stack.callback(tracker.close)

        def report(metrics: StepMetrics) -> None:
            if writer is None:
                return
            writer.append(metrics)
            for tracker in trackers:
                tracker.log(metrics.step, scalars(msgspec.to_builtins(metrics)))
            heart.stepped(metrics)

        canary = make_canary(config, CANARY_TOKENS)
        loop = TrainingLoop(config.learner, backend, client, publisher, job.dir / "checkpoints", canary, report)
        state = await loop.run(stop, heart.ready)
        if state.step >= config.learner.steps:
            backend.export(job.dir / "model")
