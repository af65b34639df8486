"""Models that the learner's ranks hold next to the policy, and what each of a model's ranks computes.

    local     each learner rank scores its part ──gather──> all ranks have all outputs
    remote    each rank of the model scores its part ──reply──> rank 0 of the learner ──broadcast──> all ranks have all outputs

All ranks of the learner make the same calls to a model in the same order. Each gets the whole batch and takes its part, which
follows from sequence lengths only. A request returns a `Pending`: a remote model works meanwhile, a local one when it is awaited.

The reference of a mixture may be several models, of which each scores the episodes of one environment (`TrainBatch.teacher`). They
are one model to everything else: held by the same ranks, asked by the same requests, computed with one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
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
from ..checkpoint_folder import CheckpointState
from ..metrics import AuxModelsResult, mean_over
from ..packing import microbatches, plan_steps, share, to_microbatch
from .critic import explained_variance, value_loss

T = TypeVar("T")

Pending = Callable[[], Awaitable[T]]  # collective. Waits for the result; to be called once.
Outputs = NDArray[np.float32]  # float32[N, C], C numbers for each token of a batch, 0 where `loss_mask` is false


def score_part(
    models: Sequence[Scorer], batch: TrainBatch, rank: int, size: int, budget: int, top: int = 0
) -> NDArray[np.float32]:
    """Collective among the ranks of `models`, which all hold all of them. The outputs for the part of `rank` of `size`, float32[n,
    C]; see `in_order`. C is 1, and 1 + 2 `top` for those of `Scorer.top_logprobs`."""
    own, scored = _shares(batch, size, budget)[rank], [torch.empty(0, 1 + 2 * top)]
    for number in _numbers(batch):
        rows = [to_microbatch(batch.select(indices)) for one, indices in own if one == number]
        if top:
            scored += models[number].top_logprobs(rows, top)
        else:
            scored += [one[:, None] for one in models[number].logprobs(rows)]
    return torch.cat(scored).numpy()


def in_order(outputs: NDArray[np.float32], batch: TrainBatch, size: int, budget: int) -> Outputs:
    """What `score_part` gave for each of `size` ranks, one behind the other, at the tokens of `batch`."""
    order = [i for share in _shares(batch, size, budget) for _, indices in share for i in indices]
    spans = [np.arange(batch.offsets[i], batch.offsets[i + 1]) for i in order]
    ordered = np.zeros((len(batch.token_ids), outputs.shape[1]), dtype=np.float32)
    ordered[np.concatenate(spans)] = outputs
    return ordered


def score_whole(models: Sequence[Scorer], ranks: Backend, batch: TrainBatch, budget: int, top: int = 0) -> Outputs:
    """Collective. What `score_part` gives, of the whole batch, on each of the data ranks of `ranks`, which share it."""
    rank, size = ranks.data_rank, ranks.data_size
    local = torch.from_numpy(score_part(models, batch, rank, size, budget, top))
    return in_order(ranks.gather(local.double()).float().numpy(), batch, size, budget)


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


def _numbers(batch: TrainBatch) -> list[int]:
    """Of several models those that score sequences of `batch`."""
    return [0] if batch.teacher is None else np.unique(batch.teacher).tolist()


def _shares(batch: TrainBatch, size: int, budget: int) -> list[list[tuple[int, list[int]]]]:
    """Of each rank its micro-batches, model by model: which of several models scores one, and the sequences in it."""
    shares: list[list[tuple[int, list[int]]]] = [[] for _ in range(size)]
    for number in _numbers(batch):
        scored = np.arange(len(batch)) if batch.teacher is None else np.flatnonzero(batch.teacher == number)
        for rank, rows in enumerate(share(batch.sizes[scored].tolist(), size, budget)):
            shares[rank] += [(number, scored[row].tolist()) for row in rows]
    return shares


# --- models that the learner's ranks hold, like the policy


class LocalModel:
    """A model that is never stepped, or several, see above. The data ranks of `ranks` share the batch and gather the outputs of
    their parts of `models`; `top` is that of `score_part`."""

    remote = False

    def __init__(self, config: Learner, models: Sequence[Scorer], ranks: Backend, top: int = 0) -> None:
        self._budget = config.backend.tokens_per_microbatch
        self._models, self._top = tuple(models), top
        self._ranks = ranks

    def scored_rows(self, batch: TrainBatch) -> Sequence[int]:
        """The sequences of `batch` whose tokens this rank needs for `score`."""
        shares = _shares(batch, self._ranks.data_size, self._budget)
        return [i for _, indices in shares[self._ranks.data_rank] for i in indices]

    def score(self, batch: TrainBatch) -> Pending[Outputs]:
        """Begin to compute the outputs at the tokens of `loss_mask`; the same on all ranks."""

        async def result() -> Outputs:
            return score_whole(self._models, self._ranks, batch, self._budget, self._top)

        return result

    def close(self) -> None:
        """To be called before the policy's backend is closed."""
        for model in reversed(self._models):  # the first may have joined the process group
            model.close()


class LocalTrainableModel(LocalModel):
    """A model that is trained, and checkpointed with the policy. Its data ranks need not be those of the policy."""

    def __init__(self, config: Learner, model: Backend) -> None:
        super().__init__(config, [model], model)
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
