"""Replies that no honest server gives: each is refused where it arrives, by the real clients of both protocols."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from aiohttp import web
from slipstream.agents.base import Completion
from slipstream.buffer.trajectory import VersionSpan
from slipstream.errors import DeadlineExceeded, EngineError
from slipstream.rollout.engines import http_client
from slipstream.rollout.engines.base import (
    EMPTY,
    EngineFailure,
    FalseReply,
    PartialCompletion,
    SamplingParams,
    VersionClock,
)
from slipstream.rollout.engines.http_engine import HttpEngine, check_completion
from slipstream.rollout.engines.sglang.client import SglangEngine
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.rollout.router import Router
from slipstream.tests import tiny
from slipstream.weightsync.fleet import Fleet, ReplicaInfo

SOON = 60.0
PROMPT, STOP = [5, 6, 7], 2
SAMPLING = SamplingParams(max_tokens=4, stop_token_ids=(STOP,))
Client = type[VllmEngine] | type[SglangEngine]
Spans = Sequence[tuple[str, int, int]]
VOCABULARY = tiny.VOCABULARY


def event(
    kind: Client,
    tokens: Sequence[object] = (8, STOP),
    logprobs: Sequence[object] | None = None,
    spans: Spans | None = None,
    finish: str | None = "stop",
) -> bytes:
    """One chunk with all of a reply, as the server of `kind` writes it."""
    logprobs = [-0.5] * len(tokens) if logprobs is None else logprobs
    named = [("3", 0, len(tokens))] if spans is None else spans
    versions = [{"version": version, "start": start, "end": end} for version, start, end in named]
    if kind is VllmEngine:
        content = {"content": [{"logprob": value} for value in logprobs]}
        choice = {"token_ids": tokens, "logprobs": content, "weight_versions": versions, "finish_reason": finish}
        chunk: object = {"choices": [choice]}
    else:
        drawn = [(value, 0, None) for value in logprobs]
        ends = None if finish is None else {"type": finish, "matched": tokens[-1] if tokens else None}
        meta = {"completion_tokens": len(tokens), "weight_versions": versions, "finish_reason": ends}
        chunk = {"output_ids": tokens, "meta_info": meta | {"output_token_logprobs": drawn}}
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


@contextlib.asynccontextmanager
async def serving(
    kind: Client, *pieces: bytes, versions: VersionClock | None = None, breaks: bool = False
) -> AsyncIterator[HttpEngine]:
    """A client of a server that sends `pieces` to whatever it is asked, and then the end of the stream, or breaks off."""

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if not breaks:
            await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    engine = kind("liar", url, vocab_size=VOCABULARY, max_model_len=tiny.CONTEXT, versions=versions)
    try:
        async with asyncio.timeout(SOON):
            yield engine
    finally:
        await engine.close()
        await runner.cleanup()


both = pytest.mark.parametrize("kind", [VllmEngine, SglangEngine], ids=["vllm", "sglang"])


@both
async def test_an_honest_reply_passes(kind: Client) -> None:
    async with serving(kind, event(kind), versions=VersionClock(3)) as engine:
        found = await engine.generate(PROMPT, SAMPLING, version=3)
    assert tiny.untimed(found) == Completion((8, STOP), (-0.5, -0.5), (VersionSpan(0, 2, 3),), "stop")


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "an id that is the vocabulary": ({"tokens": (VOCABULARY, STOP)}, "token id .* outside the vocabulary"),
    "an id beyond int32": ({"tokens": (1 << 40, STOP)}, "token id .* outside the vocabulary"),
    "an id beyond int64": ({"tokens": (1 << 80, STOP)}, "outside the vocabulary|impossible"),
    "an id that is no number": ({"tokens": ("8", STOP)}, "impossible"),
    "a negative id": ({"tokens": (-1, STOP)}, "token id -1"),
    "a positive log-prob": ({"logprobs": (-0.5, 0.25)}, "a log-prob of 0.25; a probability is at most 1"),
    "a log-prob of minus infinity": ({"logprobs": (-9999.0, -0.5)}, "a log-prob of -9999.0"),
    "log-probs whose sum overflows": ({"logprobs": (-1e308, -1e308)}, "a log-prob of -1e"),
    "no log-prob": ({"logprobs": (-0.5, None)}, "a log-prob of nan|impossible"),
    "a log-prob too few": ({"logprobs": (-0.5,)}, "1 log-probs for 2 tokens"),
    "a log-prob too many": ({"logprobs": (-0.5,) * 3}, "3 log-probs for 2 tokens|a log-prob of"),
    "a version that does not exist": ({"spans": [("4", 0, 2)]}, "with version 4, the newest that exists is 3"),
    "a version that no integer holds": ({"spans": [("9" * 30, 0, 2)]}, "reports version '9+', which is none"),
    "a version in other digits": ({"spans": [("³", 0, 2)]}, "which is none"),
    "a version that is no number": ({"spans": [("-3", 0, 2)]}, "'-3', which is none"),
    "a version from before": ({"spans": [("2", 0, 2)]}, "with version 2, and had taken version 3"),
    "versions that fall": ({"spans": [("3", 0, 1), ("2", 1, 2)]}, "the versions of a reply fall"),
    "spans that leave a gap": ({"spans": [("3", 0, 1)]}, "do not cover 2 tokens"),
    "spans beyond the tokens": ({"spans": [("3", 0, 3)]}, "do not cover 2 tokens"),
    "spans that overlap": ({"spans": [("3", 0, 2), ("3", 1, 2)]}, "do not cover 2 tokens"),
    "a span that ends before it begins": ({"spans": [("3", 0, 2), ("3", 2, 1), ("3", 1, 2)]}, "do not cover"),
    "no spans": ({"spans": ()}, "reports no weight_versions"),
    "more tokens than asked for": ({"tokens": (8, 8, 8, 8, STOP)}, "sent 5 tokens of the 4"),
    "no token": ({"tokens": ()}, "without a token|stopped at None"),
    "an unknown end": ({"finish": "bored"}, "unknown finish reason 'bored'"),
    "a stop without a stop token": ({"tokens": (8, 9)}, "stopped at"),
}


@both
@pytest.mark.parametrize("name", LIES)
async def test_a_lie_is_refused_as_a_whole(kind: Client, name: str) -> None:
    if kind is SglangEngine and name == "a log-prob too many":
        pytest.skip("a chunk may repeat those of earlier tokens")
    lie, why = LIES[name]
    async with serving(kind, event(kind, **lie), versions=VersionClock(3)) as engine:
        growing = PartialCompletion()
        with pytest.raises(FalseReply, match=why):
            await engine.generate(PROMPT, SAMPLING, version=3, growing=growing)


@both
async def test_a_lie_before_the_connection_breaks_is_refused_too(kind: Client) -> None:
    for lie in ({"tokens": (VOCABULARY, 8)}, {"logprobs": (0.5, -0.5)}, {"spans": [("4", 0, 2)]}):
        async with serving(kind, event(kind, finish=None, **lie), versions=VersionClock(3), breaks=True) as engine:
            with pytest.raises(FalseReply):
                await engine.generate(PROMPT, SAMPLING, version=3)


@both
async def test_a_stream_without_an_end_is_left(kind: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "EVENT_LIMIT", 1 << 16)
    async with serving(kind, b"data: " + b"x" * (1 << 20)) as engine:
        with pytest.raises(FalseReply, match=r"sent a line of \d+ bytes"):
            await engine.generate(PROMPT, SAMPLING)


@both
async def test_many_chunks_with_too_many_tokens_end_the_stream_at_once(kind: Client) -> None:
    chunks = [
        event(kind, tokens=(8,) * count, finish=None)
        for count in ((1, 2, 3, 4, 5) if kind is SglangEngine else (1,) * 5)
    ]
    async with serving(kind, *chunks, breaks=True) as engine:
        with pytest.raises(FalseReply, match="sent 5 tokens of the 4"):
            await engine.generate(PROMPT, SAMPLING)


OTHERS = b"vllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\nvllm:generation_tokens_total 0\n"
LOADS = {
    VllmEngine: (
        b"vllm:num_requests_running NaN\n" + OTHERS,
        b"vllm:num_requests_running +Inf\n" + OTHERS,
        b"vllm:num_requests_running many\n",
        b'vllm:num_requests_running{engine="0 3\n',
        b"vllm:num_requests_running\xff\xfe 3\nvllm:num_requests_running\n",
    ),
    SglangEngine: (
        b"[]",
        b'{"loads": [{"num_running_reqs": -1, "num_waiting_reqs": 0, "token_usage": 0.1}]}',
        b'{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 1e400, "token_usage": 0.1}]}',
        b'{"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": "full"}]}',
        b"\xff",
    ),
}


@pytest.mark.parametrize(("kind", "load"), [(kind, load) for kind, loads in LOADS.items() for load in loads])
async def test_a_load_that_is_none_is_refused(kind: Client, load: bytes) -> None:
    async with serving(kind, load, breaks=True) as engine:
        with pytest.raises(EngineError):
            await engine.get_load()


# --- versions that are new -------------------------------------------------------------------------------------------


@both
async def test_a_version_that_is_new_here_is_asked_for_once(kind: Client) -> None:
    asked = 0

    async def ask() -> int:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.05)
        return 9

    clock = VersionClock(3, ask)
    async with serving(kind, event(kind, spans=[("3", 0, 1), ("9", 1, 2)]), versions=clock) as engine:
        found = await asyncio.gather(*(engine.generate(PROMPT, SAMPLING, version=3) for _ in range(20)))
        assert {done.version_spans for done in found} == {(VersionSpan(0, 1, 3), VersionSpan(1, 2, 9))}
        assert (asked, clock.newest) == (1, 9)
        await engine.generate(PROMPT, SAMPLING, version=3)
    assert asked == 1


@both
async def test_the_part_of_a_broken_reply_is_kept_once_its_versions_are_known(kind: Client) -> None:
    async def ask() -> int:
        return 4

    chunk = event(kind, spans=[("3", 0, 1), ("4", 1, 2)], finish=None)
    async with serving(kind, chunk, versions=VersionClock(3, ask), breaks=True) as engine:
        with pytest.raises(EngineFailure) as caught:
            await engine.generate(PROMPT, SAMPLING, version=3)
    assert caught.value.partial.version_spans == (VersionSpan(0, 1, 3), VersionSpan(1, 2, 4))


@both
async def test_tokens_of_a_version_that_is_not_known_yet_are_no_part_of_what_a_caller_takes_along(kind: Client) -> None:
    asking = asyncio.Event()

    async def ask() -> int:
        asking.set()
        await asyncio.Event().wait()
        raise AssertionError

    growing = PartialCompletion()
    async with serving(kind, event(kind, spans=[("3", 0, 1), ("4", 1, 2)]), versions=VersionClock(3, ask)) as engine:
        generating = asyncio.create_task(engine.generate(PROMPT, SAMPLING, version=3, growing=growing))
        await asking.wait()
        assert tiny.untimed(growing.partial) == Completion((8,), (-0.5,), (VersionSpan(0, 1, 3),), "abort")
        generating.cancel()
        await asyncio.wait({generating})


async def test_a_clock_that_is_not_told_in_time_accuses_nobody() -> None:
    async def ask() -> int:
        raise DeadlineExceeded("worker-0", "the buffer", 1.0, "is it alive?")

    clock = VersionClock(3, ask)
    with pytest.raises(DeadlineExceeded):
        await clock.exists(4)
    assert await clock.exists(3)


@both
@pytest.mark.parametrize("request_s", [SOON, 2.0], ids=["the buffer's deadline", "the request's"])
async def test_a_silent_buffer_is_no_failure_of_the_replica_whose_reply_waits_for_it(
    kind: Client, request_s: float
) -> None:
    async def ask() -> int:
        if request_s < SOON:
            await asyncio.Event().wait()
        raise DeadlineExceeded("worker-0", "the buffer", 1.0, "is it alive?")

    reply = event(kind, spans=[("3", 0, 1), ("4", 1, 2)])
    async with serving(kind, reply, versions=VersionClock(3, ask)) as engine:
        options: dict[str, Any] = {"max_concurrent": 4, "start_s": SOON, "partial": "recompute"}
        async with Router(lambda info: engine, request_s=request_s, **options) as router:
            router.update(Fleet(1, (ReplicaInfo("liar", engine.url, 0, "serving", 3),)))
            found = await router.generate("e", PROMPT, SAMPLING, 3)
            assert tiny.untimed(found) == Completion((8,), (-0.5,), (VersionSpan(0, 1, 3),), "abort")
            assert router.serving == 1


# --- the pure check --------------------------------------------------------------------------------------------------


def test_what_had_arrived_of_nothing_is_true() -> None:
    assert check_completion("a", EMPTY, SAMPLING, VOCABULARY, 3) == EMPTY


def test_a_check_of_long_replies_costs_little() -> None:
    """Less than a microsecond for each token, in one call."""
    n = 32_768
    done = Completion(tuple(range(n)), (-0.5,) * n, (VersionSpan(0, n, 3),), "length")
    times = []
    for _ in range(5):
        started = time.thread_time()
        check_completion("a", done, SamplingParams(n), n, 3)
        times.append(time.thread_time() - started)
    assert min(times) < 1e-6 * n
