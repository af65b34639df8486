"""The training loop: take a batch, step, commit, publish, again.

    buffer ──take(v)──> scores ──> credit, sequences ──> step ──> commit(v) ──> publish(v + 1) ──> served(v + 1)
                                                                    └── every so often: checkpoint

    who waits          for what                                        until
    every rank         the batch of version v                          learner.batch_s, then DeadlineExceeded
    rank 0             models beside the policy that are placed        learner.batch_s, then LearnerError
    rank 0             replicas that came (back)                       never: they are brought the weights meanwhile
    rank 0             replicas that take the new weights              weightsync.push_s each; the late are left out
    every rank         the other ranks, in each collective             the backend's timeout, then LearnerError
    every rank         the checkpoint before, at the next and the end  learner.batch_s, then DeadlineExceeded

Invariants:
- All ranks run this same loop over the same batches: `take` gives every rank the same batch until it is committed.
- The commit comes after the optimizer step and before the weights are gathered, so no rank asks for a batch too early.
- Only rank 0 commits, publishes, reports and prunes.
- A stop is agreed on between two steps; it leaves a checkpoint of the last commit.
- Checkpoints are written one at a time, while training goes on. The buffer is told of one when it is whole on disk, and
  not before: from then on its commits are final.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from ..buffer.client import BufferClient
from ..buffer.messages import Batch
from ..configs.schema import Learner
from ..errors import CheckpointError, ConfigError, DeadlineExceeded, within
from ..weightsync.plan import PushReport
from ..weightsync.publisher import Publisher
from . import checkpoint
from .algorithms import advantage_of, overlong
from .backend import Backend
from .batch import (
    scoring_row,
    summarize,
    to_sequences,
)
from .checkpoint import CheckpointState
from .companions import Companions
from .meter import StepMeter
from .metrics import StepMetrics
from .model import MODEL_KEY
from .step import Stepper

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between looks at the buffer until the first group is being played."""

FRESH = 8
"""Trajectories scored per step only to compare learner and engine; a few percent of a batch."""


