"""Scripted faults: what goes wrong, where, and the how manieth time.

Invariants:
- `Faults` only counts; what a fault does is done by whoever asked it, at the place where it goes wrong.
- A fault happens once in the life of a process. Points are counted apart, from 1; a point that goes wrong counts too.
- A lie is well-formed and false: an order that is confirmed and not carried out, or an answer that cannot be true.

| at       | counts                          | lie                                              |
|----------|---------------------------------|--------------------------------------------------|
| start    | the start of the process        | -                                                |
| generate | requests for a completion       | a token without a log-prob                       |
| token    | tokens sampled, of all requests | a log-prob that is not a number                  |
| score    | requests for the canary         | every log-prob is -1                             |
| pause, resume, join, receive, swap | the request | confirmed, not carried out                 |
| health   | questions whether it is healthy | -                                                |
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from ...configs.checks import meaningless
from ...configs.schema import Fault
from ...errors import ConfigError, EngineError
from .protocol import Choice, Generated, GenerateRequest, Logprob, Logprobs

log = logging.getLogger(__name__)

POINTS = {
    "/health": "health",
    "/pause": "pause",
    "/resume": "resume",
    "/init_weight_transfer_engine": "join",
    "/update_weights": "receive",
    "/finish_weight_update": "swap",
}
"""Routes that are one point each; `/inference/v1/generate` is two."""

LIE = -1.0
"""nats; what every token has, says a server that lies about its scores."""


class Faults:
    """The faults of one process, and how often each point was passed.

    Args:
        faults: those of the whole run.
        replica: which replica this process is; faults of others are not its own.

    Raises:
        ConfigError: a fault that means nothing.
    """

    def __init__(self, faults: Iterable[Fault], replica: int) -> None:
        self._passed: Counter[str] = Counter()
        self._due: dict[str, dict[int, Fault]] = defaultdict(dict)
        for fault in faults:
            if problem := meaningless(fault):
                raise ConfigError(f"rollout.engine.faults: {problem}")
            if fault.replica in (-1, replica):
                self._due[fault.at].setdefault(fault.nth, fault)

    def passing(self, point: str) -> Fault | None:
        """Count one more time at `point`, and return what goes wrong this time."""
        self._passed[point] += 1
        return self._due[point].pop(self._passed[point], None)


def strike(fault: Fault) -> None:
    """Do what needs no answer: die, or freeze. Returns for the other kinds, and after a freeze that was ended by SIGCONT."""
    if fault.do not in ("die", "freeze"):
        return
    log.warning("scripted fault: %s at %s %d", fault.do, fault.at, fault.nth)
    os.kill(os.getpid(), signal.SIGKILL if fault.do == "die" else signal.SIGSTOP)


def at_start(faults: Faults) -> None:
    """Pass `start`. Raises EngineError where the process is to refuse."""
    fault = faults.passing("start")
    if fault is None:
        return
    strike(fault)
    if fault.do == "delay":
        time.sleep(fault.seconds)
    if fault.do == "refuse":
        raise EngineError("scripted fault: refused to start")


def at_token(faults: Faults) -> bool:
    """Pass `token`, in the engine thread. Whether the token's log-prob is to be a lie."""
    fault = faults.passing("token")
    if fault is None:
        return False
    strike(fault)
    if fault.do == "delay":
        time.sleep(fault.seconds)
    return fault.do == "lie"


def middleware(faults: Faults) -> Middleware:
    """What sees every request before the app does, and lets it go wrong."""

    @web.middleware
    async def go_wrong(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        point = await _point(request)
        fault = faults.passing(point) if point else None
        if fault is None:
            return await handler(request)
        strike(fault)
        if fault.do == "delay":
            await asyncio.sleep(fault.seconds)
        if fault.do == "refuse":
            return web.Response(status=500, text=f"scripted fault: refused at {fault.at} {fault.nth}")
        if fault.do == "lie":
            return await _lie(request, fault)
        return await handler(request)

    return go_wrong


async def _point(request: web.Request) -> str | None:
    if request.path == "/inference/v1/generate":
        return "score" if b'"prompt_logprobs"' in await request.read() else "generate"
    return POINTS.get(request.path)


async def _lie(request: web.Request, fault: Fault) -> web.Response:
    if fault.at not in ("generate", "score"):
        return web.json_response({"message": "done"})
    asked = msgspec.json.decode(await request.read(), type=GenerateRequest)
    choice = Choice((asked.token_ids[0],), Logprobs(()), (), "length")
    if fault.at == "score":
        lies = tuple({str(token): Logprob(token, LIE)} for token in asked.token_ids[1:])
        answer = msgspec.json.encode(Generated(asked.request_id, (choice,), (None, *lies)))
        return web.Response(body=answer, content_type="application/json")
    event = b"data: " + msgspec.json.encode(Generated(asked.request_id, (choice,))) + b"\n\ndata: [DONE]\n\n"
    return web.Response(body=event, content_type="text/event-stream")
