"""Aux models in processes of their own, from the learner's side: rank 0 sends requests to each of their ranks.

Invariants:
- A request is sent to all ranks of the model, in the same order, before the learner waits for a reply.
- Replies are matched by number. The reply to a save may come after those to later requests.
- Requests of one learner are served in the order in which they were sent. A rank that fails exits; no error reply is sent.
- A model that does not reply within `batch_s` is a LearnerError that names its silent ranks. It is not final: a restart may
  reconnect them. The loop has its own deadline for checkpoints.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import torch
import zmq.asyncio
from numpy.typing import NDArray

from ...configs.schema import Learner
from ...errors import DeadlineExceeded, LearnerError, with_deadline
from ...rpc.client import RpcClient
from ..batch import TrainBatch, make_batch
from ..checkpoint_folder import CheckpointState
from ..distributed import broadcast_from_first
from ..metrics import AuxModelsResult
from .base import Outputs, Pending, in_order


class Sequences(msgspec.Struct, frozen=True):
    """The columns of a `TrainBatch` that aux models use, and the `lengths` of its sequences."""

    lengths: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    positive: NDArray[np.bool_]
    episode: NDArray[np.int64]
    teacher: NDArray[np.int64] | None = None
    reference_logprobs: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None


class AuxRequest(msgspec.Struct, frozen=True, tag=True):
    """Base of all requests and replies."""


class ComputeOutputs(AuxRequest, frozen=True):
    """Compute the outputs for this rank's part. Reply: `RankOutputs`."""

    sequences: Sequences


class TrainAuxModel(AuxRequest, frozen=True):
    """Take one step on each of `parts`. Reply: `AuxModelTrained`."""

    parts: tuple[Sequences, ...]


class SaveAuxModel(AuxRequest, frozen=True):
    """Write a checkpoint into `directory`. Reply: `AuxModelDone`, when it is complete."""

    directory: str
    state: CheckpointState


class LoadAuxModel(AuxRequest, frozen=True):
    """Resume from `directory`. Reply: `AuxModelDone`."""

    directory: str


class RankOutputs(AuxRequest, frozen=True):
    """What `score_part` gave for data rank `rank`, row by row. Ranks that share a data rank send the same."""

    rank: int
    outputs: NDArray[np.float32]


class AuxModelTrained(AuxRequest, frozen=True):
    """The result of the steps; the same from every rank."""

    result: AuxModelsResult


class AuxModelDone(AuxRequest, frozen=True):
    """The request was served."""


Request = ComputeOutputs | TrainAuxModel | SaveAuxModel | LoadAuxModel
Reply = RankOutputs | AuxModelTrained | AuxModelDone
RIGHTS = dict.fromkeys((ComputeOutputs, TrainAuxModel, SaveAuxModel, LoadAuxModel), ("learner",))


def pack(batch: TrainBatch) -> Sequences:
    return Sequences(
        lengths=batch.sizes.astype(np.int32),
        token_ids=batch.token_ids,
        loss_mask=batch.loss_mask,
        positive=batch.positive,
        episode=batch.episode,
        teacher=batch.teacher,
        reference_logprobs=batch.reference_logprobs,
        values=batch.values,
        returns=batch.returns,
    )


def unpack(packed: Sequences) -> TrainBatch:
    return make_batch(
        packed.token_ids,
        packed.loss_mask,
        packed.lengths.astype(np.int64),
        positive=packed.positive,
        episode=packed.episode,
        teacher=packed.teacher,
        reference_logprobs=packed.reference_logprobs,
        values=packed.values,
        returns=packed.returns,
    )


R = TypeVar("R", RankOutputs, AuxModelTrained, AuxModelDone)


class RemoteModel:
    """The same methods as `LocalTrainableModel`. Only rank 0 of the learner knows `addresses` of ranks; the others get its
    broadcast. `clients` has the connection to each rank; `top` is that of `score_part`, as its ranks have it."""

    remote = True

    def __init__(self, config: Learner, kind: str, addresses: Sequence[str], top: int = 0) -> None:
        self._budget = config.backend.tokens_per_microbatch
        self._width = 1 + 2 * top
        self._deadline_s = config.batch_s
        self._kind = kind
        self._context = zmq.asyncio.Context()
        self.clients = [
            RpcClient(address, f"{kind}-{i}", f"{kind}-{i}", Reply, frame_limit=None, context=self._context)
            for i, address in enumerate(addresses)
        ]

    def scored_rows(self, batch: TrainBatch) -> Sequence[int]:
        """Rank 0 sends all of them."""
        return range(len(batch)) if self.clients else ()

    def trained_rows(self, batch: TrainBatch, minibatches: int) -> Sequence[int]:
        return self.scored_rows(batch)

    def score(self, batch: TrainBatch) -> Pending[Outputs]:
        replies = self._ask(ComputeOutputs(pack(batch)), RankOutputs)

        async def result() -> Outputs:
            outputs = np.zeros((len(batch.token_ids), self._width), dtype=np.float32)
            if parts := {part.rank: part for part in await replies()}:
                joined = np.concatenate([parts[rank].outputs for rank in range(len(parts))]).reshape(-1, self._width)
                outputs = in_order(joined, batch, len(parts), self._budget)
            return broadcast_from_first(torch.from_numpy(outputs)).numpy()

        return result

    def learn(self, parts: Sequence[TrainBatch]) -> Pending[AuxModelsResult]:
        replies = self._ask(TrainAuxModel(tuple(map(pack, parts))), AuxModelTrained)

        async def result() -> AuxModelsResult:
            return next((trained.result for trained in await replies()), AuxModelsResult())

        return result

    def save(self, directory: Path, state: CheckpointState) -> Awaitable[None]:
        written = self._send(SaveAuxModel(str(directory), state), AuxModelDone).values()
        return asyncio.ensure_future(_all_done(written))

    async def load(self, directory: Path) -> None:
        await self._ask(LoadAuxModel(str(directory)), AuxModelDone)()

    def close(self) -> None:
        """Leave the model, which stays."""
        for client in self.clients:
            client.close()
        self._context.term()

    def _send(self, request: Request, expected: type[R]) -> dict[str, asyncio.Future[R]]:
        """Send `request` to every rank; the reply of each, by the rank's name. None where this is not rank 0 of the learner."""
        return {client.name: client.send(request, expected) for client in self.clients}

    def _ask(self, request: Request, expected: type[R]) -> Pending[list[R]]:
        sent, what = self._send(request, expected), type(request).__name__

        def silent() -> str:
            names = " and ".join(name for name, reply in sent.items() if reply.cancelled())
            return f"{names} did not answer; see logs/{self._kind}-*.log, and learner.batch_s"

        async def result() -> list[R]:
            replies = asyncio.gather(*sent.values())
            waits_for = f"the {self._kind}'s answer to {what}"
            try:
                return await with_deadline(
                    self._deadline_s, replies, who="the learner", waits_for=waits_for, hint=silent
                )
            except DeadlineExceeded as error:
                raise LearnerError(str(error), final=False) from error

        return result


async def _all_done(replies: Iterable[asyncio.Future[AuxModelDone]]) -> None:
    await asyncio.gather(*replies)
