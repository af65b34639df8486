"""The training loop: take, step, commit, publish.

    buffer ──take(v)──> aux models, advantages ──> step ──> commit(v) ──> publish(v + 1)
                                                             └── every so often: checkpoint

    while the critic warms up:  take(v) ──> aux models, advantages ──> step of the critic ──> discard the batch; v stays

    who waits          for what                                        until
    every rank         the batch of version v                          learner.batch_s, then DeadlineExceeded
    rank 0             aux models in ranks of their own                learner.batch_s, then LearnerError
    rank 0             replicas that take the new weights              rollout.episode_s / 5 each; the late are left out
    every rank         the other ranks, in each collective             the backend's timeout, then LearnerError
    every rank         the previous checkpoint, at the next, at the end  learner.batch_s, then DeadlineExceeded

Invariants:
- All ranks run this same loop over the same headers; each plans the same steps, and fetches the rows that it works on.
- The commit comes after the optimizer step and before the weights are gathered, so no rank asks for a batch too early.
- Only rank 0 commits, publishes, reports and prunes.
- Settings that change while the run goes on are those that rank 0 knows when a batch was taken: all ranks step with the same.
- A batch that cannot be trained on is set aside (`unusable`). Where a rank proves which group is at fault, all ranks take the batch
  again without it. Where a step fails by what may be the data, the rank tells the buffer and ends; the step is tried once more.
- The ranks agree on a stop between two steps. A stop leaves a checkpoint of the last commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TypeVar

import msgspec

from ..buffer.client import BufferClient
from ..buffer.messages import BatchPlan
from ..buffer.trajectory import BatchRow, Trajectory
from ..common.annotations import RecordAnnotations, no_annotations
from ..common.spans import RecordSpan, no_record, timed
from ..configs.schema import Learner
from ..errors import DeadlineExceeded, StateError, describe
from ..weightsync.publisher import Publisher
from .algorithms import advantage_of, returns_of
from .algorithms.estimators import assign_advantages, overlong
from .annotations import StepAnnotations, choose
from .aux_models.aux_models import AuxModels
from .backend import Backend
from .batch import TrainBatch, flatten, trainable, with_rows
from .checkpoint import CheckpointState
from .checkpointing import Checkpointer
from .metrics import AuxModelsResult, PolicyStepResult, StepMetrics, StepTimer, summarize, without_loss
from .replica_updates import ReplicaUpdates
from .step import PolicyStepper
from .unusable import UnusableBatch, faulty_groups, may_be_data, why_unusable

log = logging.getLogger(__name__)

FRESH = 8  # trajectories scored per step only to compare learner and engine; a few percent of a batch

S = TypeVar("S")
Stepped = tuple[TrainBatch, PolicyStepResult, AuxModelsResult, StepAnnotations]


class TrainingLoop:
    """One rank of the learner."""

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
        settings: Callable[[], Learner] | None = None,  # on rank 0: the config in force; None where it stays as it is
        # On every rank: receives the version that a step made, and those of its trajectories that this rank has the tokens of.
        on_trained: Callable[[int, Collection[Trajectory]], None] = lambda version, rows: None,
    ) -> None:
        self._record, self._annotate, self._annotations_bytes = record, annotate, annotations_bytes
        self._on_trained = on_trained
        self._phase, self._version = "start", 0
        self._config, self._backend, self._buffer, self._report = config, backend, buffer, report
        self._settings = settings or (lambda: config)
        self._aux_models = aux_models or AuxModels(config)
        self._vocabulary = vocabulary
        self._advantage, self._returns = advantage_of(config.algorithm), returns_of(config.algorithm)
        self._shape = overlong(config.algorithm.overlong, longest)
        self._stepper = PolicyStepper(config, backend, longest)
        self._updates = ReplicaUpdates(backend, buffer, publisher, joined, canary_ids)
        self._checkpoints = Checkpointer(
            config, backend, self._aux_models, buffer, checkpoints, retained, on_checkpoint
        )

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> CheckpointState:
        """Train from the newest checkpoint to `learner.steps`, or until `stop`. Returns what the last checkpoint holds."""
        try:
            return await self._train(stop, on_ready)
        finally:
            await self._updates.close()
            await self._checkpoints.close()

    async def _train(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> CheckpointState:
        with self._in_phase("recover", 0):
            state = await self._checkpoints.recover(self._updates.score_canary)
        with self._in_phase("publish", state.version):
            await self._updates.publish(state.version)
        with self._in_phase("first_rollout", state.version):
            await self._updates.first_rollout(on_ready, stop)
        timer = StepTimer(await self._buffer.stats())
        while state.step < self._config.steps:
            with self._in_phase("take", state.version):
                taken = await self._take(state, stop)
            if taken is None:
                break
            timer.took(taken)
            if state.step < self._stepper.first_step:
                state = await self._warm_up(taken, state, timer)
            else:
                state = await self._train_on(taken, state, timer)
        await self._checkpoints.save_last(state)
        return state

    async def _train_on(self, taken: BatchPlan[BatchRow], state: CheckpointState, timer: StepTimer) -> CheckpointState:
        """Make the next version from a batch; none where groups of it are set aside, and it is taken again."""
        with self._in_phase("train", state.version):
            self._agree()
            stepped = await self._attempt(self._step, taken, state)
        if stepped is None:
            return state
        batch, result, aux_result, seen = stepped
        with self._in_phase("commit", state.version):
            state = await self._commit(state, self._stepper.carried(batch, result))
            self._annotate(state.version, seen.finish())
            timer.stepped(await self._buffer.stats(), int(batch.sizes.sum()))
        with self._in_phase("publish", state.version):
            push = await self._updates.publish(state.version)
        with self._in_phase("checkpoint", state.version):
            await self._checkpoints.after_step(state)
        if push is not None:
            summary = summarize(taken.groups, batch, taken.withheld)
            self._report(timer.row(state, summary, result, aux_result, push))
        return state

    async def _warm_up(self, taken: BatchPlan[BatchRow], state: CheckpointState, timer: StepTimer) -> CheckpointState:
        """Train the critic alone on a batch, which is then discarded: there is no other version, and nothing to push."""
        with self._in_phase("train", state.version):
            self._agree()
            stepped = await self._attempt(self._step_critic, taken, state)
        if stepped is None:
            return state
        batch, aux_result = stepped
        with self._in_phase("commit", state.version):
            if self._backend.rank == 0:
                groups = [group[0].group_id for group in taken.groups]
                await self._buffer.discard_batch(state.version, groups, "critic_warmup")
            self._backend.maximum(0.0)  # no rank takes the next batch while this one is there: both are of one version
            state = CheckpointState(step=state.step + 1, version=state.version, algorithm=state.algorithm)
            timer.stepped(await self._buffer.stats(), int(batch.sizes.sum()))
        with self._in_phase("checkpoint", state.version):
            await self._checkpoints.after_step(state)
        if (push := self._updates.no_push(state.version)) is not None:
            summary = summarize(taken.groups, batch, taken.withheld)
            self._report(timer.row(state, without_loss(summary), None, aux_result, push))
        return state

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

    def _agree(self) -> None:
        """Collective. Every rank follows the settings that rank 0 knows now."""
        config, first = self._settings(), self._backend.rank == 0
        self._stepper.peak_lr = self._backend.maximum(config.optimizer.lr if first else 0.0)
        self._checkpoints.every = int(self._backend.maximum(config.checkpoint_every if first else 0))

    async def _attempt(
        self,
        step: Callable[[BatchPlan[BatchRow], CheckpointState], Awaitable[S | None]],
        taken: BatchPlan[BatchRow],
        state: CheckpointState,
    ) -> S | None:
        """Collective. What `step` returns, which is None where groups of the batch are set aside: then it is taken again. Raises
        UnusableBatch where this rank failed by what may be the data."""
        try:
            return await step(taken, state)
        except Exception as error:
            if not may_be_data(error):
                raise
            why = describe(error)
            try:
                if faulty := faulty_groups(taken.groups, state.version):
                    aside = await self._buffer.set_aside(taken.version, list(faulty), next(iter(faulty.values())))
                else:
                    aside = await self._buffer.step_failed(taken.version, why)
            except StateError as refused:
                raise UnusableBatch(f"{why}; {refused}", final=True) from error
            numbers = ", ".join(map(str, aside))
            then = f"its groups {numbers} are set aside" if aside else "it is tried once more"
            raise UnusableBatch(f"the batch of version {taken.version} cannot be trained on: {why}; {then}") from error

    async def _step_critic(
        self, taken: BatchPlan[BatchRow], state: CheckpointState
    ) -> tuple[TrainBatch, AuxModelsResult] | None:
        """Collective. As `_step`, but the policy takes no step."""
        rows: dict[str, Trajectory] = {}
        if (credited := await self._credited(taken, state, rows)) is None:
            return None
        batch = trainable(credited, max_staleness=state.version - taken.oldest_version)
        await self._fetch(taken, {batch.ids[i] for i in self._aux_models.trained_rows(batch)}, rows)
        if await self._set_aside(taken, rows):
            return None
        batch = with_rows(batch, rows.values())
        return batch, await self._aux_models.learn(batch)()

    async def _step(self, taken: BatchPlan[BatchRow], state: CheckpointState) -> Stepped | None:
        """Collective. Compute advantages, then step the policy and the trained aux model. This rank fetches the rows that it works
        on. None where some of them are proven to be unusable, and set aside."""
        rows: dict[str, Trajectory] = {}
        if (credited := await self._credited(taken, state, rows)) is None:
            return None
        batch = trainable(credited, max_staleness=state.version - taken.oldest_version)
        aux_batch, plan = self._aux_models.training_batch(credited, batch), self._stepper.plan(batch)
        wanted = {batch.ids[i] for i in chain.from_iterable(chain.from_iterable(plan))}
        await self._fetch(taken, wanted | {aux_batch.ids[i] for i in self._aux_models.trained_rows(aux_batch)}, rows)
        if await self._set_aside(taken, rows):
            return None
        whole = with_rows(batch, rows.values())
        batch, aux_batch = whole, whole if aux_batch is batch else with_rows(aux_batch, rows.values())
        fresh = await self._buffer.fresh(state.version, FRESH) if self._backend.rank == 0 else ()
        fresh = [row for row in self._replayable(fresh) if not self._why_unusable(row)]  # found when its batch is taken
        aux_result = self._aux_models.learn(aux_batch)
        seen = StepAnnotations(choose(batch, self._annotations_bytes))
        result = self._stepper.step(batch, plan, fresh, state, seen.of)
        learned = await aux_result()
        self._on_trained(state.version + 1, rows.values())
        return batch, result, learned, seen

    async def _set_aside(self, taken: BatchPlan[BatchRow], rows: Mapping[str, Trajectory]) -> bool:
        """Collective. Have the buffer set aside the groups of `rows` that are proven to be unusable; whether any rank has such."""
        proven = {row.group_id: why for row in rows.values() if (why := self._why_unusable(row))}
        if not self._backend.maximum(len(proven)):  # all ranks have their rows, so that the batch may change
            return False
        for group, why in proven.items():
            log.error("group %d is set aside: %s", group, why)
            try:
                await self._buffer.set_aside(taken.version, [group], why)
            except StateError as refused:
                raise UnusableBatch(f"{why}; {refused}", final=True) from refused
        self._backend.maximum(0.0)  # all ranks have told the buffer
        return True

    async def _credited(
        self, taken: BatchPlan[BatchRow], state: CheckpointState, rows: dict[str, Trajectory]
    ) -> TrainBatch | None:
        """Collective. All sequences, with what aux models and estimators give their tokens. Those scored here are added to `rows`.
        None as `_step`."""
        flat = flatten(taken.groups, state.version, withheld=taken.withheld, shape=self._shape)
        flat = msgspec.structs.replace(flat, carried=dict(state.algorithm))
        wanted = self._aux_models.scored_rows(flat)
        await self._fetch(taken, {flat.ids[i] for i in wanted}, rows)
        if await self._set_aside(taken, rows):
            return None
        scored = await self._aux_models.score(with_rows(flat, rows.values()) if wanted else flat)
        return assign_advantages(scored, self._advantage, self._returns)

    async def _fetch(self, taken: BatchPlan[BatchRow], names: Collection[str], rows: dict[str, Trajectory]) -> None:
        """Add the trajectories `names` of the batch to `rows`, where they are not there."""
        missing = [row for row in chain.from_iterable(taken.groups) if row.id in names and row.id not in rows]
        if missing:
            rows |= {row.id: row for row in self._replayable(await self._buffer.fetch_rows(taken.version, missing))}

    def _why_unusable(self, row: Trajectory) -> str:
        return why_unusable(row, self._vocabulary, self._backend.routers)

    def _replayable(self, rows: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """`rows` without experts that no router takes over: the option may have been on before."""
        if self._backend.routers is not None:
            return rows
        return [row if row.experts is None else msgspec.structs.replace(row, experts=None) for row in rows]

    async def _commit(self, state: CheckpointState, carried: dict[str, float]) -> CheckpointState:
        if self._backend.rank == 0:
            await self._buffer.commit(state.version)
        return CheckpointState(step=state.step + 1, version=state.version + 1, algorithm=carried)

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
