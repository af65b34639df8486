"""Models that the learner's ranks hold next to the policy, and what each of a model's ranks computes.

    local     each learner rank scores its part ──gather──> all ranks have all outputs
    remote    each rank of the model scores its part ──reply──> rank 0 of the learner ──broadcast──> all ranks have all outputs

All ranks of the learner make the same calls to a model in the same order. Each gets the whole batch and takes its part, which
follows from sequence lengths only. A request returns a `Pending`: a remote model works meanwhile, a local one when it is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...configs.algorithm import Gae, Prime
from ...configs.schema import Learner
from ..algorithms.token_estimators import process_loss
from ..backend import Backend, Scorer
from ..batch import TrainBatch
from ..checkpoint import CheckpointState
from ..metrics import AuxModelsResult, mean_over
from ..packing import microbatches, plan_steps, share, to_microbatch
from .critic import explained_variance, value_loss

T = TypeVar("T")

Pending = Callable[[], Awaitable[T]]  # collective. Waits for the result; to be called once.
Outputs = NDArray[np.float32]  # float32[N], a number for each token of a batch, 0 where `loss_mask` is false


def score_part(model: Scorer, batch: TrainBatch, rank: int, size: int, budget: int) -> NDArray[np.float32]:
    """Collective among the ranks of `model`. Its outputs for the part of `rank` of `size`; see `in_order`."""
    shares = _shares(batch, size, budget)[rank]
    scored = model.logprobs([to_microbatch(batch.select(indices)) for indices in shares])
    return torch.cat([torch.empty(0), *scored]).numpy()


def in_order(outputs: NDArray[np.float32], batch: TrainBatch, size: int, budget: int) -> Outputs:
    """What `score_part` gave for each of `size` ranks, one behind the other, at the tokens of `batch`."""
    order = [i for share in _shares(batch, size, budget) for i in chain.from_iterable(share)]
    spans = [np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in order]
    ordered = np.zeros(len(batch.token_ids), dtype=np.float32)
    ordered[np.concatenate(spans)] = outputs
    return ordered


def take_steps(model: Backend, config: Learner, parts: Sequence[TrainBatch]) -> AuxModelsResult:
    """Collective among the ranks of `model`: one step of a critic (`gae`) or process reward model (`prime`) on each of `parts`."""
    advantage, budget = config.algorithm.advantage, config.backend.tokens_per_microbatch
    local, shared = (model.data_rank, model.data_size, budget), model.shares_prefixes
    rows = [microbatches(part, *local, shares_prefixes=shared) for part in parts]
    if isinstance(advantage, Gae):
        loss = partial(value_loss, clip=advantage.value_clip)
        results = [model.step(part, loss, advantage.lr) for _ in range(config.algorithm.epochs) for part in rows]
        means = mean_over(results[: len(rows)])  # of the first epoch, before which it has not seen the batch
        return AuxModelsResult(value_loss=means["error_square"] / 2, explained_variance=explained_variance(means))
    assert isinstance(advantage, Prime), "only gae and prime train an aux model"
    steps = []
    for part, batch in zip(rows, parts, strict=True):
        # The outcome is of all branches together, which may be on several ranks: each needs the score of the others.
        scored = model.logprobs(part) if len(set(batch.episode.tolist())) < len(batch) else None
        steps.append(model.step(part, process_loss(advantage.beta, scored)(part, model.gather), advantage.lr))
    means = mean_over(steps)
    return AuxModelsResult(reward_model_loss=means["cross_entropy"], reward_model_accuracy=means["right"])


def learns_from_episodes(config: Learner) -> bool:
    """Whether the trained aux model learns from outcomes of whole episodes, and not from single tokens."""
    return isinstance(config.algorithm.advantage, Prime)


def _shares(batch: TrainBatch, size: int, budget: int) -> list[list[list[int]]]:
    return share(batch.sizes.tolist(), size, budget)


# --- models that the learner's ranks hold, like the policy


class LocalModel:
    """A model that is never stepped. The data ranks of `ranks` share the batch and gather the outputs of their parts of `model`."""

    remote = False

    def __init__(self, config: Learner, model: Scorer, ranks: Backend) -> None:
        self._budget = config.backend.tokens_per_microbatch
        self._model = model
        self._ranks = ranks

    def scored_rows(self, batch: TrainBatch) -> Sequence[int]:
        """The sequences of `batch` whose tokens this rank needs for `score`."""
        shares = _shares(batch, self._ranks.data_size, self._budget)
        return list(chain.from_iterable(shares[self._ranks.data_rank]))

    def score(self, batch: TrainBatch) -> Pending[Outputs]:
        """Begin to compute the outputs at the tokens of `loss_mask`; the same on all ranks."""

        async def result() -> Outputs:
            rank, size = self._ranks.data_rank, self._ranks.data_size
            local = torch.from_numpy(score_part(self._model, batch, rank, size, self._budget))
            gathered = self._ranks.gather(local.double()[:, None])[:, 0].float().numpy()
            return in_order(gathered, batch, size, self._budget)

        return result

    def close(self) -> None:
        """To be called before the policy's backend is closed."""
        self._model.close()


class LocalTrainableModel(LocalModel):
    """A model that is trained, and checkpointed with the policy. Its data ranks need not be those of the policy."""

    def __init__(self, config: Learner, model: Backend) -> None:
        super().__init__(config, model, model)
        self._config = config
        self._trained = model

    def trained_rows(self, batch: TrainBatch, minibatches: int) -> Sequence[int]:
        """The sequences of `batch` whose tokens this rank needs for `learn` on so many parts of it."""
        model = self._trained
        local = model.data_rank, model.data_size, self._budget
        whole = learns_from_episodes(self._config)
        plan = plan_steps(batch, minibatches, *local, shares_prefixes=model.shares_prefixes, by_episode=whole)
        return [i for step in plan for row in step for i in row]

    def learn(self, parts: Sequence[TrainBatch]) -> Pending[AuxModelsResult]:
        """Begin one step on each of `parts`, which are the same on all ranks; rank 0 gets the result."""

        async def result() -> AuxModelsResult:
            return take_steps(self._trained, self._config, parts)

        return result

    def save(self, directory: Path, state: CheckpointState) -> Awaitable[None]:
        """Begin to write `directory`, as `Backend.save` does."""
        return asyncio.wrap_future(self._trained.save(directory, state))

    async def load(self, directory: Path) -> None:
        """Resume from `save`, whether the model was local or remote then."""
        self._trained.load(directory)
