"""One rank of a remote aux model: serves the learner's requests, with its peers in the backend's own collectives.

Invariants:
- Every rank gets the same requests in the same order from the learner, and computes its part of each, one after the other.
- A checkpoint is written while the next requests are served.
- A request that fails ends the rank with its error; no error reply is sent. The other ranks and the learner end too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from ...configs.algorithm import top_of
from ...configs.schema import Learner
from ...errors import StateError
from ...rpc.security import PeerTable
from ...rpc.server import RpcRequest, RpcServer
from ..backend import Backend, ShardedModel
from . import remote as m
from .base import score_part, take_steps


class AuxModelService:
    """Rank `name` of a model, or of several that score the episodes of an environment each, at `address`. `trained` is the model
    where it is trained, else None. `peers` may connect, None for a plain socket; only the learner may ask."""

    def __init__(
        self,
        config: Learner,
        name: str,
        address: str,
        models: Sequence[ShardedModel],
        trained: Backend | None = None,
        peers: PeerTable | None = None,
    ) -> None:
        self._peers = peers
        self._config = config
        self._name = name
        self._address = address
        self._models = models
        self._trained = trained
        self._top = top_of(config.algorithm) if trained is None else 0

    async def serve(self, on_ready: Callable[[], None]) -> None:
        server: RpcServer[m.Request] = RpcServer(
            self._address, self._name, m.Request, frame_limit=None, peers=self._peers, rights=m.RIGHTS
        )
        try:
            on_ready()
            async with asyncio.TaskGroup() as writing:

                async def handle(request: RpcRequest[m.Request]) -> m.Reply | None:
                    reply = self._handle(request.message)
                    if not isinstance(reply, Future):
                        return reply
                    writing.create_task(server.answer(request, lambda _: _when_written(reply)), name="checkpoint")
                    return None

                await server.serve(handle, "the learner's next request")
        finally:
            server.close()

    def _handle(self, request: m.Request) -> m.Reply | Future[None]:
        first, trained = self._models[0], self._trained
        if isinstance(request, m.ComputeOutputs):
            batch, budget = m.unpack(request.sequences), self._config.backend.tokens_per_microbatch
            outputs = score_part(self._models, batch, first.data_rank, first.data_size, budget, self._top)
            return m.RankOutputs(first.data_rank, outputs.ravel())
        if trained is None:
            raise StateError(f"{self._name} is never trained, and was asked to {type(request).__name__}")
        if isinstance(request, m.TrainAuxModel):
            return m.AuxModelTrained(take_steps(trained, self._config, [m.unpack(part) for part in request.parts]))
        if isinstance(request, m.SaveAuxModel):
            return trained.save(Path(request.directory), request.state)
        assert isinstance(request, m.LoadAuxModel)
        trained.load(Path(request.directory))
        return m.AuxModelDone()


async def _when_written(written: Future[None]) -> m.AuxModelDone:
    await asyncio.wrap_future(written)
    return m.AuxModelDone()
