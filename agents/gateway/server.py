"""The gateway: one HTTP server per worker process, at which agents that were written elsewhere find their policy.

    http://127.0.0.1:PORT/e/KEY/v1/...      every episode has a URL of its own
    http://127.0.0.1:PORT/v1/...            or its key as the API key
    SOCKET                                  the same on a unix socket, for programs without a network

Invariants:
- An answer begins when its completion has ended; until then a stream has comments (`answers`).
- A failed call says so with a status, and tells clients not to repeat it, unless it only found no room (429). What failed is
  remembered by the session and by the environment's guard: an agent that carries on does not turn a failure into a reward.
- A request without the key of a running episode is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import secrets
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

from aiohttp import web

from ...common.owned_folders import OwnedFolder
from ...errors import PolicyError
from ..session import Session
from .answers import OVER, AnswerWriter, failed, failure_of, json_response
from .anthropic import AnthropicDialect
from .bodies import FULL_CONTEXT, BodyLimit, CallFailure, RefusedRequest, expected_size, read_body, tool_limit
from .chat import ChatDialect
from .connections import Connections, GatewayConnection, open_limit
from .dialect import SHOWN, CompletionRequest, Dialect
from .endpoint import Endpoint, EpisodeCalls
from .mcp import EnvTools
from .request_queue import CALLS, RequestRoom
from .responses import ResponsesDialect

DIALECTS: tuple[Dialect, ...] = (ChatDialect(), ResponsesDialect(), AnthropicDialect())
PATHS = f"POST {', '.join(f'/v1{dialect.path}' for dialect in DIALECTS)} and /mcp, and GET /v1/models"
EPISODE = re.compile(r"^/e/[^/]+")  # what comes before the path of the API
BEARER = re.compile(r"^bearer +", re.IGNORECASE)
KEEPALIVE_S = 5.0  # between comments in a stream: clients and proxies give up after a silence of some tens of seconds
SOCKETS = "slipstream-gateway-"  # prefix of the folder of a gateway's Unix socket
SHUTDOWN_S = 1.0  # how long connections may take to close; all episodes have ended by then


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
        app.router.add_route("*", "/{anything:.*}", self._nothing)
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
        bearer = BEARER.sub("", headers.get("Authorization", ""))
        key = request.match_info.get("key") or headers.get("x-api-key") or bearer
        calls = self._episodes.get(key)
        if calls is not None:
            self._connections.asked(cast(GatewayConnection, request.protocol), key)
        return calls

    @contextlib.asynccontextmanager
    async def _request(
        self, http: web.Request, calls: EpisodeCalls, limit: BodyLimit
    ) -> AsyncIterator[tuple[RequestRoom, bytes]]:
        """Around a request that has been read: its room and its body. Raises what `RequestQueue.room` and `read_body` raise, and
        RefusedRequest where the episode has all its connections."""
        connection = cast(GatewayConnection, http.protocol)
        if self._connections.is_beyond_share(connection):
            most = self._connections.share
            why = f"the episode has {most} requests without an answer, or one that was not taken, as many as it may"
            raise RefusedRequest(429, why, "rate_limit_exceeded")
        async with calls.requests.room(expected_size(http, limit), connection.gone) as room:
            body = await read_body(http, limit)
            room.shrink_to(len(body))
            yield room, body

    async def _complete(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        calls = self._calls(http)
        if calls is None:
            return failed(dialect, OVER)
        retried = http.headers.get("x-stainless-retry-count", "0") != "0"
        answer = AnswerWriter(dialect, http, self._keepalive_s)
        try:
            try:
                async with self._request(http, calls, calls.limit) as (room, body):
                    request = _read(dialect, body)
                    answer.streamed = request.stream
                    turn = room.turn()
                    with room.tracked():
                        await answer.wait_turn(turn)
                    room.call = work = calls.complete(request, body, retried=retried)
                    await answer.wait_call(work)
                    if failure := failure_of(work):
                        return await answer.fail(failure)
                    return await answer.reply(request, calls.session, work.result())
            except RefusedRequest as refused:
                if refused.failure.code == FULL_CONTEXT:
                    calls.session.exhausted.append(refused.failure.message)
                return await answer.fail(refused.failure)
            except PolicyError:
                return await answer.fail(OVER)
        except ConnectionResetError:  # the client is gone; its call goes on
            return answer.abandon()

    async def _models(self, http: web.Request) -> web.Response:
        if self._calls(http) is None:
            return failed(DIALECTS[0], OVER)
        policy = {"id": "policy", "object": "model", "created": 0, "owned_by": "slipstream"}
        return json_response({"object": "list", "data": [policy]})

    async def _nothing(self, http: web.Request) -> web.Response:
        dialect = next((one for one in DIALECTS if one.path in http.path), DIALECTS[0])
        why = f"there is no {http.method} {EPISODE.sub('', http.path)[:SHOWN]!r} here; there are {PATHS}"
        return failed(dialect, CallFailure(404, why))

    async def _mcp(self, http: web.Request) -> web.Response:
        calls = self._calls(http)
        if calls is None or calls.tools is None:
            return json_response(
                {"error": OVER.message if calls is None else "this agent has no tools here"},
                401 if calls is None else 404,
            )
        if http.method != "POST":  # no stream from the server, no session to end
            return web.Response(status=405, headers={"Allow": "POST"})
        try:
            async with self._request(http, calls, tool_limit()) as (room, body):
                turn = room.turn()
                with room.tracked():
                    await turn
                room.call = work = calls.run(calls.tools.answer(body))
                await asyncio.wait({work})
        except RefusedRequest as refused:
            return json_response({"error": refused.failure.message}, refused.failure.status)
        except PolicyError:
            return json_response({"error": OVER.message}, OVER.status)
        except ConnectionResetError:  # the client is gone
            return web.Response()
        if work.cancelled():
            return json_response({"error": OVER.message}, OVER.status)
        answer = work.result()
        return web.Response(status=202) if answer is None else json_response(answer)


def _read(dialect: Dialect, body: bytes) -> CompletionRequest:
    """Raises RefusedRequest."""
    try:
        return dialect.read(body)
    except PolicyError as error:
        raise RefusedRequest(400, str(error)) from None
