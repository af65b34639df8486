"""One rank of the learner and all that it needs of a run: the role `learner` trains with it, a program takes and steps by itself.

Invariants:
- What is opened is closed in the reverse order, however the rank ends.
- Rank 0 alone publishes weights, follows the settings and records the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...common import accelerator
from ...monitor.gpus import VISIBLE, gpu_gauges
from ...monitor.timeline import TimelineWriter
from ..peers import filling, following_peers, trusting
from ..run_context import RunContext, RunSettings, following_settings
from .heartbeat import HeartbeatSender

if TYPE_CHECKING:
    from ...buffer.client import BufferClient
    from ...learner.backend import Backend
    from ...learner.loop import TrainingLoop
    from ...rpc.security import PeerTable
    from ...weightsync.publisher import Publisher


@dataclass(frozen=True)
class LearnerRank:
    loop: TrainingLoop
    client: BufferClient
    context: RunContext
    _backend: Backend
    _heartbeat: HeartbeatSender
    _stop: asyncio.Event

    async def finish(self) -> None:
        """Collective. Where the last step is made: write the model, and serve replicas that come back until the stop."""
        if self.loop.state.step >= self.context.config.learner.steps:
            self._backend.export(self.context.dir / "model")
            self._heartbeat.done()
            await self.loop.serve(self._stop)


@contextlib.asynccontextmanager
async def open_rank(
    peers: PeerTable | None, context: RunContext, index: int, heartbeat: HeartbeatSender, stop: asyncio.Event
) -> AsyncIterator[LearnerRank]:
    """Rank `index`, whose model is loaded and which has not begun. Raises Stopped: `stop` came before a replica was there."""
    from ...learner.loop import TrainingLoop
    from ...learner.metrics import StepMetrics
    from ...learner.model import vocabulary_size
    from ...learner.traces import FILE as TRACES
    from ...learner.traces import read_traces
    from ...monitor.annotations import KEPT_BYTES, STEP_BYTES, AnnotationWriter
    from ...monitor.recorder import Recorder
    from ..evaluations import FILE, retained
    from .factory import buffer_client, make_aux_models, make_backend, make_canary
    from .push_targets import make_publisher
    from .samples import sampler

    config = context.config
    backend = make_backend(config, temperature=config.rollout.temperature)
    first = index == 0
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(backend.close)
        aux_models = make_aux_models(config, backend, context.addresses.aux_models)
        stack.callback(aux_models.close)
        trusted = [trusting(rank, rank.name) for rank in aux_models.clients]
        await stack.enter_async_context(following_peers(context, filling(peers), *trusted))
        client = await stack.enter_async_context(buffer_client(context, heartbeat.role))
        publisher, joined, settings = None, asyncio.Event(), None
        timeline = stack.enter_context(TimelineWriter(context.timeline_dir, heartbeat.role))
        recorded = context.timeline_dir if backend.leads_rows else None
        limit = KEPT_BYTES // backend.data_size
        annotations = stack.enter_context(AnnotationWriter(recorded, heartbeat.role, limit))
        if first:
            publisher, joined = await stack.enter_async_context(
                make_publisher(context, backend.device, heartbeat.report_replica, stop, timeline.record, peers)
            )
            settings = await stack.enter_async_context(
                following_settings(context, functools.partial(_set_cohort, publisher))
            )
        recorder = stack.enter_context(Recorder(context.dir, config, context.dir / FILE)) if first else None

        def report(metrics: StepMetrics) -> None:
            if recorder is not None:
                recorder.step(metrics)
                heartbeat.stepped(metrics)

        loop = TrainingLoop(
            config.learner,
            backend,
            client,
            publisher,
            joined,
            context.dir / "checkpoints",
            make_canary(config),
            report,
            config.agent.max_tokens,
            vocabulary_size(config.model.path),
            aux_models,
            retained=functools.partial(retained, context.dir, config),
            on_checkpoint=heartbeat.saved,
            record=timeline.record,
            annotate=annotations.record,
            annotations_bytes=STEP_BYTES if recorded else 0,
            before_wake=accelerator.empty_cache if config.launch.colocated else lambda: None,
            settings=None if settings is None else lambda: settings.state.config.learner,
            on_trained=sampler(config, context.dir, recorder),
            traces=read_traces(context.dir / TRACES),
        )
        gpus = os.environ.get(VISIBLE) if backend.device.type == "cuda" else ""
        timeline.gauges = lambda: loop.gauges() | {"annotations_dropped": annotations.dropped} | gpu_gauges(gpus)
        yield LearnerRank(loop, client, context, backend, heartbeat, stop)


def _set_cohort(publisher: Publisher, settings: RunSettings) -> None:
    publisher.cohort = settings.config.weightsync.cohort
