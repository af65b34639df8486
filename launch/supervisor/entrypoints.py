"""The entry point of every process of a run: `slipstream role NAME`, started by a launcher, never by hand.

Invariants:
- A role that fails first reports its error to the supervisor, and logs it.
- SIGTERM asks a role to end in good order; what it leaves behind is durable.
- Heavy imports happen inside a role, so that a buffer does not load torch and a worker does not load vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from ...common.gc import freeze_startup_objects
from ...common.process import set_parent_death_signal
from ...common.tasks import Stopped, in_thread, run_or_stop
from ...configs.schema import AuxModel, parse_size
from ...errors import ConfigError, Interrupted, SlipstreamError, first_cause
from ...monitor.log import setup_logging
from ...monitor.timeline import TimelineWriter
from ..peers import filling, following_peers, peer_table
from ..resources import RANKED
from ..run_context import RunContext, following_settings, read_run_context
from ..run_files import code_folder, local_inputs
from .heartbeat import HeartbeatSender
from .processes import FINAL
from .servers import become_engine, become_reward

if TYPE_CHECKING:
    from ...buffer.messages import Lease
    from ...rollout.player import EpisodeResult
    from ...rpc.security import PeerTable

log = logging.getLogger(__name__)

# These play episodes and have a tokenizer. They import torch and transformers before their event loop is followed: on a busy host
# that takes longer than `launch.heartbeat_s`.
PLAYING = ("worker", "evaluator", "rater")

Role = Callable[[RunContext, int, HeartbeatSender, asyncio.Event], Awaitable[None]]


def run_role(
    name: str, label: str = "", step: int = 0, listen: str = "", rendezvous: str = "", *, checkpoint: bool = False
) -> int:
    """Run a role (`buffer`, `buffer-1`, `engine-0`, `engine-0.1`, `worker-0`, `learner-0`, `reference-0`, `critic-0`, `sft-0`,
    `evaluator`, `rater`, `reward`) to its end; the exit status. `rater` measures pass rates of a data set, `reward` serves the
    reward model. `label` is the name of an evaluation's results, of the policy after `step`, and of its `checkpoint` where training
    goes on meanwhile. `listen` is an engine's `host:port`; `rendezvous` is where the processes of a server that spans hosts find
    each other."""
    set_parent_death_signal()
    setup_logging(name)
    kind, _, index = name.partition("-")
    context = read_run_context()
    # For the user's own environments and agents; on a host without that folder, as the run has kept them.
    sys.path += [context.started_in, str(code_folder(context.dir))]
    context = msgspec.structs.replace(context, config=local_inputs(context.config, context.dir, kind))
    if kind == "engine":
        become_engine(context, name, listen, rendezvous)
    if kind == "reward":
        become_reward(context)
    peers = peer_table(context)
    roles: dict[str, Role] = {
        "buffer": functools.partial(buffer, peers),
        "worker": worker,
        "learner": functools.partial(learner, peers),
        "reference": functools.partial(aux_model, "reference", peers),
        "critic": functools.partial(aux_model, "critic", peers),
        "evaluator": functools.partial(evaluator, label, step),
        "rater": rater,
        "sft": sft,
    }
    if kind not in roles:
        raise ConfigError(f"role {name!r} is unknown; there are engine, reward, {', '.join(roles)}")
    with HeartbeatSender(context.addresses.supervisor, name) as heartbeat:
        try:
            if kind in PLAYING:
                importlib.import_module("...learner.model", __package__)
            if checkpoint:
                evaluate_checkpoint(label, step, context, heartbeat)
            else:
                uvloop.run(_until_stopped(roles[kind], context, int(index or 0), heartbeat))
        except Interrupted:
            return 0
        except SlipstreamError as error:
            log.error("%s: %s", type(error).__name__, error)
            heartbeat.failed(f"{type(error).__name__}: {error}", expected=True)
            return FINAL if error.final and not isinstance(error, ConfigError) else error.exit_code
        except Exception as error:
            log.exception("%s ended with an unexpected error", name)
            heartbeat.failed(f"{type(error).__name__}: {error}", expected=False)
            return 1
    return 0


async def _until_stopped(role: Role, context: RunContext, index: int, heartbeat: HeartbeatSender) -> None:
    """Run a role until its end or SIGTERM. Its event loop is followed, unless it computes there."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    computes = heartbeat.role.startswith(RANKED)
    following = None if computes else asyncio.create_task(heartbeat.follow_loop(), name="heartbeat")
    try:
        await role(context, index, heartbeat, stop)
    except Stopped:
        return
    except BaseExceptionGroup as group:  # of the task groups inside the role
        if not isinstance(error := first_cause(group), Stopped):
            raise error from group
    finally:
        if following is not None:
            following.cancel()


