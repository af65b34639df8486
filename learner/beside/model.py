"""What a model beside the policy is to the learner, and what each of its own ranks does, wherever these are.

    held by the learner's ranks      each scores its part ──gather──> all know the whole
    placed in ranks of its own       each scores its part ──reply──> rank 0 of the learner ──broadcast──> all know the whole

Invariants:
- Each rank takes its part of what is asked, and is told the whole: parts follow from lengths and the number of parts alone.
- A question is asked first and answered later: a placed model works meanwhile, one that is held begins when it is to answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ...configs.algorithm import Gae, Prime
from ...configs.schema import Learner
from .. import packing
from ..algorithms.prime import process_loss
from ..backend import Backend, Scorer
from ..batch import TrainSequence, rank_rows, to_row
from ..checkpoint import CheckpointState
from ..critic import explained_variance, value_loss
from ..meter import CompanionsDone, mean_over

T = TypeVar("T")

Answer = Callable[[], Awaitable[T]]
"""Collective. What was asked for; to be called once."""

Said = list[NDArray[np.float32]]
"""For each sequence float32[T], a number for each of its tokens, 0 where it is not trained."""


class Beside(Protocol):
    """A model that is asked and never stepped. All ranks of the learner call the same, in the same order.

    Attributes:
        placed: whether it is in processes of its own.
    """

    placed: bool

    def score(self, sequences: Sequence[TrainSequence]) -> Answer[Said]:
        """Ask what it says of the trained tokens; the same on all ranks."""
        ...

    def close(self) -> None:
        """To be called before the policy's backend is closed."""
        ...


class BesideLearning(Beside, Protocol):
    """A model that learns beside the policy, and is checkpointed with it."""

    def learn(self, parts: Sequence[Sequence[TrainSequence]]) -> Answer[CompanionsDone]:
        """Ask for one step on each of `parts`, which are the same on all ranks; rank 0 is told how they went."""
        ...

    def save(self, directory: Path, state: CheckpointState) -> Awaitable[None]:
        """Begin to write `directory`, as `Backend.save` does; the next step may be asked for meanwhile."""
        ...

    async def load(self, directory: Path) -> None:
        """Resume from `save`, wherever the model was then."""
        ...


class Ranked(Scorer, Protocol):
    """A scorer that knows which part of a batch is its own, as `Backend` has it."""

    data_rank: int
    data_size: int


def score_part(
    model: Scorer, sequences: Sequence[TrainSequence], rank: int, size: int, budget: int
) -> NDArray[np.float32]:
    """Collective among the ranks of `model`. What it says of the part of `rank` of `size`; see `in_order`."""
    rows = _shares(sequences, size, budget)[rank]
    scored = model.logprobs([to_row([sequences[i] for i in row]) for row in rows])
    return torch.cat([torch.empty(0), *scored]).numpy()


def in_order(said: NDArray[np.float32], sequences: Sequence[TrainSequence], size: int, budget: int) -> Said:
    """What `score_part` gave for each of `size` ranks, one behind the other, by sequence."""
    order = [i for share in _shares(sequences, size, budget) for i in chain.from_iterable(share)]
    ends = np.cumsum([len(sequences[i].token_ids) for i in order])
    by_index = dict(zip(order, np.split(said, ends[:-1]), strict=True))
    return [by_index[i] for i in range(len(sequences))]


def steps(model: Backend, config: Learner, parts: Sequence[Sequence[TrainSequence]]) -> CompanionsDone:
    """Collective among the ranks of `model`: one step on each of `parts`, of a critic where the algorithm is `gae`, of what gives
    process rewards where it is `prime`."""
    advantage, budget = config.algorithm.advantage, config.backend.tokens_per_microbatch
    mine, shared = (model.data_rank, model.data_size, budget), model.shares_prefixes
    rows = [rank_rows(part, *mine, shares_prefixes=shared) for part in parts]
    if isinstance(advantage, Gae):
        means = mean_over([model.step(part, value_loss, advantage.critic_lr) for part in rows])
        return CompanionsDone(value_loss=means["error_square"] / 2, explained_variance=explained_variance(means))
    assert isinstance(advantage, Prime), "a model that learns beside the policy goes with gae and prime alone"
    loss = process_loss(advantage.beta)
    means = mean_over([model.step(part, loss(part, model.gather), advantage.reward_lr) for part in rows])
    return CompanionsDone(reward_model_loss=means["cross_entropy"], reward_model_accuracy=means["right"])


def _shares(sequences: Sequence[TrainSequence], size: int, budget: int) -> list[list[list[int]]]:
    return packing.share([len(s.token_ids) for s in sequences], size, budget)
