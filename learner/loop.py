"""The training loop: take, step, commit, publish.

    buffer ──take(v)──> aux models, advantages ──> step ──> commit(v) ──> publish(v + 1)
                                                             └── every so often: checkpoint

    while the critic warms up:  take(v) ──> aux models, advantages ──> step of the critic ──> discard the batch; v stays
    colocated replicas:         take(v) ──> they sleep ──> step, commit(v) ──> they wake with v + 1, or with v again
    a program (`launch.program`) between the verbs of rank 0:  take(v) ──> step, or discard(v) and v stays, or leave

    who waits          for what                                        until
    every rank         the batch of version v                          learner.batch_s, then DeadlineExceeded
    rank 0             aux models in ranks of their own                learner.batch_s, then LearnerError
    rank 0             replicas that take the new weights              the config's `push_s` for all; the late are left out
    rank 0             replicas that free their memory                 a quarter of that; the late are left out
    every rank         the other ranks, in each collective             the backend's timeout, then LearnerError
    every rank         the previous checkpoint, at the next, at the end  learner.batch_s, then DeadlineExceeded
    rank 0             the buffer, to know of a checkpoint, after a stop  `checkpointing.STOPPED_S`, then it goes on
    every rank         the buffer's answers in a commit, after a stop     `checkpointing.COMMIT_S`, then DeadlineExceeded

Invariants:
- All ranks run this same loop over the same headers; each plans the same steps, and reads the rows that it works on.
- The commit comes after the optimizer step and before the weights are gathered, so no rank asks for a batch too early.
- Only rank 0 commits, publishes, reports and prunes.
- Settings that change while the run goes on are those that rank 0 knows when a batch was taken: all ranks step with the same.
- A batch that cannot be trained on is set aside (`batch_trainer`). Where a rank proves which group is at fault, all ranks take the
  batch again without it. Where a step fails by what may be the data, the rank tells the buffer and ends; the step is tried once
  more.
- The ranks agree on a stop between two steps. A stop leaves a checkpoint of the last commit; where the buffer has ended for good
  in the midst of a commit, the next start goes on from the checkpoint before.
- No rank steps before all replicas sleep, in a run in which they do. Whatever becomes of the batch, they wake before the next is
  taken; where the step fails, they wake when the ranks have started again.
- What is done with a batch is rank 0's choice, which the others learn in the step that they begin. No other batch is taken before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..buffer.client import BufferClient
from ..buffer.ledger import Unstepped
from ..buffer.messages import BatchPlan
from ..buffer.trajectory import BatchRow, Trajectory
from ..common.annotations import RecordAnnotations, no_annotations
from ..common.spans import RecordSpan, no_record, timed
from ..configs.schema import Learner
from ..errors import DeadlineExceeded, StateError
from ..weightsync.publisher import Publisher
from .aux_models.aux_models import AuxModels
from .backend import Backend
from .batch import TrainBatch
from .batch_trainer import BatchTrainer
from .checkpoint_folder import CheckpointState
from .checkpointing import COMMIT_S, Checkpointer, answered
from .metrics import StepMetrics, StepTimer, summarize, without_loss
from .replica_updates import ReplicaUpdates
from .traces import ExpertTraces

log = logging.getLogger(__name__)
T = TypeVar("T")

# What rank 0 does with a batch.
STEP, DISCARD, LEAVE = 0, 1, 2


class TrainingLoop:
    """One rank of the learner: `begin`, then `take` and `step` or `discard` in turn, then `save` or `leave`, and `close`. All of it
    is `run`.

    Attributes:
        state: step and version of the weights, as they were last committed.
        taken: the batch that is neither stepped nor discarded yet, if there is one.
    """

    def __init__(
        self,
        config: Learner,
        backend: Backend,
        buffer: BufferClient,
        publisher: Publisher | None,  # on rank 0 how weights leave; None on the others
        joined: asyncio.Event,  # set on rank 0 whenever a replica answers that serves no version yet
        checkpoints: Path,
        canary_ids: Sequence[int],  # the fixed prompt of every push
        report: Callable[[StepMetrics], None],  # receives each step's metrics, on rank 0
        longest: int,  # tokens of the longest possible episode, `agent.max_tokens`
        vocabulary: int,  # token ids are below it
        aux_models: AuxModels | None = None,
        *,
        # On rank 0: which of the older checkpoints stay, of all by their steps; and what hears the step of each that is complete.
        retained: Callable[[Collection[int]], Collection[int]] = lambda steps: (),
        on_checkpoint: Callable[[int], None] = lambda step: None,
        record: RecordSpan = no_record,  # receives the phases of each step
        annotate: RecordAnnotations = no_annotations,  # after each commit, what this rank saw at tokens of some groups
        annotations_bytes: int = 0,  # of one step, all ranks together
        before_wake: Callable[[], None] = lambda: None,  # on every rank: frees memory that replicas want when they wake
        settings: Callable[[], Learner] | None = None,  # on rank 0: the config in force; None where it stays as it is
        # On every rank: receives the version that a step made, and those of its trajectories that this rank has the tokens of.
        on_trained: Callable[[int, Collection[Trajectory]], None] = lambda version, rows: None,
        traces: ExpertTraces | None = None,  # which join the groups of their tasks
    ) -> None:
        self._record, self._annotate = record, annotate
        self._phase, self._version = "start", 0
        self.state = CheckpointState(step=0, version=0)
        self._stop, self._left = asyncio.Event(), False
        self.taken: BatchPlan[BatchRow] | None = None
        self._config, self._backend, self._buffer, self._report = config, backend, buffer, report
        self._settings = settings or (lambda: config)
        aux_models = aux_models or AuxModels(config)
        self._trainer = BatchTrainer(
            config,
            backend,
            buffer,
            aux_models,
            longest,
            vocabulary,
            annotations_bytes=annotations_bytes,
            on_trained=on_trained,
            traces=traces or ExpertTraces(),
        )
        self._updates = ReplicaUpdates(backend, buffer, publisher, joined, canary_ids, before_wake)
        self._checkpoints = Checkpointer(config, backend, aux_models, buffer, checkpoints, retained, on_checkpoint)

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> CheckpointState:
        """Train from the newest checkpoint to `learner.steps`, or until `stop`. Returns what the last checkpoint holds."""
        try:
            await self.begin(stop, on_ready)
            while (taken := await self.take()) is not None:
                await self.step(taken)
            await self.save()
            return self.state
        finally:
            await self.close()

    async def begin(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Collective. Recover, have the replicas serve that version, and return when the first group is played, or at `stop`."""
        self._stop = self._checkpoints.stop = stop
        with self._in_phase("recover", 0):
            self.state = await self._checkpoints.recover(self._updates.score_canary)
        with self._in_phase("publish", self.state.version):
            await self._updates.publish(self.state.version)
        with self._in_phase("first_rollout", self.state.version):
            await self._updates.first_rollout(on_ready, stop)
        self._timer = StepTimer(await self._buffer.stats())

    async def take(self) -> BatchPlan[BatchRow] | None:
        """Collective. The next batch; None after the last step, when any rank was asked to stop, and when rank 0 has left. Raises
        DeadlineExceeded without one in `learner.batch_s`, after a checkpoint of all that was learned; StateError where the batch
        before is neither stepped nor discarded."""
        self.require(None)
        if self._left or self.state.step >= self._config.steps:
            return None
        self._timer.asks()
        with self._in_phase("take", self.state.version):
            self.taken = await self._take(self.state, self._stop)
        if self.taken is None:
            self._left = True
        else:
            self._timer.took(self.taken)
        return self.taken

    async def step(self, taken: BatchPlan[BatchRow]) -> StepMetrics | None:
        """Collective. Make the next version from the batch, and publish it; while the critic warms up, none. The metrics, which are
        reported, too; None on ranks other than 0, and where groups of the batch are set aside and it is taken again."""
        self._settle(taken)
        if self._updates.sleeps:
            with self._in_phase("sleep", self.state.version):
                await self._updates.sleep()  # the other ranks wait for this one
        choice = self._agree(STEP)
        if choice == DISCARD:
            await self._give_up(taken, "program")
        elif choice == LEAVE:
            self._left = True
        elif self.state.step < self._trainer.first_step:
            return await self._warm_up(taken, self.state)
        else:
            return await self._train_on(taken, self.state)
        return None

    async def discard(self, taken: BatchPlan[BatchRow]) -> None:
        """Collective, called by rank 0. Nothing is learned from the batch: the next one is of the same version."""
        self._settle(taken)
        self._agree(DISCARD)
        await self._give_up(taken, "program")

    async def leave(self) -> None:
        """Collective, called by rank 0 once all ranks are asked to stop. No batch is taken any more; one that is taken and not
        stepped goes back to the buffer when the run is resumed. Leaves a checkpoint."""
        if self.taken is not None:
            self._settle(self.taken)
            self._agree(LEAVE)
        elif not self._left and self.state.step < self._config.steps:
            self._stop.set()
            await self.take()
        self._left = True
        await self.save()

    async def save(self) -> None:
        """Collective. Return when a checkpoint of the last commit is complete on disk."""
        await self._checkpoints.save_last(self.state)

    async def close(self) -> None:
        await self._updates.close()
        await self._checkpoints.close()

    def require(self, taken: BatchPlan[BatchRow] | None) -> None:
        """Raises StateError where this is not the batch that is to be stepped or discarded; with None where there is one."""
        if self.taken is not None and taken is None:
            raise StateError(f"the batch of version {self.taken.version} is neither stepped nor discarded yet")
        if taken is not self.taken:
            version = taken.version if taken else 0
            raise StateError(f"the batch of version {version} is not the newest, or it was stepped or discarded before")

    def _settle(self, taken: BatchPlan[BatchRow]) -> None:
        self.require(taken)
        self.taken = None

    async def _train_on(self, taken: BatchPlan[BatchRow], state: CheckpointState) -> StepMetrics | None:
        with self._in_phase("train", state.version):
            stepped = await self._trainer.step(taken, state)
        if stepped is None:
            return await self._wake(state.version)
        batch, result, aux_result, seen = stepped
        with self._in_phase("commit", state.version):
            self.state = state = await self._commit(state, self._trainer.carried(batch, result))
            self._annotate(state.version, seen.finish())
            await self._note_step(batch)
        with self._in_phase("publish", state.version):
            push = await self._updates.publish(state.version)
        with self._in_phase("checkpoint", state.version):
            await self._checkpoints.after_step(state)
        if push is None:
            return None
        summary = summarize(taken.groups, batch, taken.withheld)
        return self._reported(self._timer.row(state, summary, result, aux_result, push))

    async def _warm_up(self, taken: BatchPlan[BatchRow], state: CheckpointState) -> StepMetrics | None:
        """Train the critic alone on a batch, which is then discarded: there is no other version, and nothing to push."""
        with self._in_phase("train", state.version):
            stepped = await self._trainer.step_critic(taken, state)
        if stepped is None:
            return await self._wake(state.version)
        batch, aux_result = stepped
        with self._in_phase("commit", state.version):
            await self._give_up(taken, "critic_warmup")
            carried = self._trainer.carried(batch, None)
            self.state = state = msgspec.structs.replace(state, step=state.step + 1, algorithm=carried)
            await self._note_step(batch)
        with self._in_phase("publish", state.version):
            push = await self._updates.no_push(state.version)
        with self._in_phase("checkpoint", state.version):
            await self._checkpoints.after_step(state)
        if push is None:
            return None
        summary = summarize(taken.groups, batch, taken.withheld)
        return self._reported(self._timer.row(state, without_loss(summary), None, aux_result, push))

    async def _wake(self, version: int) -> None:
        """The batch is taken again, without the groups that were set aside: replicas play others."""
        with self._in_phase("publish", version):
            await self._updates.wake()

    def _reported(self, metrics: StepMetrics) -> StepMetrics:
        self._report(metrics)
        return metrics

    async def _give_up(self, taken: BatchPlan[BatchRow], reason: Unstepped) -> None:
        """Collective. Have the buffer discard the batch."""
        if self._backend.rank == 0:
            groups = [group[0].group_id for group in taken.groups]
            discard = self._buffer.discard_batch(taken.version, groups, reason)
            await self._answered(discard, "the buffer to discard a batch")
        self._backend.maximum(0.0)  # no rank takes the next batch while this one is there: both are of one version

    def gauges(self) -> dict[str, str | int]:
        """What this rank does, and at which version. From any thread."""
        return {"phase": self._phase, "version": self._version}

    @contextlib.contextmanager
    def _in_phase(self, phase: str, version: int) -> Iterator[None]:
        self._phase, self._version = phase, version
        with timed(self._record, phase, version=version):
            yield

    async def _take(self, state: CheckpointState, stop: asyncio.Event) -> BatchPlan[BatchRow] | None:
        """Collective. The batch of `state.version`, None when any rank was asked to stop. Raises DeadlineExceeded without one in
        `learner.batch_s`, after a checkpoint of all that was learned."""
        take = asyncio.create_task(self._buffer.take_plan(state.version, self._config.batch_s), name="batch")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            while not (take.done() or stopped.done()):
                await self._updates.wait_any({take, stopped})
            late = take.done() and isinstance(take.exception(), DeadlineExceeded)
            if self._backend.maximum(late):
                await self._checkpoints.save_last(state)
                raise await self._late_batch(state.version)
            return None if self._backend.maximum(stopped.done()) else await take
        finally:
            take.cancel()
            stopped.cancel()

    def _agree(self, choice: int) -> int:
        """Collective. Every rank follows the settings that rank 0 knows now, and its `choice`, which this returns."""
        config, first = self._settings(), self._backend.rank == 0
        self._trainer.follow(self._backend.maximum(config.optimizer.lr if first else 0.0))
        self._checkpoints.every = int(self._backend.maximum(config.checkpoint_every if first else 0))
        return int(self._backend.maximum(choice if first else 0))

    async def _commit(self, state: CheckpointState, carried: dict[str, float]) -> CheckpointState:
        if self._backend.rank == 0:
            await self._answered(self._buffer.commit(state.version), "the buffer to commit a step")
        return CheckpointState(step=state.step + 1, version=state.version + 1, algorithm=carried)

    async def _note_step(self, batch: TrainBatch) -> None:
        stats = await self._answered(self._buffer.stats(), "the buffer's counts")
        self._timer.stepped(stats, int(batch.sizes.sum()))

    async def _answered(self, request: Coroutine[Any, Any, T], waits_for: str) -> T:
        return await answered(request, self._stop, COMMIT_S, waits_for)

    async def _late_batch(self, version: int) -> DeadlineExceeded:
        stats = await self._buffer.stats()
        hint = f"{stats.ready_groups} groups are ready, {stats.leased_groups} are being played; see the workers' logs"
        if stats.refilled_groups:
            hint += (
                f"; {stats.refilled_groups} groups of this run were discarded because all their rewards were equal "
                "(buffer.dynamic_sampling)"
            )
        return DeadlineExceeded("the learner", f"the batch of version {version}", self._config.batch_s, hint)

    async def serve(self, stop: asyncio.Event) -> None:
        """After the last step, until `stop`: a replica that joins, or comes back, still gets its weights."""
        await self._updates.serve(stop)