def _ready(heartbeat: HeartbeatSender) -> None:
    """Report that the role works; everything that stays in memory is loaded."""
    freeze_startup_objects()
    heartbeat.ready()


async def buffer(
    peers: PeerTable | None, context: RunContext, index: int, heartbeat: HeartbeatSender, stop: asyncio.Event
) -> None:
    from ...buffer.service import BufferService
    from ...configs.algorithm import plays_greedily
    from ...configs.environments import shares_of
    from ...weightsync.fleet import following_fleet
    from ..run_inputs import RunInputs
    from ..samplers import make_samplers

    inputs = RunInputs(context.config)
    samplers, tasks = await in_thread(functools.partial(make_samplers, inputs), "make_samplers")
    shares = shares_of(context.config.env)
    retries = {reason: failure.retries for reason, failure in context.config.rollout.failures.items()}
    database = context.dir / f"{heartbeat.role}.sqlite"
    greedy = plays_greedily(context.config.learner.algorithm)
    service = BufferService(
        context.config.buffer,
        database,
        (context.addresses.buffer, *context.addresses.buffer_shards)[index],
        shares=shares,
        retries=retries,
        greedy=greedy,
        samplers=samplers,
        tasks=tasks,
        revision=context.revision,
        peers=peers,
        lease_s=context.config.launch.lease_s,
        shard=index,
    )
    stopped = asyncio.create_task(stop.wait(), name="stop")
    stopped.add_done_callback(lambda _: service.stop())
    fleets = following_fleet(context.addresses.fleet, lambda fleet: service.mark_served(fleet.version))
    settings = following_settings(context, lambda new: service.configure(new.revision, new.config.buffer))
    try:
        with TimelineWriter(context.timeline_dir, heartbeat.role, service.gauges):
            async with following_peers(context, filling(peers)), fleets, settings:
                await service.serve(functools.partial(_ready, heartbeat))
    finally:
        stopped.cancel()


async def worker(context: RunContext, index: int, heartbeat: HeartbeatSender, stop: asyncio.Event) -> None:
    from ...rollout.worker import Worker
    from .factory import buffer_client, make_agents, make_player, make_reward, make_router

    config, name = context.config, heartbeat.role
    temperature = config.rollout.temperature
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(buffer_client(context, name))
        router = await stack.enter_async_context(make_router(context, name, client, heartbeat.report_false_replies))
        model = await stack.enter_async_context(make_reward(context, name))
        agents = await stack.enter_async_context(make_agents(config))
        player = await in_thread(
            lambda: make_player(config, agents, router, split="train", temperature=temperature, model=model),
            "make_player",
        )
        _ready(heartbeat)
        size, (_, workers) = config.buffer.group_size, context.settings.share(name)
        timeline = stack.enter_context(TimelineWriter(context.timeline_dir, heartbeat.role))
        limit = context.settings.episode_limit(name)
        playing = Worker(player, client, size, workers, heartbeat.send_message, timeline.record, limit)
        async with following_settings(context, lambda new: playing.set_limit(new.episode_limit(name))) as settings:
            # Each worker reports on its share of the replicas, of those workers that there are now.
            timeline.gauges = lambda: playing.gauges() | {"replicas": router.gauges(*settings.state.share(name))}
            await playing.run(stop)


async def evaluator(
    label: str, step: int, context: RunContext, index: int, heartbeat: HeartbeatSender, stop: asyncio.Event
) -> None:
    """Evaluate the version that the engines serve, each suite that has no result of `step` yet; append the results, called `label`,
    to the run's evaluations."""
    from ...buffer.evaluation_episodes import keep_episodes
    from ...monitor.series import evaluation_line, read_evaluations
    from ...rollout.evaluation import evaluate, fewer_tasks
    from ..evaluations import FILE, append, called, missing
    from .factory import buffer_client, make_agents, make_player, make_router

    limit = parse_size("buffer.keep", context.config.buffer.keep)
    async with contextlib.AsyncExitStack() as stack:
        client, name = None, heartbeat.role
        if context.pushed:
            client = await stack.enter_async_context(buffer_client(context, name))
        router = await stack.enter_async_context(make_router(context, name, client, heartbeat.report_false_replies))
        agents = await stack.enter_async_context(make_agents(context.config))
        episodes = await stack.enter_async_context(keep_episodes(context.evaluation_dir, limit))
        evaluated = {one.suite for one in read_evaluations(context.dir / FILE)}
        for name, suite in missing(context.dir, context.config, step).items():
            make = functools.partial(
                make_player, suite, agents, router, split="eval", temperature=suite.evaluation.temperature
            )
            player = await in_thread(make, "make_player")
            _ready(heartbeat)
            tasks, samples = suite.evaluation.tasks, suite.evaluation.samples
            title = called(label, name)
            if name not in evaluated and (fewer := fewer_tasks(player.parts, tasks)):  # said once in a run
                heartbeat.send_message(f"{called('evaluation', name)}: {fewer}")

            def keep(lease: Lease, member: int, one: EpisodeResult, title: str = title) -> None:
                episodes.record(
                    title, lease, member, one.outcome, one.trajectories, one.failed_branches, one.image_files
                )

            first = episodes.reserve(title, tasks)
            playing = evaluate(player, label, tasks, samples, heartbeat.send_message, first=first, keep=keep)
            result = await run_or_stop(playing, stop)
            record = msgspec.structs.replace(result, step=step, suite=name)
            append(context.dir, record)
            heartbeat.send_message(evaluation_line(record))


