"""What every HTTP client does when a server falls silent, refuses, or is left by its caller. The server is a stand-in that says
what a test tells it; the clients are the real ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec
import pytest
from aiohttp import web
from slipstream.agents.base import Completion
from slipstream.buffer.trajectory import VersionSpan
from slipstream.errors import DeadlineExceeded, EngineError
from slipstream.rollout.engines.base import EMPTY, EngineFailure, PartialCompletion, RequestRejected, SamplingParams
from slipstream.rollout.engines.http_engine import HttpEngine
from slipstream.rollout.engines.sglang.client import SglangEngine
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.tests import tiny

SOON = 60.0
PROMPT = [5, 6, 7]
SAMPLING = SamplingParams(max_tokens=24)
PARTIAL = Completion((7, 8, 9), (-0.07, -0.08, -0.09), (VersionSpan(0, 3, 3),), "abort")

Client = type[VllmEngine] | type[SglangEngine]


def chunk(kind: Client, tokens: Sequence[int], total: int) -> bytes:
    """A server-sent event that brings `tokens`, as the server of `kind` writes it; version 3 sampled all `total`."""
    versions = [{"version": "3", "start": 0, "end": total}]
    if kind is VllmEngine:
        logprobs = {"content": [{"logprob": -t / 100} for t in tokens]}
        event: object = {"choices": [{"token_ids": tokens, "logprobs": logprobs, "weight_versions": versions}]}
    else:
        drawn = [(-t / 100, t, None) for t in tokens]
        meta = {"completion_tokens": total, "weight_versions": versions, "output_token_logprobs": drawn}
        event = {"output_ids": tokens, "meta_info": meta}
    return b"data: " + msgspec.json.encode(event) + b"\n\n"


class StandIn:
    """Answers every request with `status` and `pieces`, `pause_s` apart, and then says nothing; remembers what it was asked."""

    def __init__(self, *pieces: bytes, status: int = 200, pause_s: float = 0.0) -> None:
        self.pieces, self.status, self.pause_s = pieces, status, pause_s
        self.asked: list[tuple[str, dict[str, object]]] = []
        self.left = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, msgspec.json.decode(await request.read())))
        if "abort" in request.path:
            return web.Response()
        if self.status != 200:
            return web.Response(status=self.status, text="top_p must be in (0, 1], got 7.0.")
        try:
            response = web.StreamResponse()
            await response.prepare(request)
            for piece in self.pieces:
                await response.write(piece)
                await asyncio.sleep(self.pause_s)
            await asyncio.Event().wait()
        finally:
            self.left.set()
        return response


@contextlib.asynccontextmanager
async def serving(stand_in: StandIn, kind: Client) -> AsyncIterator[HttpEngine]:
    """A client of it, for which 60 s are a long time and half a second is silence."""
    app = web.Application()
    app.router.add_post("/{path:.*}", stand_in.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    engine = kind("replica0", url, vocab_size=tiny.VOCABULARY, max_model_len=tiny.CONTEXT, request_s=60.0)
    assert (engine.first_s, engine.idle_s) == (30.0, 15.0)
    try:
        async with asyncio.timeout(SOON):
            yield engine
    finally:
        await engine.close()
        await runner.cleanup()


async def until(condition: Callable[[], object]) -> None:
    """For what has no event of its own, such as a chunk that was read."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def aborted(stand_in: StandIn) -> bool:
    """Whether the request that it got was aborted, by the name that the server knows it by."""
    (_, request), (path, abort) = stand_in.asked
    name = request.get("rid") or f"generate-tokens-{request['request_id']}"
    return "abort" in path and list(abort.values()) in ([name], [[name]])


pytestmark = pytest.mark.parametrize("kind", [VllmEngine, SglangEngine], ids=["vllm", "sglang"])


async def test_a_stream_that_falls_silent_breaks_off_with_what_it_brought(kind: Client) -> None:
    stand_in = StandIn(chunk(kind, [7], 1), chunk(kind, [8, 9], 3))
    async with serving(stand_in, kind) as engine:
        engine.idle_s = 0.5
        with pytest.raises(EngineFailure, match=r"replica0 at .* has sent nothing of .*generate for 0.5 s") as caught:
            await engine.generate(PROMPT, SAMPLING, version=3)
        assert tiny.untimed(caught.value.partial) == PARTIAL
        await stand_in.left.wait()
        await until(lambda: len(stand_in.asked) > 1)
        assert aborted(stand_in)


async def test_closing_a_client_ends_its_streams_at_once_with_what_they_brought_and_aborts_them(kind: Client) -> None:
    stand_in = StandIn(chunk(kind, [7, 8, 9], 3))
    async with serving(stand_in, kind) as engine:
        growing = PartialCompletion()
        generating = asyncio.create_task(engine.generate(PROMPT, SAMPLING, version=3, growing=growing))
        await until(lambda: growing.partial.token_ids)
        await engine.close()
        with pytest.raises(EngineFailure, match="was closed") as caught:
            await generating
        assert tiny.untimed(caught.value.partial) == PARTIAL
        await stand_in.left.wait()
        assert aborted(stand_in)


