"""What the gateway writes to its clients: replies, whole or as a stream, and failures.

Invariants:
- A stream that has to wait for its turn begins at once, any other after a silence of `keepalive_s`. From then on it has comments,
  which keep its connection open, until its call has ended.
- A call that fails is a status, with the header by which clients repeat it or do not; of a stream that has begun, it is an event.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

import msgspec
from aiohttp import web

from ...common.waits import Overdue, within
from ...envs.base import JSON
from ...errors import DeadlineExceeded, EngineError, PolicyError, describe
from ..base import ContextExhausted, Reply
from ..session import Session
from .bodies import FULL_CONTEXT, CallFailure
from .connections import ANSWER_S
from .dialect import Answer, CompletionRequest, Dialect

log = logging.getLogger(__name__)

OVER = CallFailure(401, "there is no such episode, or it is over", "invalid_api_key")
COMMENT = b": the policy is sampling\n\n"
FINAL = {"x-should-retry": "false"}  # header by which OpenAI's and Anthropic's clients do not repeat a call
LATER = {"retry-after": "1"}  # seconds: they repeat it


class AnswerWriter:
    """Writes the answer to one request for a completion.

    Attributes:
        streamed: whether the client asks for a stream, which its request says.
    """

    def __init__(self, dialect: Dialect, http: web.Request, keepalive_s: float) -> None:
        self.streamed = False
        self._dialect, self._http, self._keepalive_s = dialect, http, keepalive_s
        self._stream: web.StreamResponse | None = None  # once it has begun

    async def wait_turn(self, turn: asyncio.Future[None]) -> None:
        """Raises what `turn` does, and ConnectionResetError where the client is gone."""
        if not turn.done():
            await self._wait(turn, 0.0)
        turn.result()

    async def wait_call(self, call: asyncio.Task[Any]) -> None:
        """Return when `call` has ended, however it did. Raises ConnectionResetError where the client of a stream is gone."""
        await self._wait(call, self._keepalive_s)

    async def reply(
        self, request: CompletionRequest, session: Session, replies: tuple[Reply, ...]
    ) -> web.StreamResponse:
        """Raises ConnectionResetError where the client of a stream is gone."""
        texts: list[tuple[str, ...]] = []
        if request.logprobs and (decode := session.decode):
            texts = [tuple(decode([token]) for token in reply.completion.token_ids) for reply in replies]
        answer = Answer(uuid.uuid4().hex, int(time.time()), request.model, replies, tuple(texts))
        if not self.streamed:
            return json_response(self._dialect.write(request, answer))
        return await self._write(b"".join(self._dialect.events(request, answer)))

    async def fail(self, failure: CallFailure) -> web.StreamResponse:
        """Raises as `reply`."""
        if self._stream is None:
            return failed(self._dialect, failure)
        return await self._write(self._dialect.error_event(failure.status, failure.message, failure.code))

    def abandon(self) -> web.StreamResponse:
        """What is left of an answer whose client is gone."""
        return self._stream or web.Response()

    async def _wait(self, what: asyncio.Future[Any], silent_s: float) -> None:
        await asyncio.wait({what}, timeout=silent_s if self.streamed else None)
        while not what.done():
            await self._write(COMMENT)
            await asyncio.wait({what}, timeout=self._keepalive_s)

    async def _write(self, data: bytes) -> web.StreamResponse:
        """Write to the stream, which begins with this at the latest."""
        if self._stream is None:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            self._stream = web.StreamResponse(headers=headers)
            await self._stream.prepare(self._http)
        try:
            await within(ANSWER_S, self._stream.write(data))
        except Overdue:
            self._http.protocol.force_close()
            raise ConnectionResetError("the client does not take its answer") from None
        return self._stream


def failure_of(call: asyncio.Task[Any]) -> CallFailure | None:
    """Why `call`, which has ended, has no replies; None where it has."""
    if call.cancelled():
        return OVER
    match error := call.exception():
        case None:
            return None
        case ContextExhausted():
            return CallFailure(400, str(error), FULL_CONTEXT)
        case PolicyError():
            return CallFailure(400, str(error))
        case EngineError() | DeadlineExceeded():
            return CallFailure(502, describe(error))
        case _:
            log.error("a call of an agent failed", exc_info=error)
            return CallFailure(500, describe(error))


def failed(dialect: Dialect, failure: CallFailure) -> web.Response:
    headers = LATER if failure.status == 429 else FINAL
    return json_response(dialect.error(failure.status, failure.message, failure.code), failure.status, headers)


def json_response(body: JSON, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    encoded = msgspec.json.encode(body)
    return web.Response(body=encoded, status=status, headers=headers, content_type="application/json")
