"""Models beside the policy in processes of their own, as the learner has them: rank 0 speaks to each of their ranks.

Invariants:
- A question is sent before anybody waits for its answer, to all ranks of the model in the same order.
- Answers are matched by number; that a checkpoint is whole may be said after what was asked later.
- A model that does not answer within `batch_s` is a DeadlineExceeded that names those of its ranks that are silent.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import zmq
import zmq.asyncio

from ...buffer import wire
from ...buffer.door import Door
from ...configs.schema import Learner
from ...curve import join
from ...errors import StateError, WireError, within
from ...keepalive import keep_alive
from ..batch import TrainSequence
from ..checkpoint import CheckpointState
from ..meter import CompanionsDone
from ..ranks import of_first
from . import messages as m
from .model import Answer, Said, in_order

LINGER_MS = 500
"""For requests that are on their way when the learner ends: libzmq aborts a process that drops half of a message."""

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
        self._lines = [_Line(self._context, f"{kind}-{i}", address) for i, address in enumerate(addresses)]
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
        return _all_done(self._ask(m.Save(str(directory), state), m.Done))

    async def load(self, directory: Path) -> None:
        """See `BesideLearning.load`."""
        await _all_done(self._ask(m.Load(str(directory)), m.Done))

    def close(self) -> None:
        """See `Beside.close`. The model stays."""
        for line in self._lines:
            line.close()
        self._context.term()

    def _ask(self, request: m.Request, expected: type[R]) -> Answer[list[R]]:
        """Send `request`; what every rank answers to it, none where this is not rank 0 of the learner."""
        number = next(self._numbers)
        frames = wire.encode(m.Asked(number, request)) if self._lines else []
        asked = {line.name: line.send(number, frames) for line in self._lines}

        def silent() -> str:
            names = " and ".join(name for name, reply in asked.items() if reply.cancelled())
            return f"{names} did not answer; see logs/{self._kind}-*.log, and learner.batch_s"

        async def answer() -> list[R]:
            replies = await within(
                self._deadline_s,
                asyncio.gather(*asked.values()),
                who="the learner",
                waits_for=f"the {self._kind}'s answer to {type(request).__name__}",
                hint=silent,
            )
            meant = [reply for reply in replies if isinstance(reply, expected)]
            if len(meant) < len(replies):
                kinds = ", ".join(type(reply).__name__ for reply in replies)
                raise StateError(f"the {self._kind} answered {type(request).__name__} with {kinds}")
            return meant

        return answer


async def _all_done(answer: Answer[list[m.Done]]) -> None:
    await answer()


class _Line:
    """A connection to rank `name` of a model, at `address`."""

    def __init__(self, context: zmq.asyncio.Context, name: str, address: str) -> None:
        self.name = name
        self._waiting: dict[int, asyncio.Future[m.Reply]] = {}
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        keep_alive(socket)
        join(socket)
        socket.connect(address)
        self._door = Door.of(socket)
        self._receiver = asyncio.create_task(self._receive(), name=f"{name}'s answers")

    def send(self, number: int, frames: Sequence[wire.Frame]) -> asyncio.Future[m.Reply]:
        """Send a request; its answer."""
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._door.plain.send_multipart(frames, zmq.NOBLOCK, copy=False)
        self._hear()  # see `Door`
        return reply

    def close(self) -> None:
        self._receiver.cancel()
        self._door.ready.close()

    async def _receive(self) -> None:
        while True:
            await self._door.ready.poll()
            self._hear()

    def _hear(self) -> None:
        """Give out the answers that are there."""
        while (frames := self._door.read()) is not None:
            try:
                answered = wire.decode(m.Answered, frames)
            except WireError as error:
                for reply in self._waiting.values():
                    if not reply.done():
                        reply.set_exception(error)
                continue
            reply = self._waiting.pop(answered.number, None)
            if reply is not None and not reply.done():
                reply.set_result(answered.reply)