async def test_a_second_cancellation_does_not_stop_an_abort(kind: Client) -> None:
    stand_in = StandIn(chunk(kind, [7], 1))
    async with serving(stand_in, kind) as engine:
        growing = PartialCompletion()
        generating = asyncio.create_task(engine.generate(PROMPT, SAMPLING, version=3, growing=growing))
        await until(lambda: growing.partial.token_ids)
        generating.cancel()
        await asyncio.sleep(0)
        generating.cancel()
        await asyncio.wait({generating})
        await engine.close()  # waits for it
        assert aborted(stand_in)


async def test_a_stream_that_goes_on_may_take_longer_than_a_silence(kind: Client) -> None:
    stand_in = StandIn(*(chunk(kind, [n], n + 1) for n in range(24)), pause_s=0.06)
    async with serving(stand_in, kind) as engine:
        engine.first_s, engine.idle_s = SOON, 1.0
        with pytest.raises(EngineFailure) as caught:
            await engine.generate(PROMPT, SAMPLING, version=3)
        assert caught.value.partial.token_ids == tuple(range(24))


async def test_the_first_chunk_may_take_longer_than_the_others(kind: Client) -> None:
    async with serving(StandIn(), kind) as engine:
        engine.first_s, engine.idle_s = 0.5, 0.01
        with pytest.raises(EngineFailure, match=r"has sent nothing of .* for 0.5 s") as caught:
            await engine.generate(PROMPT, SAMPLING, version=3)
        assert caught.value.partial == EMPTY


async def test_a_short_deadline_is_the_only_one(kind: Client) -> None:
    hasty = kind("replica0", "http://absent", vocab_size=9, max_model_len=9, request_s=2.0)
    assert min(hasty.first_s, hasty.idle_s) > 2.0


async def test_what_had_arrived_when_the_caller_left_or_ran_out_of_time_is_kept(kind: Client) -> None:
    stand_in = StandIn(chunk(kind, [7], 1), chunk(kind, [8, 9], 3))
    async with serving(stand_in, kind) as engine:
        growing = PartialCompletion()
        assert growing.partial == EMPTY
        request = asyncio.create_task(engine.generate(PROMPT, SAMPLING, version=3, growing=growing))
        while len(growing.partial.token_ids) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert tiny.untimed(growing.partial) == PARTIAL
        assert aborted(stand_in)
        engine.request_s, growing = 1.0, PartialCompletion()
        with pytest.raises(DeadlineExceeded):
            await engine.generate(PROMPT, SAMPLING, version=3, growing=growing)
        assert tiny.untimed(growing.partial) == PARTIAL


async def test_what_is_impossible_is_no_partial(kind: Client) -> None:
    async with serving(StandIn(chunk(kind, [999_900], 1)), kind) as engine:  # its log-prob is -9999
        engine.request_s, growing = 0.5, PartialCompletion()
        with pytest.raises(DeadlineExceeded):
            await engine.generate(PROMPT, SAMPLING, version=3, growing=growing)
        assert growing.partial == EMPTY


@pytest.mark.parametrize(
    ("status", "refused"),
    [(400, True), (413, True), (422, True), (404, False), (429, False), (500, False), (503, False)],
)
async def test_only_an_answer_about_the_request_is_a_refusal(kind: Client, status: int, refused: bool) -> None:
    async with serving(StandIn(status=status), kind) as engine:
        with pytest.raises(EngineError, match=rf"answered {status}: top_p must be in") as caught:
            await engine.generate(PROMPT, SAMPLING, version=3)
        assert isinstance(caught.value, RequestRejected) == refused


@pytest.mark.parametrize(("code", "refused"), [(400, True), (503, False)])
async def test_a_refusal_may_come_in_the_stream(kind: Client, code: int, refused: bool) -> None:
    error = b"data: " + msgspec.json.encode({"error": {"message": "too long", "code": code}}) + b"\n\n"
    async with serving(StandIn(error), kind) as engine:
        with pytest.raises(EngineError, match="too long") as caught:
            await engine.generate(PROMPT, SAMPLING, version=3)
        assert isinstance(caught.value, RequestRejected) == refused


async def test_a_request_without_a_version_shares_no_prefix(kind: Client) -> None:
    stand_in = StandIn(status=503)
    async with serving(stand_in, kind) as engine:
        for version in (None, None, 3, 3):
            with pytest.raises(EngineError):
                await engine.generate(PROMPT, SAMPLING, version=version)
    shares = [body.get("cache_salt") or body.get("extra_key") for _, body in stand_in.asked]
    assert shares[2:] == ["3", "3"]
    assert None not in shares
    assert len(set(shares)) == 3
