"""The HTTP routes of Slipstream's own server: the part of vLLM's protocol that `VllmEngine` uses, so that one client serves both.

Invariants:
- A request whose client disconnects is aborted.
- The event loop computes nothing: model work runs in the engine thread, weights are received in `WeightStaging`'s thread.
- A refusal is a 400 with one sentence, an error of a weight push a 500 with one sentence. Neither changes any state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Literal, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from ....errors import SlipstreamError
from ....weightsync.plan import GroupPlan, TransferPlan
from ....weightsync.staging import WeightStaging
from ..access import DESCRIPTION_PATH, OK, own_access, own_description
from ..base import STREAM_INTERVAL
from ..expert_codec import joined
from .contract import EngineServer
from .engine_thread import EngineThread, Mode
from .protocol import (
    ABORT_PREFIX,
    AWAKE,
    CACHE,
    WEIGHTS,
    BadRequest,
    Generated,
    GenerateRequest,
    Logprobs,
    TokenUsage,
    WireChoice,
    logprob,
)

T = TypeVar("T")

ENGINE = web.AppKey("ENGINE", EngineThread)  # of an app: its engine, for middlewares
BODY_LIMIT = 256 << 20  # bytes: a prompt of millions of tokens, or the plan of a model of a million tensors


class _InitBody(msgspec.Struct, frozen=True):
    init_info: dict[Literal["plan"], GroupPlan]


class _UpdateBody(msgspec.Struct, frozen=True):
    update_info: dict[Literal["plan"], TransferPlan]


class _FinishBody(msgspec.Struct, frozen=True):
    weight_version: str


class _AbortBody(msgspec.Struct, frozen=True):
    """No ids mean all, as in vLLM."""

    request_ids: tuple[str, ...] = ()


class HttpApp:
    """The routes over `engine`, which starts with the app; `staging` receives weights meanwhile. `guards` come before
    everything."""

    def __init__(
        self, engine: EngineThread, server: EngineServer, staging: WeightStaging, guards: tuple[Middleware, ...] = ()
    ) -> None:
        self._guards = guards
        self._engine = engine
        self._server = server
        self._staging = staging

    def app(self) -> web.Application:
        app = web.Application(
            middlewares=(*self._guards, *self._server.middlewares, _errors), client_max_size=BODY_LIMIT
        )
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/weight_info", self._weight_info),
                web.get("/is_paused", self._is_paused),
                web.get("/is_sleeping", self._is_sleeping),
                web.post("/inference/v1/generate", self._generate),
                web.post("/abort_requests", self._abort_requests),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake),
                web.post("/init_weight_transfer_engine", self._join),
                web.post("/start_weight_update", self._start),
                web.post("/update_weights", self._receive),
                web.post("/finish_weight_update", self._swap),
            ]
        )
        app[ENGINE] = self._engine
        app.cleanup_ctx.append(self._lifespan)
        return app

    async def _lifespan(self, app: web.Application) -> AsyncIterator[None]:
        self._engine.start()
        yield
        await self._engine.close()
        self._staging.close()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = _decode(await request.read(), GenerateRequest)
        sequence = body.sequence(self._server.limits)
        if body.sampling_params.prompt_logprobs is not None:
            return await self._score(body)
        interval = (body.sampling_params.stream_interval or STREAM_INTERVAL) if body.stream else None
        chunks = await self._engine.submit(sequence, interval)
        try:
            if body.stream:
                return await _stream(request, body, chunks)
            return _json(Generated((await _whole(chunks),), body.request_id))
        except BaseException:  # the client disconnected, or this process ends
            self._engine.abort(sequence.id)
            raise

    async def _score(self, body: GenerateRequest) -> web.Response:
        """The prompt's log-probs, without sampling: a canary must not queue behind the episodes."""
        if body.stream or body.sampling_params.max_tokens != 1:
            raise BadRequest("prompt_logprobs are available with max_tokens=1 and stream=false only")
        values = await self._engine.score(body.token_ids)
        scores = ({str(t): logprob(t, v)} for t, v in zip(body.token_ids[1:], values, strict=True))
        return _json(Generated((), body.request_id, (None, *scores)))

    async def _abort_requests(self, request: web.Request) -> web.Response:
        names = _decode(await request.read(), _AbortBody).request_ids
        ids = tuple(name.removeprefix(ABORT_PREFIX) for name in names if name.startswith(ABORT_PREFIX))
        aborted = await self._engine.aborted(ids if names else None)
        return _json({"status": "aborted", "aborted": aborted})

    async def _pause(self, request: web.Request) -> web.Response:
        mode, clear = _mode(request), request.query.get("clear_cache", "true").lower()
        if clear not in ("true", "false"):
            raise BadRequest(f"clear_cache={clear!r}: allowed are true and false")
        await self._engine.pause(mode, clear_cache=clear == "true")
        return _json({"status": "paused"})

    async def _sleep(self, request: web.Request) -> web.Response:
        if (level := request.query.get("level", "1")) != "2":
            raise BadRequest(f"level={level!r}: allowed is 2, which keeps no copy of the weights")
        await self._engine.sleep(_mode(request), self._server.weights.free)
        return _json({"status": "sleeping", "level": 2})

    async def _wake(self, request: web.Request) -> web.Response:
        parts = frozenset(request.query.getall("tags", (WEIGHTS, CACHE)))
        if unknown := parts - {WEIGHTS, CACHE}:
            raise BadRequest(f"tags={min(unknown)!r}: allowed are {WEIGHTS} and {CACHE}")
        awake = await self._engine.wake(parts, self._server.weights.allocate)
        return _json({"status": AWAKE if awake else "sleeping"})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        return _json({"is_sleeping": bool(self._engine.freed)})

    async def _resume(self, request: web.Request) -> web.Response:
        await self._engine.resume()
        return _json({"status": "resumed"})

    async def _is_paused(self, request: web.Request) -> web.Response:
        return _json({"is_paused": self._engine.paused})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _weight_info(self, request: web.Request) -> web.Response:
        return _json({"weight_version": self._engine.version})

    async def _metrics(self, request: web.Request) -> web.Response:
        load = self._engine.load
        values = {
            "num_requests_running": load.running,
            "num_requests_waiting": load.waiting,
            "kv_cache_usage_perc": load.kv_usage,
            "generation_tokens_total": load.tokens,
        }
        lines = [f'# TYPE vllm:{k} gauge\nvllm:{k}{{engine="0",model_name="policy"}} {v}\n' for k, v in values.items()]
        return web.Response(text="".join(lines), content_type="text/plain")

    async def _join(self, request: web.Request) -> web.Response:
        body = _decode(await request.read(), _InitBody)
        # In parallel threads: the group of a dead learner may block its thread until a deadline.
        await asyncio.to_thread(self._staging.join, body.init_info["plan"])
        return _json({"message": "Weight transfer initialized"})

    async def _start(self, request: web.Request) -> web.Response:
        self._staging.discard()
        return _json({"message": "Weight update started"})

    async def _receive(self, request: web.Request) -> web.Response:
        self._staging.begin(_decode(await request.read(), _UpdateBody).update_info["plan"])
        return _json({"message": "Weights updated"})

    async def _swap(self, request: web.Request) -> web.Response:
        version = _decode(await request.read(), _FinishBody).weight_version
        if not version.isdigit():
            raise BadRequest(f"weight_version {version!r} is not a policy version")
        tensors = await asyncio.to_thread(self._staging.take, int(version))
        await self._engine.swap(version, lambda: self._server.weights.load(tensors))
        return _json({"message": "Weight update finished"})


