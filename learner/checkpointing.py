"""The timing of checkpoints, one at a time, while training goes on; and recovery from the newest one. The buffer learns of a
checkpoint when it is complete on disk, not before. From then on its commits are final. A checkpoint counts that the buffer did not
learn of, too: the next start rolls back the commits that are not in it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from ..buffer.client import BufferClient
from ..common.tasks import Stopped, run_or_stop
from ..configs.schema import Learner
from ..errors import CheckpointError, ConfigError, DeadlineExceeded, with_deadline
from .aux_models.aux_models import AuxModels
from .backend import Backend
from .checkpoint_folder import CheckpointState, checkpoints, path_of, prune, read_state, step_of, way_past
from .model import MODEL_KEY

log = logging.getLogger(__name__)
T = TypeVar("T")

STOPPED_S = 5.0
"""Longest wait for the buffer to know of a checkpoint, after a stop: one that is well answers in milliseconds."""
COMMIT_S = 15.0
"""Longest wait for the buffer's answers in a commit, after a stop. Without them the steps since the last checkpoint are lost, so a
slow disk has more time."""


async def answered(request: Coroutine[Any, Any, T], stop: asyncio.Event, seconds: float, waits_for: str) -> T:
    """What the buffer answers. Raises DeadlineExceeded where it does not within `seconds` after a stop: it may have ended for
    good."""
    asking = asyncio.create_task(request, name=waits_for)
    try:
        return await run_or_stop(asyncio.shield(asking), stop)
    except Stopped:
        hint = "see the buffer's log"
        waits_for = f"{waits_for} after a stop"
        return await with_deadline(seconds, asking, who="the learner", waits_for=waits_for, hint=hint)
    finally:
        asking.cancel()


class Checkpointer:
    """One rank's. The arguments are those of `TrainingLoop`.

    Attributes:
        every: steps between two checkpoints; on all ranks the same, and it may change between two steps.
        stop: set once the learner is asked to stop.
    """

    def __init__(
        self,
        config: Learner,
        backend: Backend,
        aux_models: AuxModels,
        buffer: BufferClient,
        folder: Path,
        retained: Callable[[Collection[int]], Collection[int]] = lambda steps: (),
        on_checkpoint: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.every = config.checkpoint_every
        self.stop = asyncio.Event()
        self._config = config
        self._backend = backend
        self._aux_models = aux_models
        self._buffer = buffer
        self._folder = folder
        self._retained, self._on_checkpoint = retained, on_checkpoint
        self._saved = CheckpointState(step=0, version=0)
        self._saving: asyncio.Task[None] | None = None

    async def recover(self, score_canary: Callable[[], torch.Tensor]) -> CheckpointState:
        """Collective. Load the newest checkpoint, if any; the buffer rolls back commits that it does not contain. `score_canary`
        gives the policy's log-probs of the fixed prompt. Raises CheckpointError: it is damaged, of another model, or computes no
        numbers. ConfigError: there is none, and the model at `model.path` computes no numbers."""
        complete = [path for path in checkpoints(self._folder) if self._aux_models.saved_with(path)]
        state = self._saved
        if complete:
            state = self._saved = self._backend.load(complete[-1])
            await self._aux_models.load(complete[-1])
        if not score_canary().isfinite().all():
            problem = "gives log-probs that are not finite: its weights are damaged"
            if complete:
                raise CheckpointError(f"checkpoint {complete[-1]} {problem}; {way_past(complete[-1])}")
            raise ConfigError(f"{MODEL_KEY}: the model there {problem}; name another")
        version = await self._buffer.recover(state.version) if self._backend.rank == 0 else 0
        version = int(self._backend.maximum(version))
        if version != state.version:
            log.warning(
                "commits after version %d were lost; their weights live on as version %d", state.version, version
            )
        return msgspec.structs.replace(state, version=version)

    async def after_step(self, state: CheckpointState) -> None:
        """Raise what went wrong with the checkpoint that was begun, if it has ended; begin the next one every so many steps."""
        if self._saving is not None and self._saving.done():
            await self._finish()
        if state.step % self.every == 0:
            await self._begin(state)

    async def save_last(self, state: CheckpointState) -> None:
        """Return when a checkpoint of `state` is complete on disk."""
        if self._saved != state:
            await self._begin(state)
        await self._finish()

    async def close(self) -> None:
        if self._saving is not None:
            self._saving.cancel()
            await asyncio.wait({self._saving})
            self._saving = None

    async def _begin(self, state: CheckpointState) -> None:
        await self._finish()
        writing = [
            *self._aux_models.save(self._folder, state),
            asyncio.wrap_future(self._backend.save(path_of(self._folder, state.step), state)),
        ]
        self._saved = state
        self._saving = asyncio.create_task(self._written(writing), name="checkpoint")

    async def _finish(self) -> None:
        """Return when the checkpoint that was begun, if any, is complete and the buffer knows; raise what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            await saving

    async def _written(self, writing: Sequence[Awaitable[None]]) -> None:
        """Wait for all parts of a checkpoint. Commits that each of the newest ones contains can no longer be rolled
        back; an older one that stays is for its weights alone."""
        hint = "the disk is too slow, or another rank or a remote model is gone; see learner.batch_s and their logs"
        written = asyncio.gather(*writing)
        await with_deadline(
            self._config.batch_s, written, who="the learner", waits_for="its checkpoint to be written", hint=hint
        )
        if self._backend.rank == 0:
            keep = self._config.checkpoint_keep
            prune(self._folder, keep, self._retained)
            self._aux_models.prune(self._folder, keep)
            newest = checkpoints(self._folder)[-keep:]
            await self._acknowledged(read_state(newest[0]).version)
            self._on_checkpoint(step_of(newest[-1]))

    async def _acknowledged(self, version: int) -> None:
        """Return when the buffer knows that commits up to `version` are final, or has not answered after a stop: where it has ended
        for good, a checkpoint that is still to be written must not wait for it."""
        telling = self._buffer.checkpointed(version)
        try:
            await answered(telling, self.stop, STOPPED_S, "the buffer to know of its checkpoint")
        except DeadlineExceeded as late:
            if not self.stop.is_set():
                raise
            log.warning("%s. The checkpoint is whole, and counts", late)
