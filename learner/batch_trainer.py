"""What one rank does with a batch that was taken: score it, give its tokens advantages, step the policy and the trained aux model;
and which groups of a batch that cannot be trained on the buffer sets aside.

    a rank's rows ──> why_unusable ──> proven: the group is set aside, and the batch taken again, without a restart
    an error of a step ──> may_be_data ──> faulty_groups proves some: they are set aside; else the step is tried once more

Invariants:
- All ranks plan the same over the same headers; each reads the rows that it works on, and no others. An advantage that is a
  function of the user's works on all rows, on every rank.
- A batch that cannot be trained on changes no weights: rows are checked when they arrive, before a model computes with them. The
  check costs a few passes in C over their arrays.
- Memory, a disk, a deadline, another rank or the buffer are never the data: such an error keeps its meaning.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import msgspec
import numpy as np
import torch

from ..buffer.client import BufferClient
from ..buffer.messages import BatchPlan
from ..buffer.trajectory import LOGPROB_LIMIT, BatchRow, Trajectory
from ..common.routed_experts import RouterShape
from ..configs.algorithm import PythonFunction
from ..configs.schema import Learner
from ..errors import LearnerError, SlipstreamError, StateError, describe
from .algorithms import advantage_of, returns_of
from .algorithms.estimators import assign_advantages, overlong
from .annotations import StepAnnotations, choose
from .aux_models.aux_models import AuxModels
from .backend import Backend
from .batch import Group, TrainBatch, flatten, trainable, with_rows
from .checkpoint_folder import CheckpointState
from .distributed import is_peer_failure
from .metrics import AuxModelsResult, PolicyStepResult
from .packing import comparable_tokens
from .step import PolicyStepper
from .traces import ExpertTraces

log = logging.getLogger(__name__)

FRESH = 8
"""Trajectories that a step scores only to compare learner and engine. They are a few percent of a batch; where a step waits for the
host, which launches kernels, their pass costs as much as that of a batch."""

ENOUGH = 1024
"""Tokens of staleness 0 in a batch that make this needless: the step compares these in its own pass."""


def lacks_comparable(batch: TrainBatch) -> bool:
    """Whether a step on `batch` scores fresh trajectories, too."""
    return comparable_tokens(batch) < ENOUGH


S = TypeVar("S")
Stepped = tuple[TrainBatch, PolicyStepResult, AuxModelsResult, StepAnnotations]


class UnusableBatch(LearnerError):
    """The learner cannot step on a batch. Not `final` where it is tried once more, or its groups were set aside."""

    final = False


class BatchTrainer:
    """One rank's. The arguments are those of `TrainingLoop`."""

    def __init__(
        self,
        config: Learner,
        backend: Backend,
        buffer: BufferClient,
        aux_models: AuxModels,
        longest: int,
        vocabulary: int,
        *,
        annotations_bytes: int,
        on_trained: Callable[[int, Collection[Trajectory]], None],
        traces: ExpertTraces,
    ) -> None:
        self._traces = traces
        self._backend, self._buffer, self._aux_models = backend, buffer, aux_models
        self._vocabulary, self._annotations_bytes, self._on_trained = vocabulary, annotations_bytes, on_trained
        self._advantage, self._returns = advantage_of(config.algorithm), returns_of(config.algorithm)
        self._credits_by_rows = isinstance(config.algorithm.advantage, PythonFunction)
        self._shape = overlong(config.algorithm.overlong, longest)
        self._image_files: dict[str, bytes] = {}  # of the batch in hand, by digest
        self._stepper = PolicyStepper(config, backend, longest)
        self.first_step = self._stepper.first_step  # before it the critic alone steps
        self.carried = self._stepper.carried

    def follow(self, lr: float) -> None:
        """From the next step on the learning rate after warm-up is `lr`."""
        self._stepper.peak_lr = lr

    async def step(self, taken: BatchPlan[BatchRow], state: CheckpointState) -> Stepped | None:
        """Collective. Step the policy, and the trained aux model. None where groups of the batch are set aside: then it is taken
        again. Raises UnusableBatch where this rank failed by what may be the data."""
        return await self._attempt(self._policy_step, taken, state)

    async def step_critic(
        self, taken: BatchPlan[BatchRow], state: CheckpointState
    ) -> tuple[TrainBatch, AuxModelsResult] | None:
        """Collective. As `step`, but the policy takes no step."""
        return await self._attempt(self._critic_step, taken, state)

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

    async def _critic_step(
        self, taken: BatchPlan[BatchRow], state: CheckpointState
    ) -> tuple[TrainBatch, AuxModelsResult] | None:
        """Collective. As `_step`, but the policy takes no step."""
        rows: dict[str, Trajectory] = {}
        if (credited := await self._credited(taken, state, rows)) is None:
            return None
        batch = trainable(credited, max_staleness=state.version - taken.oldest_version)
        await self._read(taken, {batch.ids[i] for i in self._aux_models.trained_rows(batch)}, rows)
        if await self._set_aside(taken, rows):
            return None
        batch = await self._fill_columns(batch, rows)
        return batch, await self._aux_models.learn(batch)()

    async def _policy_step(self, taken: BatchPlan[BatchRow], state: CheckpointState) -> Stepped | None:
        """Collective. Let expert traces join their groups, compute advantages, step the policy and the trained aux model. This rank
        reads the rows that it works on. None where some of them are proven to be unusable, and set aside."""
        taken, rows = self._traces.join(taken)
        traces = frozenset(rows)
        if (credited := await self._credited(taken, state, rows)) is None:
            return None
        batch = trainable(credited, max_staleness=state.version - taken.oldest_version)
        aux_batch, plan = self._aux_models.training_batch(credited, batch), self._stepper.plan(batch)
        wanted = {batch.ids[i] for i in chain.from_iterable(chain.from_iterable(plan))}
        await self._read(taken, wanted | {aux_batch.ids[i] for i in self._aux_models.trained_rows(aux_batch)}, rows)
        if await self._set_aside(taken, rows):
            return None
        fresh: Sequence[Trajectory] = ()
        if self._backend.rank == 0 and lacks_comparable(batch):
            fresh = await self._buffer.fresh(state.version, FRESH)
        # An unusable one is skipped: its group is set aside when its own batch is taken.
        fresh = [row for row in self._replayable(fresh) if not self._why_unusable(row)]
        whole = await self._fill_columns(batch, rows, fresh)
        batch, aux_batch = whole, whole if aux_batch is batch else await self._fill_columns(aux_batch, rows, fresh)
        aux_result = self._aux_models.learn(aux_batch)
        seen = StepAnnotations(choose(batch, self._annotations_bytes))
        result = self._stepper.step(batch, plan, fresh, state, seen.of)
        learned = await aux_result()
        self._on_trained(state.version + 1, [row for name, row in rows.items() if name not in traces])
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
        """Collective. All sequences, with what aux models and estimators give their tokens. Those read for it are added to `rows`.
        None as `_step`."""
        flat = flatten(taken.groups, state.version, withheld=taken.withheld, shape=self._shape)
        flat = msgspec.structs.replace(flat, carried=dict(state.algorithm))
        # The user's function may read any column, and must get the same batch on every rank.
        wanted = range(len(flat)) if self._credits_by_rows else self._aux_models.scored_rows(flat)
        await self._read(taken, {flat.ids[i] for i in wanted}, rows)
        if await self._set_aside(taken, rows):
            return None
        scored = await self._aux_models.score(await self._fill_columns(flat, rows) if wanted else flat)
        return assign_advantages(scored, self._advantage, self._returns)

    async def _read(self, taken: BatchPlan[BatchRow], names: Collection[str], rows: dict[str, Trajectory]) -> None:
        """Add the trajectories `names` of the batch to `rows`, where they are not there."""
        missing = [row for row in chain.from_iterable(taken.groups) if row.id in names and row.id not in rows]
        if missing:
            rows |= {row.id: row for row in self._replayable(await self._buffer.read_rows(missing))}

    async def _fill_columns(
        self, batch: TrainBatch, rows: Mapping[str, Trajectory], others: Sequence[Trajectory] = ()
    ) -> TrainBatch:
        """`batch` with what `rows` have, and with the files of all images in these and in `others`."""
        seen = {image.digest: image for row in (*rows.values(), *others) for image in row.images}
        missing = [image for digest, image in seen.items() if digest not in self._image_files]
        held = {digest: file for digest, file in self._image_files.items() if digest in seen}
        self._image_files = held | (await self._buffer.images(missing) if missing else {})
        return msgspec.structs.replace(with_rows(batch, rows.values()), image_files=self._image_files)

    def _why_unusable(self, row: Trajectory) -> str:
        return why_unusable(row, self._vocabulary, self._backend.routers)

    def _replayable(self, rows: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """`rows` without experts that no router takes over: the option may have been on before."""
        if self._backend.routers is not None:
            return rows
        return [row if row.experts is None else msgspec.structs.replace(row, experts=None) for row in rows]


def why_unusable(row: Trajectory, vocabulary: int, routers: RouterShape | None = None) -> str:
    """Why no model with so many token ids can be trained on `row`, or none whose `routers` replay its experts; empty where nothing
    is wrong."""
    smallest, largest = int(row.token_ids.min()), int(row.token_ids.max())
    if not (smallest >= 0 and largest < vocabulary):
        foreign = largest if smallest >= 0 else smallest
        return f"trajectory {row.id!r}: token id {foreign} is outside the vocabulary, 0 to {vocabulary - 1}"
    logprobs = row.behavior_logprobs
    if not (logprobs.min() > -np.inf and logprobs.max() <= LOGPROB_LIMIT):  # the minimum with a NaN is NaN
        return f"trajectory {row.id!r}: a log-prob is positive or not finite"
    if routers is not None and row.experts is not None and not routers.fits(row.experts):
        return f"trajectory {row.id!r}: its experts are none that the model's routers choose from"
    return ""


def may_be_data(error: Exception) -> bool:
    """Whether `error`, of a step, may be the fault of the batch."""
    if isinstance(error, MemoryError | OSError | torch.OutOfMemoryError) or is_peer_failure(error):
        return False
    if isinstance(error, RuntimeError) and "out of memory" in str(error).lower():
        return False
    if isinstance(error, SlipstreamError):
        return isinstance(error, LearnerError) and error.final and not isinstance(error, UnusableBatch)
    return True


def faulty_groups(groups: Sequence[Group], version: int) -> dict[int, str]:
    """Of a batch whose step failed: the groups by id that no batch can be made of, each by itself, and why."""
    found: dict[int, str] = {}
    for group in groups:
        try:
            flatten([group], version)
        except (LearnerError, ArithmeticError, LookupError, ValueError) as error:
            if group:
                found[group[0].group_id] = describe(error)
    return found
