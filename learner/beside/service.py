"""One rank of a placed model: does what the learner asks, with its peers in the backend's own collectives.

    who waits       for what                                   until
    the rank        the learner's next request                 the run's end
    the rank        its peers, in each collective              the backend's timeout, then LearnerError
    a request       the one before it                          that is done

Invariants:
- Every rank is asked the same in the same order, and takes its part of it: nobody but the learner says what comes next.
- A checkpoint is written while the next requests are carried out.
- What cannot be done ends the rank by its error, and with it the others and the learner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import zmq
import zmq.asyncio

from ...buffer import wire
from ...buffer.line import LINGER_MS
from ...configs.schema import Learner
from ...curve import Guard
from ...errors import StateError, Waiting, WireError
from ...keepalive import keep_alive
from ..backend import Backend
from . import messages as m
from .model import Ranked, score_part, steps

log = logging.getLogger(__name__)


class Service:
    """Rank `name` of a model, at `address`.

    Args:
        config: the learner's section.
        model: this rank's part.
        trained: the same where it learns, None where it is only asked.
    """

    def __init__(self, config: Learner, name: str, address: str, model: Ranked, trained: Backend | None = None) -> None:
        self._config = config
        self._name = name
        self._address = address
        self._model = model
        self._trained = trained

    async def serve(self, on_ready: Callable[[], None]) -> None:
        """Answer until it is cancelled."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        keep_alive(socket)
        guard = Guard(context)
        try:
            guard.protect(socket)
            socket.bind(self._address)
            on_ready()
            async with asyncio.TaskGroup() as writing:
                while True:
                    with Waiting(self._name, "the learner's next request"):
                        identity, *frames = await socket.recv_multipart(copy=False)
                    try:
                        asked = wire.decode(m.Asked, [frame.buffer for frame in frames])
                    except WireError as error:
                        log.warning("dropped a message that is no request: %s", error)
                        continue
                    reply = self._carry_out(asked.request)
                    if isinstance(reply, Future):
                        whole = _tell_when_whole(socket, identity.bytes, asked.number, reply)
                        writing.create_task(whole, name="checkpoint")
                    else:
                        await _tell(socket, identity.bytes, asked.number, reply)
        finally:
            guard.close()
            socket.close()
            context.term()

    def _carry_out(self, request: m.Request) -> m.Reply | Future[None]:
        model, trained = self._model, self._trained
        if isinstance(request, m.Score):
            sequences, budget = m.unpack(request.sequences), self._config.backend.tokens_per_microbatch
            said = score_part(model, sequences, model.data_rank, model.data_size, budget)
            return m.Part(model.data_rank, said)
        if trained is None:
            raise StateError(f"{self._name} is never trained, and was asked to {type(request).__name__}")
        if isinstance(request, m.Learn):
            return m.Learnt(steps(trained, self._config, [m.unpack(part) for part in request.parts]))
        if isinstance(request, m.Save):
            return trained.save(Path(request.directory), request.state)
        assert isinstance(request, m.Load)
        trained.load(Path(request.directory))
        return m.Done()


async def _tell(socket: zmq.asyncio.Socket, identity: bytes, number: int, reply: m.Reply) -> None:
    await socket.send_multipart([identity, *wire.encode(m.Answered(number, reply))], copy=False)


async def _tell_when_whole(socket: zmq.asyncio.Socket, identity: bytes, number: int, written: Future[None]) -> None:
    await asyncio.wrap_future(written)
    await _tell(socket, identity, number, m.Done())
