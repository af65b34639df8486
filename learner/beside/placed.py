"""Models beside the policy in processes of their own, as the learner has them: rank 0 speaks to each of their ranks.

Invariants:
- A question is sent before anybody waits for its answer, to all ranks of the model in the same order.
- Answers are matched by number; that a checkpoint is whole may be said after what was asked later.
- A model that does not answer within `batch_s` is a LearnerError that names those of its ranks that are silent: a connection may
  have been lost, and all can meet again. How long a checkpoint may take is the loop's affair.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import zmq.asyncio

from ...buffer import wire
from ...buffer.line import Line
from ...configs.schema import Learner
from ...errors import DeadlineExceeded, LearnerError, StateError, within
from ..batch import TrainSequence
from ..checkpoint import CheckpointState
from ..meter import CompanionsDone
from ..ranks import of_first
from . import messages as m
from .model import Answer, Said, in_order

R = TypeVar("R", m.Part, m.Learnt, m.Done)


class Placed:
    """Implements `BesideLearning`; of a model that is never trained, `Beside`.

    Args:
        config: the learner's section.
        kind: of the model's roles, `reference` or `critic`.
        addresses: of its ranks, on rank 0 of the learner; none on the others, which hear from that one.
    """

    placed = True

    def __init__(self, config: Learner, kind: str, addresses: Sequence[str]) -> None:
        self._budget = config.backend.tokens_per_microbatch
        self._deadline_s = config.batch_s
        self._kind = kind
        self._context = zmq.asyncio.Context()
        self._lines: list[Line[m.Reply]] = [
            Line(self._context, address, f"{kind}-{i}", m.Answered) for i, address in enumerate(addresses)
        ]
        self._numbers = itertools.count(1)

    def score(self, sequences: Sequence[TrainSequence]) -> Answer[Said]:
        """See `Beside.score`."""
        asked = self._ask(m.Score(m.pack(sequences)), m.Part)

        async def answer() -> Said:
            ends = np.cumsum([len(s.token_ids) for s in sequences])
            said = np.zeros(ends[-1], dtype=np.float32)
            if parts := {part.rank: part for part in await asked()}:
                together = np.concatenate([parts[rank].said for rank in range(len(parts))])
                said = np.concatenate(in_order(together, sequences, len(parts), self._budget))
            return np.split(of_first(torch.from_numpy(said)).numpy(), ends[:-1])

        return answer

    def learn(self, parts: Sequence[Sequence[TrainSequence]]) -> Answer[CompanionsDone]:
        """See `BesideLearning.learn`."""
        asked = self._ask(m.Learn(tuple(map(m.pack, parts))), m.Learnt)

        async def answer() -> CompanionsDone:
            return next((learnt.done for learnt in await asked()), CompanionsDone())

        return answer

    def save(self, directory: Path, state: CheckpointState) -> Awaitable[None]:
        """See `BesideLearning.save`."""
        return asyncio.ensure_future(_all_done(self._send(m.Save(str(directory), state)).values()))

    async def load(self, directory: Path) -> None:
        """See `BesideLearning.load`."""
        await self._ask(m.Load(str(directory)), m.Done)()

    def close(self) -> None:
        """See `Beside.close`. The model stays."""
        for line in self._lines:
            line.close()
        self._context.term()

    def _send(self, request: m.Request) -> dict[str, asyncio.Future[m.Reply]]:
        """Send `request`; what each rank will answer to it, by name. None where this is not rank 0 of the learner."""
        number = next(self._numbers)
        frames = wire.encode(m.Asked(number, request)) if self._lines else []
        asked = {line.name: line.expect(number) for line in self._lines}
        for line in self._lines:
            line.send(frames)
        return asked

    def _ask(self, request: m.Request, expected: type[R]) -> Answer[list[R]]:
        """Send `request`; what every rank answers to it."""
        asked, what = self._send(request), type(request).__name__

        def silent() -> str:
            names = " and ".join(name for name, reply in asked.items() if reply.cancelled())
            return f"{names} did not answer; see logs/{self._kind}-*.log, and learner.batch_s"

        async def answer() -> list[R]:
            replies = asyncio.gather(*asked.values())
            waits_for = f"the {self._kind}'s answer to {what}"
            try:
                said = await within(self._deadline_s, replies, who="the learner", waits_for=waits_for, hint=silent)
            except DeadlineExceeded as error:
                raise LearnerError(str(error), final=False) from error
            meant = [reply for reply in said if isinstance(reply, expected)]
            if len(meant) < len(said):
                kinds = ", ".join(type(reply).__name__ for reply in said)
                raise StateError(f"the {self._kind} answered {what} with {kinds}")
            return meant

        return answer


async def _all_done(replies: Iterable[asyncio.Future[m.Reply]]) -> None:
    await asyncio.gather(*replies)
