"""Scripted faults: what fails, at which point, and on which occurrence (1-based).

Invariants:
- `FaultInjector` only counts; its caller applies the fault.
- A fault happens once in the life of a process, or `times` in a row. Every point has its own counter, from 1; a failing occurrence
  counts, too.
- A lie is well-formed and false: a command that is confirmed and not executed, or an impossible answer.

| at       | counts                          | lie                                              |
|----------|---------------------------------|--------------------------------------------------|
| start    | the start of the process        | -                                                |
| generate | requests for a completion       | a reply that is false in what `about` says       |
| token    | tokens sampled, of all requests | a log-prob that is not a number, or off by `nats` |
| score    | requests for the canary         | every log-prob is -1                             |
| pause, resume, join, receive, swap, sleep | the request | confirmed, not executed             |
| wake     | the requests, two for each sleep: for the weights, then for the cache | confirmed, not executed |
| health   | health requests                 | -                                                |
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated, Literal, get_args, get_type_hints

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

from ....configs.section import AboveZero, Positive
from ....configs.yaml_text import parse
from ....errors import ConfigError, EngineError
from ..base import IMPOSSIBLE, OutputSpan
from ..server.app import ENGINE
from ..server.protocol import Generated, GenerateRequest, Logprob, Logprobs, WireChoice

log = logging.getLogger(__name__)

# Routes that are one point each; `/inference/v1/generate` is two.
POINTS = {
    "/health": "health",
    "/pause": "pause",
    "/resume": "resume",
    "/init_weight_transfer_engine": "join",
    "/update_weights": "receive",
    "/finish_weight_update": "swap",
    "/sleep": "sleep",
    "/wake_up": "wake",
}
LIE = (
    -1.0
)  # the log-prob in nats of every token in a false score, and of those in a false completion that are well-formed
FOREIGN = 1 << 30  # a token id that is outside every vocabulary
FUTURE = 1000  # versions ahead of what a server serves, where none exists yet
# Environment variable with the script, for example `[{at: generate, do: die, nth: 3}]`. Without it nothing goes wrong.
VARIABLE = "SLIPSTREAM_FAULTS"


Lie = Literal["logprobs", "token", "version", "old_version", "positive", "infinite", "falling", "longer", "garbage"]
"""What a false completion is false about: a log-prob is missing; an id is outside the vocabulary; a version does not exist, or is
older than what was taken before; a log-prob is positive, or no number; versions fall; there are more tokens than asked for; it is
no completion at all."""


FaultPoint = Literal[
    "start", "generate", "token", "score", "pause", "resume", "join", "receive", "swap", "sleep", "wake", "health"
]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Something that goes wrong: end the process, stop answering, answer 500, wait `seconds` first, or answer something false."""

    at: FaultPoint
    do: Literal["die", "freeze", "refuse", "delay", "lie"]
    nth: Positive = 1
    times: Positive = 1  # in a row, from the nth on
    nats: float | None = None  # by which a false log-prob of a token is too high; None where it is not a number
    about: Lie = "logprobs"  # of a lie at `generate`
    seconds: AboveZero = 1.0
    replica: Annotated[int, msgspec.Meta(ge=-1)] = -1  # in the order in which replicas were added, from 0; -1 is any


MOST = 100_000  # occurrences of one fault: more than a process lives to see
# Pairs of `at` and `do` that mean nothing: a start and a token have no answer, and no false answer means healthy.
NO_FAULTS = {("start", "lie"), ("health", "lie"), ("token", "refuse")}


def read_script() -> tuple[Fault, ...]:
    """The faults that the environment variable scripts. Raises ConfigError where one is invalid."""
    try:
        faults = msgspec.convert(parse(os.environ.get(VARIABLE, "[]")), tuple[Fault, ...])
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{VARIABLE}: {error}") from None
    FaultInjector(faults, 0)
    return faults


class FaultInjector:
    """The count of each point in this process, and those of the run's `faults` that are for replica number `replica`. Raises
    ConfigError where one is invalid."""

    def __init__(self, faults: Iterable[Fault], replica: int) -> None:
        self._passed: Counter[str] = Counter()
        self._due: dict[str, dict[int, Fault]] = defaultdict(dict)
        for fault in faults:
            if (fault.at, fault.do) in NO_FAULTS:
                dos = get_args(get_type_hints(Fault)["do"])
                allowed = ", ".join(do for do in dos if (fault.at, do) not in NO_FAULTS)
                raise ConfigError(f"{VARIABLE}: do={fault.do} means nothing at={fault.at}; allowed there are {allowed}")
            if fault.nats is not None and (fault.at, fault.do) != ("token", "lie"):
                raise ConfigError(
                    f"{VARIABLE}: nats means nothing at={fault.at} do={fault.do}; allowed at=token do=lie"
                )
            if fault.replica in (-1, replica):
                for nth in range(fault.nth, fault.nth + min(fault.times, MOST)):
                    self._due[fault.at].setdefault(nth, fault)

    def passing(self, point: str) -> Fault | None:
        """Count an occurrence of `point`, and return its fault."""
        self._passed[point] += 1
        return self._due[point].pop(self._passed[point], None)


