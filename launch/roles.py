"""The entry of every process of a run: `slipstream role NAME`, started by a launcher, never by hand.

Invariants:
- A role says why it ends before it ends: its named error is its last word to the supervisor and the last line of its log.
- SIGTERM asks a role to finish in good order; what it leaves behind is durable.
- Heavy imports happen inside a role, so that a buffer does not load torch and a worker does not load vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvloop

from .. import heap
from ..errors import ConfigError, SlipstreamError, first_cause
from ..monitor.log import setup_logging
from .heart import Heart
from .job import Job, read_job
from .member import FINAL
from .processes import die_with_parent

if TYPE_CHECKING:
    from ..learner.backend import Backend
    from ..learner.beside.model import Ranked

log = logging.getLogger(__name__)

CANARY_TOKENS = 32
"""Length of the prompt whose log-probs prove a push: long enough to pass through every kernel, short enough to cost nothing."""

T = TypeVar("T")

Role = Callable[[Job, int, Heart, asyncio.Event], Awaitable[None]]


def run_role(name: str, label: str = "", listen: str = "") -> int:
    """Be `name` (`buffer`, `engine-0`, `worker-0`, `learner-0`, `reference-0`, `critic-0`, `sft-0`, `evaluator`, `reward`) until
    done; its exit status.

    `label` names an evaluation, `listen` is an engine's `host:port`.
    """
    die_with_parent()
    setup_logging(name)
    kind, _, index = name.partition("-")
    job = read_job()
    sys.path.append(job.started_in)  # where the user's own environments and agents are
    if kind == "engine":
        become_engine(job, int(index), listen)
    if kind == "reward":
        become_reward(job)
    roles: dict[str, Role] = {
        "buffer": buffer,
        "worker": worker,
        "learner": learner,
        "reference": reference,
        "critic": critic,
        "evaluator": evaluator(label),
        "sft": sft,
    }
    if kind not in roles:
        raise ConfigError(f"role {name!r} is unknown; there are engine, reward, {', '.join(roles)}")
    with Heart(job.cluster.supervisor, name) as heart:
        try:
            uvloop.run(_until_stopped(roles[kind], job, int(index or 0), heart))
        except SlipstreamError as error:
            log.error("%s: %s", type(error).__name__, error)
            heart.failed(f"{type(error).__name__}: {error}")
            return FINAL if error.final and not isinstance(error, ConfigError) else error.exit_code
        except Exception as error:
            log.exception("%s ended by an error that nobody foresaw", name)
            heart.failed(f"{type(error).__name__}: {error}")
            return 1
    return 0


async def _until_stopped(role: Role, job: Job, index: int, heart: Heart) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    follows = asyncio.create_task(heart.follow_loop(), name="heart") if role not in COMPUTING else None
    try:
        await role(job, index, heart, stop)
    except BaseExceptionGroup as group:
        raise first_cause(group) from group
    finally:
        if follows is not None:
            follows.cancel()


async def _or_stop(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
    """The result of `work`, None when the stop came first and `work` was cancelled."""
    working = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        stopped.cancel()
        await asyncio.wait({working, stopped})


def _ready(heart: Heart) -> None:
    """Everything is there that stays."""
    heap.freeze()
    heart.ready()


def become_engine(job: Job, index: int, listen: str) -> None:
    """Replace this process by the server of replica `index`, which listens on `host:port`."""
    from ..rollout import servers

    host, _, port = listen.rpartition(":")
    arguments = servers.command(job.config, host, int(port), seed=job.config.seed + index)
    os.execvpe(arguments[0], arguments, {**os.environ, **servers.environment(job.config)})


def become_reward(job: Job) -> None:
    """Replace this process by the server of the reward model."""
    from ..rollout import reward_server

    host, _, port = job.cluster.reward.removeprefix("http://").rpartition(":")
    arguments = reward_server.command(job.config, host, int(port))
    os.execvpe(arguments[0], arguments, {**os.environ, **reward_server.environment(job.config)})


async def buffer(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
    from ..buffer.service import BufferService
    from ..configs.algorithm import plays_greedily
    from ..configs.schema import shares_of

    shares = shares_of(job.config.env)
    retries = {reason: failure.retries for reason, failure in job.config.rollout.failures.items()}
    place = job.dir / "buffer.sqlite"
    greedy = plays_greedily(job.config.learner.algorithm)
    service = BufferService(job.config.buffer, place, job.cluster.buffer, shares=shares, retries=retries, greedy=greedy)
    stopped = asyncio.create_task(stop.wait(), name="stop")
    stopped.add_done_callback(lambda _: service.stop())
    try:
        await service.serve(functools.partial(_ready, heart))
    finally:
        stopped.cancel()


async def worker(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
    from ..rollout.worker import Worker
    from .journalled import buffer_client
    from .wiring import make_player, make_reward, make_router

    config = job.config
    temperature = config.rollout.sampling.temperature
    async with make_router(job) as router, make_reward(job) as model:
        player = make_player(config, router, split="train", temperature=temperature, model=model)
        async with buffer_client(job, f"worker-{index}") as client:
            _ready(heart)
            await Worker(player, client, config.buffer.group_size, config.rollout.workers).run(stop)


def evaluator(label: str) -> Role:
    """A role that evaluates what the engines serve and appends to `evaluations.json`."""

    async def evaluate_once(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
        from ..rollout.evaluation import by_environment, evaluate
        from .wiring import make_player, make_router

        config = job.config
        async with make_router(job) as router:
            player = make_player(config, router, split="eval", temperature=config.evaluation.temperature)
            _ready(heart)
            result = await _or_stop(evaluate(player, label, config.evaluation.tasks), stop)
        if result is None:
            return
        append_json(job.dir / "evaluations.json", result)
        heart.say(
            f"{label}: reward {result.reward_mean:.3f} ± {result.reward_stderr:.3f} over {result.tasks} fresh tasks"
            f"{by_environment(result)}"
        )

    return evaluate_once


def append_json(path: Path, item: msgspec.Struct) -> None:
    """Append to a JSON list in a file, whole or not at all."""
    items = msgspec.json.decode(path.read_bytes(), type=list[msgspec.Raw]) if path.exists() else []
    new = path.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode([*items, item])))
    new.replace(path)


async def learner(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
    from ..learner.loop import TrainingLoop
    from ..learner.metrics import StepMetrics
    from ..monitor.metrics import MetricsWriter, scalars
    from ..monitor.trackers import open_trackers
    from .journalled import buffer_client
    from .wiring import make_backend, make_canary, make_companions, make_publisher

    config = job.config
    backend = make_backend(config, temperature=config.rollout.sampling.temperature)
    first = index == 0
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(backend.close)
        companions = make_companions(config, backend, job.cluster.beside)
        stack.callback(companions.close)
        client = await stack.enter_async_context(buffer_client(job, f"learner-{index}"))
        publisher, joined = None, asyncio.Event()
        if first:
            publisher, targets = await stack.enter_async_context(make_publisher(job, backend.device, heart))
            joined = targets.joined
            if await _or_stop(targets.wait_ready(config.rollout.engine.start_s), stop) is None:
                return
        writer = stack.enter_context(MetricsWriter(job.dir / "metrics.jsonl")) if first else None
        trackers = open_trackers(config.monitor.trackers, job.dir, config) if first else []
        for tracker in trackers:
            stack.callback(tracker.close)

        def report(metrics: StepMetrics) -> None:
            if writer is None:
                return
            writer.append(metrics)
            for tracker in trackers:
                tracker.log(metrics.version, scalars(msgspec.to_builtins(metrics)))
            heart.stepped(metrics)

        canary = make_canary(config, CANARY_TOKENS)
        checkpoints, longest = job.dir / "checkpoints", config.agent.max_tokens
        loop = TrainingLoop(
            config.learner, backend, client, publisher, joined, checkpoints, canary, report, longest, companions
        )
        state = await loop.run(stop, functools.partial(_ready, heart))
        if state.step >= config.learner.steps:
            backend.export(job.dir / "model")
            heart.done()
            await loop.serve(stop)


async def reference(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
    from .wiring import make_reference, ranked

    config = ranked(job.config, job.config.learner.beside["reference"])
    await _beside(job, index, heart, stop, make_reference(config), None)


async def critic(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
    from .wiring import make_critic, ranked

    model = make_critic(ranked(job.config, job.config.learner.beside["critic"]))
    await _beside(job, index, heart, stop, model, model)


async def _beside(
    job: Job, index: int, heart: Heart, stop: asyncio.Event, model: Ranked, trained: Backend | None
) -> None:
    """Serve this rank of `model` until the stop; `trained` is the same where it learns."""
    from ..learner.beside.service import Service

    kind = heart.role.partition("-")[0]
    address = job.cluster.beside[kind][index]
    try:
        service = Service(job.config.learner, heart.role, address, model, trained)
        await _or_stop(service.serve(functools.partial(_ready, heart)), stop)
    finally:
        model.close()


async def sft(job: Job, index: int, heart: Heart, stop: asyncio.Event) -> None:
    from .sft import ranks_part

    # Nothing is left behind that would want good order, and this loop does not turn until all is done.
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    ranks_part(job, heart.say if index == 0 else lambda _: None)


COMPUTING = (learner, reference, critic, sft)
"""Roles whose event loop stands still while they compute."""
