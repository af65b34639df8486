"""The gateway: one HTTP server per worker process, at which agents that were written elsewhere find their policy.

    http://127.0.0.1:PORT/e/KEY/v1/...      every episode has a URL of its own
    http://127.0.0.1:PORT/v1/...            or its key as the API key
    SOCKET                                  the same on a unix socket, for programs without a network

Invariants:
- An answer begins when its completion has ended; until then a stream has comments that keep the connection open.
- A failed call says so with a status, and tells clients not to repeat it, unless it only found no room (429). What failed is
  remembered by the session and by the environment's guard: an agent that carries on does not turn a failure into a reward.
- A request without the key of a running episode is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import msgspec
from aiohttp import web

from ...common.owned_folders import OwnedFolder
from ...common.waits import Overdue, within
from ...envs.base import JSON
from ...errors import DeadlineExceeded, EngineError, PolicyError, describe
from ..base import ContextExhausted, Reply
from ..session import Session
from .anthropic import AnthropicDialect
from .bodies import FULL_CONTEXT, BodyLimit, CallFailure, RefusedRequest, expected_size, read_body, tool_limit
from .chat import ChatDialect
from .connections import ANSWER_S, Connections, GatewayConnection, open_limit
from .dialect import Answer, CompletionRequest, Dialect, event
from .endpoint import Endpoint, EpisodeCalls
from .mcp import EnvTools
from .request_queue import CALLS, RequestRoom
from .responses import ResponsesDialect

log = logging.getLogger(__name__)

DIALECTS: tuple[Dialect, ...] = (ChatDialect(), ResponsesDialect(), AnthropicDialect())
KEEPALIVE_S = 5.0  # between comments in a stream: clients and proxies give up after a silence of some tens of seconds
SOCKETS = "slipstream-gateway-"  # prefix of the folder of a gateway's Unix socket
SHUTDOWN_S = 1.0  # how long connections may take to close; all episodes have ended by then
OVER = "there is no such episode, or it is over"
FINAL = {"x-should-retry": "false"}  # header by which OpenAI's and Anthropic's clients do not repeat a call
LATER = {"retry-after": "1"}  # seconds: they repeat it


class Gateway:
    """Serves the episodes of this process. Use as an async context manager, around all episodes. The replies to calls that name a
    model of the pattern `trained` have loss; others are answered by the policy, too."""

    def __init__(self, trained: str = "policy*", *, keepalive_s: float = KEEPALIVE_S) -> None:
        self._trained = trained
        self._keepalive_s = keepalive_s
        self._episodes: dict[str, EpisodeCalls] = {}

    async def __aenter__(self) -> Gateway:
        app = web.Application()
        for prefix in ("/e/{key}", ""):
            for version in ("/v1", ""):
                for dialect in DIALECTS:
                    app.router.add_post(f"{prefix}{version}{dialect.path}", functools.partial(self._complete, dialect))
                app.router.add_get(f"{prefix}{version}/models", self._models)
            app.router.add_route("*", f"{prefix}/mcp", self._mcp)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(self._runner.server, open_limit())
        loop = asyncio.get_running_loop()
        self._folder = OwnedFolder(Path(tempfile.gettempdir()), SOCKETS)  # of mode 0700
        self.socket = self._folder.path / "socket"
        local = await loop.create_server(self._connections, "127.0.0.1", 0)
        self._listening = (local, await loop.create_unix_server(self._connections, str(self.socket)))
        self.socket.chmod(0o666)  # a sandbox, which sees the socket and not the folder, has a uid of its own
        self.port = int(local.sockets[0].getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self._listening:
            server.close()
        await self._runner.cleanup()
        self._folder.close()

    @contextlib.asynccontextmanager
    async def endpoint(self, session: Session, tools: EnvTools | None = None) -> AsyncIterator[Endpoint]:
        """Open for one episode; at the end its calls are cancelled, and later ones are refused."""
        key = secrets.token_urlsafe(18)
        waiting = max(0, self._connections.share - CALLS)
        calls = self._episodes[key] = EpisodeCalls(session, tools, self._trained, waiting)
        url = f"{self.url}/e/{key}"
        try:
            yield Endpoint(url, key, f"{url}/mcp")
        finally:
            del self._episodes[key]
            await calls.close()

    def _calls(self, request: web.Request) -> EpisodeCalls | None:
        headers = request.headers
        bearer = headers.get("Authorization", "").removeprefix("Bearer ")
        key = request.match_info.get("key") or headers.get("x-api-key") or bearer
        calls = self._episodes.get(key)
        if calls is not None:
            self._connections.asked(cast(GatewayConnection, request.protocol), key)
        return calls

    @contextlib.asynccontextmanager
    async def _request(
        self, http: web.Request, calls: EpisodeCalls, limit: BodyLimit
    ) -> AsyncIterator[tuple[RequestRoom, bytes]]:
        """Around a request whose turn it is: its room and its body. Raises what `RequestQueue.turn` and `read_body` raise, and
        RefusedRequest where the episode has all its connections."""
        connection = cast(GatewayConnection, http.protocol)
        if self._connections.is_beyond_share(connection):
            most = self._connections.share
            why = f"the episode has {most} requests without an answer, or one that was not taken, as many as it may"
            raise RefusedRequest(429, why, "rate_limit_exceeded")
        async with calls.requests.turn(expected_size(http, limit), connection.gone) as room:
            body = await read_body(http, limit)
            calls.requests.has_read(room, len(body))
            yield room, body

    async def _complete(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        calls = self._calls(http)
        if calls is None:
            return _failed(dialect, CallFailure(401, OVER, "invalid_api_key"))
        retried = http.headers.get("x-stainless-retry-count", "0") != "0"
        try:
            async with self._request(http, calls, calls.limit) as (room, body):
                request = _read(dialect, body)
                room.call = work = calls.complete(request, body, retried=retried)
                return await self._replied(dialect, http, request, calls, work)
        except RefusedRequest as refused:
            if refused.failure.code == FULL_CONTEXT:
                calls.session.exhausted.append(refused.failure.message)
            return _failed(dialect, refused.failure)
        except PolicyError:
            return _failed(dialect, CallFailure(401, OVER, "invalid_api_key"))
        except ConnectionResetError:  # the client is gone
            return web.Response()

    async def _replied(
        self,
        dialect: Dialect,
        http: web.Request,
        request: CompletionRequest,
        calls: EpisodeCalls,
        work: asyncio.Task[tuple[Reply, ...]],
    ) -> web.StreamResponse:
        await asyncio.wait({work}, timeout=self._keepalive_s if request.stream else None)
        if request.stream and (not work.done() or _failure_of(work) is None):
            return await self._stream(dialect, http, request, calls, work)
        if failure := _failure_of(work):
            return _failed(dialect, failure)
        return _json(dialect.write(request, _answer(request, calls, work.result())))

    async def _stream(
        self,
        dialect: Dialect,
        http: web.Request,
        request: CompletionRequest,
        calls: EpisodeCalls,
        work: asyncio.Task[tuple[Reply, ...]],
    ) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        with contextlib.suppress(ConnectionResetError):  # the client is gone; its call goes on
            await out.prepare(http)
            while not work.done():
                await _write(http, out, b": the policy is sampling\n\n")
                await asyncio.wait({work}, timeout=self._keepalive_s)
            if failure := _failure_of(work):
                await _write(http, out, event(dialect.error(failure.status, failure.message, failure.code), "error"))
            else:
                await _write(http, out, b"".join(dialect.events(request, _answer(request, calls, work.result()))))
        return out

    async def _models(self, http: web.Request) -> web.Response:
        if self._calls(http) is None:
            return _failed(DIALECTS[0], CallFailure(401, OVER, "invalid_api_key"))
        policy = {"id": "policy", "object": "model", "created": 0, "owned_by": "slipstream"}
        return _json({"object": "list", "data": [policy]})

    async def _mcp(self, http: web.Request) -> web.Response:
        calls = self._calls(http)
        if calls is None or calls.tools is None:
            return _json(
                {"error": OVER if calls is None else "this agent has no tools here"}, 401 if calls is None else 404
            )
        if http.method != "POST":  # no stream from the server, no session to end
            return web.Response(status=405, headers={"Allow": "POST"})
        try:
            async with self._request(http, calls, tool_limit()) as (room, body):
                room.call = work = calls.run(calls.tools.answer(body))
                await asyncio.wait({work})
        except RefusedRequest as refused:
            return _json({"error": refused.failure.message}, refused.failure.status)
        except PolicyError:
            return _json({"error": OVER}, 401)
        except ConnectionResetError:  # the client is gone
            return web.Response()
        if work.cancelled():
            return _json({"error": OVER}, 401)
        answer = work.result()
        return web.Response(status=202) if answer is None else _json(answer)


async def _write(http: web.Request, out: web.StreamResponse, data: bytes) -> None:
    """Raises ConnectionResetError: the client is gone, or does not take it."""
    try:
        await within(ANSWER_S, out.write(data))
    except Overdue:
        http.protocol.force_close()
        raise ConnectionResetError("the client does not take its answer") from None


def _read(dialect: Dialect, body: bytes) -> CompletionRequest:
    """Raises RefusedRequest."""
    try:
        return dialect.read(body)
    except PolicyError as error:
        raise RefusedRequest(400, str(error)) from None


def _answer(request: CompletionRequest, calls: EpisodeCalls, replies: tuple[Reply, ...]) -> Answer:
    texts: list[tuple[str, ...]] = []
    if request.logprobs and (decode := calls.session.decode):
        texts = [tuple(decode([token]) for token in reply.completion.token_ids) for reply in replies]
    return Answer(uuid.uuid4().hex, int(time.time()), request.model, replies, tuple(texts))


def _failure_of(work: asyncio.Task[tuple[Reply, ...]]) -> CallFailure | None:
    """Why `work`, which has ended, has no replies; None where it has."""
    if work.cancelled():
        return CallFailure(401, OVER, "invalid_api_key")
    match error := work.exception():
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


def _failed(dialect: Dialect, failure: CallFailure) -> web.Response:
    headers = LATER if failure.status == 429 else FINAL
    return _json(dialect.error(failure.status, failure.message, failure.code), failure.status, headers)


def _json(body: JSON, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    encoded = msgspec.json.encode(body)
    return web.Response(body=encoded, status=status, headers=headers, content_type="application/json")