class TrainingLoop:
    """One rank of the learner.

    Args:
        config: the learner's section.
        backend: this rank's part of the model.
        buffer: where batches come from.
        publisher: on rank 0 how weights leave; None on the others.
        joined: set on rank 0 whenever a replica answers that serves nothing yet.
        checkpoints: folder that checkpoints live in.
        canary_ids: the fixed prompt of every push.
        report: receives each step's metrics, on rank 0.
        longest: tokens of the longest possible episode, `agent.max_tokens`.
        companions: this rank's part of the models beside the policy.
    """

    def __init__(
        self,
        config: Learner,
        backend: Backend,
        buffer: BufferClient,
        publisher: Publisher | None,
        joined: asyncio.Event,
        checkpoints: Path,
        canary_ids: Sequence[int],
        report: Callable[[StepMetrics], None],
        longest: int,
        companions: Companions | None = None,
    ) -> None:
        self._config = config
        self._companions = companions or Companions(config)
        self._backend = backend
        self._buffer = buffer
        self._publisher = publisher
        self._joined = joined
        self._checkpoints = checkpoints
        self._canary = tuple(canary_ids)
        self._report = report
        self._advantage = advantage_of(config.algorithm)
        self._shape = overlong.shaping(config.algorithm.overlong, longest)
        self._stepper = Stepper(config, backend, longest)
        self._served: int | None = None
        self._catching: asyncio.Task[None] | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._saving: asyncio.Task[None] | None = None

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> CheckpointState:
        """Train from the newest checkpoint to `learner.steps`, or until `stop`. Returns what the last checkpoint holds."""
        try:
            return await self._train(stop, on_ready)
        finally:
            await self._leave()

    async def _train(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> CheckpointState:
        state = await self._recover()
        await self._publish(state.version)
        await self._until_played(on_ready, stop)
        meter = StepMeter(await self._buffer.stats())
        while state.step < self._config.steps:
            batch = await self._next_batch(state, stop)
            if batch is None:
                break
            meter.took(batch)
            sequences = to_sequences(
                batch.groups,
                self._advantage,
                state.version,
                batch.oldest_version,
                batch.withheld,
                scores=await self._companions.score(batch.groups),
                shape=self._shape,
            )
            fresh = await self._buffer.fresh(state.version, FRESH) if self._backend.rank == 0 else ()
            learnt = self._companions.learn(sequences)
            done, beside = self._stepper.step(sequences, fresh, state), await learnt()
            if self._backend.rank == 0:
                await self._buffer.commit(state.version)
            meter.stepped(await self._buffer.stats())
            state = CheckpointState(step=state.step + 1, version=state.version + 1)
            push = await self._publish(state.version)
            if self._saving is not None and self._saving.done():
                await self._saved_whole()
            if state.step % self._config.checkpoint.every == 0:
                await self._save(state)
            if push is not None:
                self._report(meter.row(state, summarize(batch.groups, sequences, batch.withheld), done, beside, push))
        await self._save_last(state)
        return state

    async def serve(self, stop: asyncio.Event) -> None:
        """After the last step, until `stop`: a replica that comes, or comes back, still gets its weights."""
        stopped = asyncio.create_task(stop.wait(), name="stop")
        if self._publisher is not None:
            self._joined.set()  # somebody may have been left out when training ended
        try:
            while not stopped.done():
                await self._meanwhile({stopped})
        finally:
            stopped.cancel()
            await self._leave()

    async def _until_played(self, on_ready: Callable[[], None], stop: asyncio.Event) -> None:
        """Return when the first group is being played. What comes before, an evaluation for example, takes the time it takes
        and counts neither as waiting nor towards `batch_s`."""
        announced = False
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            while not stopped.done():
                if not announced and (self._publisher is None or self._served is not None):
                    announced = True
                    on_ready()
                stats = await self._buffer.stats()
                if stats.leased_groups or stats.ready_groups:
                    return
                await self._meanwhile({stopped}, LOOK_S)
        finally:
            stopped.cancel()

    async def _meanwhile(self, waits: Collection[asyncio.Task[Any]], seconds: float | None = None) -> None:
        """Return when one of `waits` is done, after `seconds`, or when there is news of replicas that came (back): they are brought
        the weights in a task of its own, which goes on while `waits` are dealt with."""
        if self._catching is not None and self._catching.done():
            catching, self._catching = self._catching, None
            catching.result()
        if self._catching is None and self._joined.is_set() and self._publisher is not None:
            self._joined.clear()
            self._catching = asyncio.create_task(self._catch_up(self._publisher), name="catch up")
        news = self._catching or asyncio.create_task(self._joined.wait(), name="joined")
        try:
            await asyncio.wait({*waits, news}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if news is not self._catching:
                news.cancel()

    async def _catch_up(self, publisher: Publisher) -> None:
        await self._serve(await publisher.catch_up())

    async def _leave(self) -> None:
        """Nobody is brought anything any more."""
        if self._retry is not None:
            self._retry.cancel()
        for task in (self._catching, self._saving):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        self._catching = self._saving = None

    async def _recover(self) -> CheckpointState:
        """Load the newest checkpoint, if any, and have the buffer roll back what it does not contain.

        Raises:
            CheckpointError: it is damaged, of another model, or computes no numbers.
            ConfigError: there is none, and the model at `model.path` computes no numbers.
        """
        whole = [path for path in checkpoint.checkpoints(self._checkpoints) if self._companions.saved_with(path)]
        state = self._saved = CheckpointState(step=0, version=0)
        if whole:
            state = self._saved = self._backend.load(whole[-1])
            await self._companions.load(whole[-1])
        if not self._scored_canary().isfinite().all():
            told = "gives log-probs that are not finite: its weights are damaged"
            if whole:
                raise CheckpointError(f"checkpoint {whole[-1]} {told}; resume from another")
            raise ConfigError(f"{MODEL_KEY}: the model there {told}; name another")
        version = await self._buffer.recover(state.version) if self._backend.rank == 0 else 0
        version = int(self._backend.maximum(version))
        if version != state.version:
            log.warning(
                "commits after version %d were lost; their weights live on as version %d", state.version, version
            )
        return CheckpointState(step=state.step, version=version)

    async def _next_batch(self, state: CheckpointState, stop: asyncio.Event) -> Batch | None:
        """The batch of `state.version`, None when any rank was asked to stop. Meanwhile replicas that came back catch up.

        Raises:
            DeadlineExceeded: no batch within `batch_s`; what was learnt until then is in a checkpoint.
        """
        take = asyncio.create_task(self._buffer.take(state.version, self._config.batch_s), name="batch")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            while not (take.done() or stopped.done()):
                await self._meanwhile({take, stopped})
            late = take.done() and isinstance(take.exception(), DeadlineExceeded)
            if self._backend.maximum(late):
                await self._save_last(state)
                stats = await self._buffer.stats()
                hint = f"{stats.ready_groups} groups are ready, {stats.leased_groups} are being played; see the workers' logs"
                if stats.refilled_groups:
                    hint += (
                        f"; {stats.refilled_groups} groups of this run were discarded because all their rewards were equal "
                        "(buffer.dynamic_sampling)"
                    )
                raise DeadlineExceeded(
                    "the learner", f"the batch of version {state.version}", self._config.batch_s, hint
                )
            return None if self._backend.maximum(stopped.done()) else await take
        finally:
            take.cancel()
            stopped.cancel()

    async def _publish(self, version: int) -> PushReport | None:
        """Send this rank's part of the weights on their way; on rank 0, see them served."""
        scored = self._scored_canary()
        if self._publisher is None:
            collections.deque(self._backend.named_weights(), maxlen=0)
            return None
        weights = self._backend.named_weights()
        push = await self._publisher.publish(version, weights, self._canary, scored.tolist())
        if self._catching is not None:  # broken off by the push, unless it had ended before
            catching, self._catching = self._catching, None
            await catching
        await self._serve(push)
        return push

    def _scored_canary(self) -> torch.Tensor:
        """Collective. What the policy says of the fixed prompt, but for its first token."""
        return self._backend.logprobs([scoring_row([self._canary])], temperature=1.0)[0][1:]

    async def _serve(self, push: PushReport | None) -> None:
        """Tell the buffer what the engines serve now, and see to it that those who do not are tried again."""
        assert self._publisher is not None
        retry_in = self._publisher.retry_in()
        if self._retry is not None:
            self._retry.cancel()
        if retry_in is not None:
            self._retry = asyncio.get_running_loop().call_later(retry_in, self._joined.set)
        if push is None:
            return
        for name, why in push.failed.items():
            log.warning("%s did not take version %d: %s", name, push.version, why)
        if push.pushed:
            self._served = push.version
            await self._buffer.served(push.version)

    async def _save(self, state: CheckpointState) -> None:
        """Begin to checkpoint `state`, when the checkpoint before it is whole."""
        await self._saved_whole()
        writing = [
            *self._companions.save(self._checkpoints, state),
            asyncio.wrap_future(self._backend.save(checkpoint.path_of(self._checkpoints, state.step), state)),
        ]
        self._saved = state
        self._saving = asyncio.create_task(self._when_written(writing), name="checkpoint")

    async def _save_last(self, state: CheckpointState) -> None:
        """See to it that a whole checkpoint of `state` is there."""
        if self._saved != state:
            await self._save(state)
        await self._saved_whole()

    async def _saved_whole(self) -> None:
        """Return when the checkpoint that was begun, if any, is whole and the buffer knows; raise what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def _when_written(self, writing: Sequence[Awaitable[None]]) -> None:
        """Commits that every kept checkpoint contains can no longer be rolled back."""
        hint = "the disk is too slow, or another rank or a placed model is gone; see learner.batch_s and their logs"
        whole = asyncio.gather(*writing)
        await within(
            self._config.batch_s, whole, who="the learner", waits_for="its checkpoint to be written", hint=hint
        )
        if self._backend.rank == 0:
            checkpoint.prune(self._checkpoints, self._config.checkpoint.keep)
            self._companions.prune(self._checkpoints, self._config.checkpoint.keep)
            oldest = checkpoint.checkpoints(self._checkpoints)[0]
            await self._buffer.checkpointed(checkpoint.read_state(oldest).version)