def evaluate_checkpoint(label: str, step: int, context: RunContext, heartbeat: HeartbeatSender) -> None:
    """Evaluate the checkpoint of `step` on a server of its own."""
    from ..checkpoint_evaluation import evaluate_checkpoint

    heartbeat.ready()
    evaluate_checkpoint(context.config, context.dir, label, step, heartbeat.send_message)


async def rater(context: RunContext, index: int, heartbeat: HeartbeatSender, stop: asyncio.Event) -> None:
    """Rate the rows of a data set that have no rating yet, see `RatingPlan`."""
    from ...common.scores import TaskRating
    from ...envs.dataset.source import DatasetSource
    from ...monitor.metrics import MetricsWriter
    from ...rollout.rating import rate
    from ..rating import PLAN, RatingPlan, read_ratings
    from .factory import make_agents, make_player, make_router

    config, plan = context.config, msgspec.json.decode((context.dir / PLAN).read_bytes(), type=RatingPlan)
    path = Path(plan.ratings)
    async with (
        make_router(context, heartbeat.role, None, heartbeat.report_false_replies) as router,
        make_agents(config) as agents,
    ):
        temperature = config.rollout.temperature
        make = functools.partial(make_player, config, agents, router, split="train", temperature=temperature)
        player = await in_thread(make, "make_player")
        source = player.parts[0].source
        assert isinstance(source, DatasetSource)
        _ready(heartbeat)
        rows = {source.row_number(task): task for task in range(len(source))}
        wanted = sorted(rows)[: plan.rows or None]
        with MetricsWriter(path) as writer:
            known = {one.task for one in read_ratings(path)}
            tasks, done = [rows[number] for number in wanted if number not in known], 0

            def rated(one: TaskRating) -> None:
                nonlocal done
                done += 1
                writer.append(msgspec.structs.replace(one, task=source.row_number(one.task)))
                if done % max(1, len(tasks) // 10) == 0:
                    heartbeat.send_message(f"{len(wanted) - len(tasks) + done} of {len(wanted)} rows are rated")

            await run_or_stop(rate(player, tasks, plan.samples, rated), stop)


async def learner(
    peers: PeerTable | None, context: RunContext, index: int, heartbeat: HeartbeatSender, stop: asyncio.Event
) -> None:
    from .learner_rank import open_rank

    async with open_rank(peers, context, index, heartbeat, stop) as rank:
        await rank.loop.run(stop, functools.partial(_ready, heartbeat))
        await rank.finish()


async def aux_model(
    kind: AuxModel,
    peers: PeerTable | None,
    context: RunContext,
    index: int,
    heartbeat: HeartbeatSender,
    stop: asyncio.Event,
) -> None:
    """A rank of the placed auxiliary model `kind`, which it serves until it is stopped; of all references of a mixture."""
    from ...learner.aux_models.service import AuxModelService
    from .factory import make_critic, make_reference, ranked, reference_models

    config = ranked(context.config, context.config.learner.aux_models[kind])
    with contextlib.ExitStack() as stack:  # the first model joined the process group, and is closed last
        trained = stack.enter_context(contextlib.closing(make_critic(config))) if kind == "critic" else None
        others = () if trained else reference_models(config)
        models = [stack.enter_context(contextlib.closing(make_reference(config, model))) for model in others]
        address = context.addresses.aux_models[kind][index]
        held = [trained] if trained else models
        service = AuxModelService(context.config.learner, heartbeat.role, address, held, trained, peers)
        async with following_peers(context, filling(peers)):
            await run_or_stop(service.serve(functools.partial(_ready, heartbeat)), stop)


async def sft(context: RunContext, index: int, heartbeat: HeartbeatSender, stop: asyncio.Event) -> None:
    from ..sft import run_rank

    # SIGTERM ends it at once: there is nothing to save before the end, and this event loop is blocked until then.
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    run_rank(context, heartbeat.send_message if index == 0 else lambda _: None)
