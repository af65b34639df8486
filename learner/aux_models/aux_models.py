"""The models that an algorithm needs next to the policy, and the columns that they give a batch.

    batch ──every sampled token──> reference policy ──> log-probs, penalties ──> advantages, loss
                                   critic ──> values ──> advantages, returns ──> the critic's own step
                                   process reward model ──> log-ratios ──> advantages; outcomes ──> its own step

Invariants:
- Each is local (held by the learner's ranks) or remote (`learner.aux_models`); both compute the same. A model that is never trained
  has no optimizer. The reference of a policy that trains adapters may be that policy without them.
- Remote models work at the same time as each other, as the local models and as the policy's steps.
- All sampled tokens are scored, whether or not they carry loss: rewards do not depend on which tokens are trained.
- Of the references of a mixture each scores the episodes of its own environment, and no others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ...configs.algorithm import KlInReward, Prime, needs_critic, needs_reference, reference_paths, references_of
from ...configs.divergence import REFERENCE_KEY
from ...configs.schema import Learner
from ...errors import LearnerError
from ...rpc.client import RpcClient
from ..algorithms.divergence import coefficient_of, kl_estimate
from ..batch import TrainBatch, trainable
from ..checkpoint_folder import STATE_FILE, CheckpointState, path_of, prune
from ..metrics import AuxModelsResult
from ..packing import minibatches
from .base import LocalModel, LocalTrainableModel, Outputs, Pending, learns_from_episodes
from .remote import RemoteModel

ANY_STALENESS = np.iinfo(np.int32).max
TRAINED = "beside"  # folder among the policy's checkpoints for those of the trained aux model, by the same names


class AuxModels:
    """One learner rank's part of the aux models."""

    def __init__(
        self,
        config: Learner,
        reference: LocalModel | RemoteModel | None = None,  # for `algorithm.kl` and process rewards
        trained: LocalTrainableModel | RemoteModel | None = None,  # for `gae` a critic, for `prime` a reward model
    ) -> None:
        if needs_reference(config.algorithm) != (reference is not None):
            raise LearnerError(
                "learner.algorithm.kl, advantage.kind=prime and loss.kind=dpo, and only they, go with a reference policy"
            )
        if needs_critic(config.algorithm) != (trained is not None):
            raise LearnerError(
                "learner.algorithm.advantage of kind gae goes with a critic, of kind prime with a reward model"
            )
        self._config, self._algorithm = config, config.algorithm
        self._reference = reference
        self._trained = trained
        self.models: list[LocalModel | RemoteModel] = [model for model in (trained, reference) if model is not None]

    @property
    def clients(self) -> list[RpcClient]:
        """This rank's connections to the ranks of remote models; each is called as the rank that it leads to."""
        return [client for model in self.models if isinstance(model, RemoteModel) for client in model.clients]

    def scored_rows(self, batch: TrainBatch) -> Collection[int]:
        """The sequences of `batch` whose tokens and log-probs this rank needs for `score`."""
        if isinstance(self._algorithm.kl, KlInReward):
            return range(len(batch))  # a penalty is computed from the log-probs of all tokens, on every rank
        return {i for model in self.models for i in model.scored_rows(self._input_of(model, batch))}

    def training_batch(self, credited: TrainBatch, trained: TrainBatch) -> TrainBatch:
        """What the trained aux model learns from, of a batch with advantages and what of it the policy is `trained` on: the same;
        for PRIME all sampled tokens of the episodes that carry loss, since an outcome is that of a whole episode."""
        return trainable(credited, ANY_STALENESS) if learns_from_episodes(self._config) else trained

    def trained_rows(self, batch: TrainBatch) -> Collection[int]:
        """The sequences of `batch` whose tokens this rank needs for `learn`."""
        return () if self._trained is None else self._trained.trained_rows(batch, self._algorithm.minibatches)

    async def score(self, batch: TrainBatch) -> TrainBatch:
        """Collective. `batch` with the columns that the aux models give: reference log-probs, a teacher's likeliest tokens,
        penalties and values."""
        if not self.models:
            return batch
        pending = [(model, model.score(self._input_of(model, batch))) for model in self.models[::-1]]
        # A remote model works while the local ones compute.
        outputs = {model: await result() for model, result in sorted(pending, key=lambda one: one[0].remote)}
        reference, *top = (None,) if self._reference is None else _columns(outputs[self._reference])
        values = None if self._trained is None else _columns(outputs[self._trained])[0]
        penalties = None if reference is None else self._penalties(batch, reference)
        if values is not None and reference is not None and isinstance(self._algorithm.advantage, Prime):
            values = values - reference
        if top:
            batch = msgspec.structs.replace(batch, teacher_logprobs=top[0], teacher_ids=top[1].astype(np.int32))
        return msgspec.structs.replace(batch, reference_logprobs=reference, penalties=penalties, values=values)

    def learn(self, batch: TrainBatch) -> Pending[AuxModelsResult]:
        """Collective. Begin one step of the trained aux model on each minibatch of `batch`; rank 0 gets the result."""
        if self._trained is None or not len(batch):
            return _no_result
        by_episode = learns_from_episodes(self._config)
        return self._trained.learn(minibatches(batch, self._algorithm.minibatches, by_episode=by_episode))

    def save(self, checkpoints: Path, state: CheckpointState) -> list[Awaitable[None]]:
        """Collective. Begin to write the trained model next to the policy's checkpoint of `state` in the folder `checkpoints`."""
        return [] if self._trained is None else [self._trained.save(_next_to(path_of(checkpoints, state.step)), state)]

    def saved_with(self, checkpoint: Path) -> bool:
        return self._trained is None or (_next_to(checkpoint) / STATE_FILE).is_file()

    async def load(self, checkpoint: Path) -> None:
        if self._trained is not None:
            await self._trained.load(_next_to(checkpoint))

    def prune(self, checkpoints: Path, keep: int) -> None:
        if self._trained is not None:
            prune(checkpoints / TRAINED, keep)

    def close(self) -> None:
        """Free the models; to be called before the policy's backend is closed."""
        for model in self.models:
            model.close()

    def _input_of(self, model: LocalModel | RemoteModel, batch: TrainBatch) -> TrainBatch:
        """`batch` as `model` gets it: with the number of the reference that scores each sequence, where there are several. Raises
        LearnerError where an episode is of an environment that has none."""
        paths = references_of(self._algorithm)
        if model is not self._reference or "" in paths:
            return batch
        if unknown := set(batch.envs).difference(paths):
            raise LearnerError(
                f"episodes of {', '.join(sorted(unknown))} have no reference policy; {REFERENCE_KEY} has one for {', '.join(paths)}"
            )
        models = reference_paths(self._algorithm)
        of_episode = np.array([models.index(paths[env]) for env in batch.envs], dtype=np.int64)
        return msgspec.structs.replace(batch, teacher=of_episode[batch.episode])

    def _penalties(self, batch: TrainBatch, reference: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """What the divergence from the reference policy takes off the reward of each token; None where it is no penalty."""
        kl = self._algorithm.kl
        if not isinstance(kl, KlInReward):
            return None
        sampled, scored = torch.from_numpy(batch.behavior_logprobs), torch.from_numpy(reference)
        coefficient = coefficient_of(kl, batch.carried)
        return np.where(batch.sampled, coefficient * kl_estimate(kl.estimator, sampled, scored).numpy(), np.float32(0))


def _columns(outputs: Outputs) -> tuple[NDArray[np.float32], ...]:
    """Of the outputs the first column, float32[N], and those of the likeliest tokens, two of float32[N, k], where there are any."""
    first, *others = np.split(outputs, [1, 1 + outputs.shape[1] // 2], axis=1)
    return (first[:, 0].copy(), *(np.ascontiguousarray(one) for one in others if one.shape[1]))


async def _no_result() -> AuxModelsResult:
    return AuxModelsResult()


def _next_to(checkpoint: Path) -> Path:
    return checkpoint.parent / TRAINED / checkpoint.name
