"""The models beside the policy: who they are follows from the algorithm, what they say of a batch from here.

    batch ──every sampled token──> reference policy ──> log-probs, penalties ──> credit, loss
                                   critic ──> values ──> credit ──> returns ──> the critic's own step
                                   process reward model ──> log-ratios ──> credit; outcomes ──> its own step

Invariants:
- Each is held by the learner's ranks, or placed in ranks of its own (`beside`); what is computed is the same. One that is never
  trained has no optimizer, and the reference of a policy that trains adapters may be that policy without them.
- Those that are placed work at the same time: as each other, as what the learner's ranks score, and as the policy's steps.
- All sampled tokens are scored, whether or not they carry loss: what an episode earned does not depend on what is trained.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..buffer.trajectory import Trajectory
from ..configs.algorithm import KlInReward, Prime, needs_critic, needs_reference
from ..configs.schema import Learner
from ..errors import LearnerError
from .algorithms.kl import estimate
from .batch import TrainSequence, minibatches, supervised
from .beside.model import Answer, Beside, BesideLearning
from .checkpoint import STATE_FILE, CheckpointState, path_of, prune
from .credit import Group
from .meter import CompanionsDone
from .scores import NO_SCORES, Scored, Scores

TRAINED = "beside"
"""Folder among the policy's checkpoints for those of the companion that is trained, by the same names."""


class Companions:
    """One learner rank's part of the models beside the policy.

    Args:
        config: the learner's section.
        reference: the policy that `algorithm.kl`, or what process rewards are, is relative to; None where nothing is.
        trained: what `algorithm.advantage` goes with: a critic for `gae`, for `prime` a policy that becomes a process reward model;
            None for the others.
    """

    def __init__(self, config: Learner, reference: Beside | None = None, trained: BesideLearning | None = None) -> None:
        if needs_reference(config.algorithm) != (reference is not None):
            raise LearnerError(
                "learner.algorithm.kl and advantage.kind=prime, and they alone, go with a reference policy"
            )
        if needs_critic(config.algorithm) != (trained is not None):
            raise LearnerError(
                "learner.algorithm.advantage of kind gae goes with a critic, of kind prime with a reward model"
            )
        self._algorithm = config.algorithm
        self._reference = reference
        self._trained = trained

    async def score(self, groups: Sequence[Group]) -> Scores:
        """Collective. What they say of the batch's tokens."""
        models: list[Beside] = [model for model in (self._reference, self._trained) if model is not None]
        if not models:
            return NO_SCORES
        trajectories = [trajectory for group in groups for trajectory in group]
        marked = [supervised(t.token_ids, t.loss_mask) for t in trajectories]
        asked = [(model, model.score(marked)) for model in models]
        said: dict[Beside, Scored] = {}
        # Who is placed works while the others compute.
        for model, answer in sorted(asked, key=lambda one: one[0].placed):
            said[model] = {t.id: values for t, values in zip(trajectories, await answer(), strict=True)}
        reference = None if self._reference is None else said[self._reference]
        told = None if self._trained is None else said[self._trained]
        penalties = None if reference is None else self._penalties(trajectories, reference)
        if told is not None and reference is not None and isinstance(self._algorithm.advantage, Prime):
            told = {name: logprobs - reference[name] for name, logprobs in told.items()}
        return Scores(reference=reference, penalties=penalties, told=told)

    def learn(self, sequences: Sequence[TrainSequence]) -> Answer[CompanionsDone]:
        """Collective. Ask what is trained beside the policy for one step on each minibatch of `sequences`; how they went is told to
        rank 0 of the learner."""
        if self._trained is None or not sequences:
            return _nothing
        return self._trained.learn(minibatches(sequences, self._algorithm.minibatches))

    def save(self, checkpoints: Path, state: CheckpointState) -> list[Awaitable[None]]:
        """Collective. Begin to write what belongs to the policy's checkpoint of `state` in the folder `checkpoints`."""
        return [] if self._trained is None else [self._trained.save(_beside(path_of(checkpoints, state.step)), state)]

    def saved_with(self, checkpoint: Path) -> bool:
        """Whether what belongs to a checkpoint of the policy is there."""
        return self._trained is None or (_beside(checkpoint) / STATE_FILE).is_file()

    async def load(self, checkpoint: Path) -> None:
        """Collective. Resume from what belongs to a checkpoint of the policy."""
        if self._trained is not None:
            await self._trained.load(_beside(checkpoint))

    def prune(self, checkpoints: Path, keep: int) -> None:
        """Remove all but the newest `keep`. One rank calls it, between saves."""
        if self._trained is not None:
            prune(checkpoints / TRAINED, keep)

    def close(self) -> None:
        """Free them; to be called before the policy's backend is closed."""
        for companion in (self._trained, self._reference):
            if companion is not None:
                companion.close()

    def _penalties(self, trajectories: Sequence[Trajectory], reference: Scored) -> Scored | None:
        """What the divergence from the reference policy takes off rewards; None where it does not."""
        kl = self._algorithm.kl
        if not isinstance(kl, KlInReward):
            return None
        penalties: dict[str, NDArray[np.float32]] = {}
        for t in trajectories:
            sampled = torch.from_numpy(t.behavior_logprobs.copy()), torch.from_numpy(reference[t.id])
            costs = kl.coefficient * estimate(kl.estimator, *sampled).numpy()
            penalties[t.id] = np.where(t.loss_mask, costs, np.float32(0))
        return penalties


async def _nothing() -> CompanionsDone:
    return CompanionsDone()


def _beside(checkpoint: Path) -> Path:
    return checkpoint.parent / TRAINED / checkpoint.name
