"""Models beside the policy that the ranks of the learner hold, like the policy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from pathlib import Path

import torch

from ...configs.schema import Learner
from ..backend import Backend, Scorer
from ..batch import TrainSequence
from ..checkpoint import CheckpointState
from ..meter import CompanionsDone
from .model import Answer, Said, in_order, score_part, steps


class Held:
    """Implements `Beside`.

    Args:
        config: the learner's section.
        model: this rank's part.
        ranks: through which the ranks tell each other what they found.
    """

    placed = False

    def __init__(self, config: Learner, model: Scorer, ranks: Backend) -> None:
        self._budget = config.backend.tokens_per_microbatch
        self._model = model
        self._ranks = ranks

    def score(self, sequences: Sequence[TrainSequence]) -> Answer[Said]:
        """See `Beside.score`."""

        async def answer() -> Said:
            rank, size = self._ranks.data_rank, self._ranks.data_size
            mine = torch.from_numpy(score_part(self._model, sequences, rank, size, self._budget))
            everyone = self._ranks.gather(mine.double()[:, None])[:, 0].float().numpy()
            return in_order(everyone, sequences, size, self._budget)

        return answer

    def close(self) -> None:
        """See `Beside.close`."""
        self._model.close()


class HeldLearning(Held):
    """Implements `BesideLearning`; takes parts of batches as its own ranks do, which need not be as the policy's do."""

    def __init__(self, config: Learner, model: Backend) -> None:
        super().__init__(config, model, model)
        self._config = config
        self._trained = model

    def learn(self, parts: Sequence[Sequence[TrainSequence]]) -> Answer[CompanionsDone]:
        """See `BesideLearning.learn`."""

        async def answer() -> CompanionsDone:
            return steps(self._trained, self._config, parts)

        return answer

    def save(self, directory: Path, state: CheckpointState) -> Awaitable[None]:
        """See `BesideLearning.save`."""
        return asyncio.wrap_future(self._trained.save(directory, state))

    async def load(self, directory: Path) -> None:
        """See `BesideLearning.load`."""
        self._trained.load(directory)