def _mode(request: web.Request) -> Mode:
    mode = request.query.get("mode", "abort")
    if mode != "keep" and mode != "abort":
        raise BadRequest(f"mode={mode!r}: allowed are keep and abort")
    return mode


def guard() -> Middleware:
    """Lets only who has a token of this run use the server."""
    access, description = own_access(), own_description()

    @web.middleware
    async def check(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        status = access.allows(request.path, request.headers.get("Authorization", "").encode())
        if status == OK and request.path == DESCRIPTION_PATH and description:
            return web.Response(body=description, content_type="application/json")
        return await handler(request) if status == OK else web.Response(status=status)

    return check


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadRequest as error:
        return _refusal(400, str(error))
    except SlipstreamError as error:
        return _refusal(500, f"{type(error).__name__}: {error}")


def _refusal(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message, "code": status}}, status)


def _json(answer: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(answer), content_type="application/json")


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise BadRequest(str(error)) from error


async def _chunks(stream: asyncio.Queue[WireChoice]) -> AsyncIterator[WireChoice]:
    finished = False
    while not finished:
        chunk = await stream.get()
        yield chunk
        finished = chunk.finish_reason is not None


async def _whole(stream: asyncio.Queue[WireChoice]) -> WireChoice:
    parts = [chunk async for chunk in _chunks(stream)]
    tokens = tuple(token for part in parts for token in part.token_ids or ())
    logprobs = tuple(entry for part in parts for entry in (part.logprobs and part.logprobs.content) or ())
    experts = joined([part.routed_experts for part in parts if part.routed_experts is not None])
    return msgspec.structs.replace(parts[-1], token_ids=tokens, logprobs=Logprobs(logprobs), routed_experts=experts)


async def _stream(request: web.Request, body: GenerateRequest, chunks: asyncio.Queue[WireChoice]) -> web.StreamResponse:
    """Send chunks as server-sent events. Raises ConnectionResetError, or is cancelled, when the client disconnects."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    sampled = 0
    async for chunk in _chunks(chunks):
        sampled += len(chunk.token_ids or ())
        await response.write(_event(Generated((chunk,), body.request_id)))
    if body.stream_options is not None and body.stream_options.include_usage:
        await response.write(_event(Generated((), body.request_id, usage=TokenUsage(len(body.token_ids), sampled))))
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _event(chunk: Generated) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