def hit(faults: FaultInjector, point: str) -> Fault | None:
    """Count an occurrence of `point` and return its fault, after the death or the freeze (until SIGCONT) that it scripts."""
    fault = faults.passing(point)
    if fault is not None and fault.do in ("die", "freeze"):
        log.warning("scripted fault: %s at %s %d", fault.do, fault.at, fault.nth)
        os.kill(os.getpid(), signal.SIGKILL if fault.do == "die" else signal.SIGSTOP)
    return fault


def hit_in_thread(faults: FaultInjector, point: str) -> Fault | None:
    """As `hit`, for `start` and `token`, where a delay may block. Returns a lie. Raises EngineError for a refusal."""
    fault = hit(faults, point)
    if fault is not None and fault.do == "delay":
        time.sleep(fault.seconds)
    if fault is not None and fault.do == "refuse":
        raise EngineError(f"scripted fault: refused to {point}")
    return fault if fault is not None and fault.do == "lie" else None


def reported_logprob(logprob: float, lie: Fault | None) -> float:
    """What the server says of a sampled token whose log-prob in nats is `logprob`."""
    if lie is None:
        return logprob
    return math.nan if lie.nats is None else logprob + lie.nats


def middleware(faults: FaultInjector) -> Middleware:
    @web.middleware
    async def inject(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        point = await _point(request)
        fault = hit(faults, point) if point else None
        if fault is not None and fault.do == "refuse":
            return web.Response(status=500, text=f"scripted fault: refused at {fault.at} {fault.nth}")
        if fault is not None and fault.do == "lie":
            return await _answer_falsely(request, fault)
        if fault is not None and fault.do == "delay":
            await asyncio.sleep(fault.seconds)
        return await handler(request)

    return inject


async def _point(request: web.Request) -> str | None:
    if request.path == "/inference/v1/generate":
        return "score" if b'"prompt_logprobs"' in await request.read() else "generate"
    return POINTS.get(request.path)


async def _answer_falsely(request: web.Request, fault: Fault) -> web.Response:
    if fault.at not in ("generate", "score"):
        return web.json_response({"message": "done"})
    asked = msgspec.json.decode(await request.read(), type=GenerateRequest)
    if fault.at == "score":
        lies = tuple({str(token): Logprob(LIE, token)} for token in asked.token_ids[1:])
        answer = msgspec.json.encode(Generated((), asked.request_id, (None, *lies)))
        return web.Response(body=answer, content_type="application/json")
    false = _false(fault.about, asked, request.app[ENGINE].version)
    chunk = b"[[]]" if false is None else msgspec.json.encode(Generated((false,), asked.request_id))
    event = b"data: " + chunk + b"\n\ndata: [DONE]\n\n"
    return web.Response(body=event, content_type="text/event-stream")


def _false(about: Lie, asked: GenerateRequest, version: str) -> WireChoice | None:
    """A completion of two tokens by `version` that is false in one point; None for what is no completion."""
    tokens, values, spans = [asked.token_ids[0]] * 2, [LIE, LIE], [OutputSpan(version, 0, 2)]
    number = int(version) if version.isdecimal() else 0
    match about:
        case "logprobs":
            values.pop()
        case "token":
            tokens[1] = FOREIGN
        case "version":
            spans = [OutputSpan(str(number + FUTURE), 0, 2)]
        case "old_version":
            spans = [OutputSpan(str(number - 1), 0, 2)]
        case "positive":
            values[1] = 1.0
        case "infinite":
            values[1] = IMPOSSIBLE
        case "falling":
            spans = [OutputSpan(version, 0, 1), OutputSpan(str(number - 1), 1, 2)]
        case "longer":
            count = (asked.sampling_params.max_tokens or 1) + 1
            tokens, values, spans = tokens[:1] * count, [LIE] * count, [OutputSpan(version, 0, count)]
        case "garbage":
            return None
    logprobs = Logprobs(tuple(Logprob(value) for value in values))
    return WireChoice(tuple(tokens), logprobs, tuple(spans), "length")
