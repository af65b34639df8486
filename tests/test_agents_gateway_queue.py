"""Calls of an episode that wait for their turn, and bodies that are too large or too slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from slipstream.agents import session as session_module
from slipstream.agents.gateway import EnvTools, Gateway
from slipstream.agents.gateway import bodies as bodies_module
from slipstream.agents.gateway import request_queue as queue_module
from slipstream.envs import CALCULATOR
from slipstream.tests.gateways import (
    ASK,
    QUESTION,
    Calculator,
    Episode,
    late_replies,
    openai_client,
    posted,
    queue_of,
    until,
)
from slipstream.tests.scripted import settle


async def test_calls_beyond_those_that_may_be_under_way_wait_for_their_turn(
    gateway: Gateway, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "CALLS", 2)
    ends = [asyncio.Event() for _ in range(5)]

    async def late(number: int) -> str:
        await ends[number].wait()
        return f"reply {number}"

    async with episode(say=late) as (endpoint, script, session), openai_client(endpoint) as client:

        def ask(text: str) -> asyncio.Task[Any]:
            messages: Any = [{"role": "user", "content": text}]
            return asyncio.create_task(client.chat.completions.create(model="policy", messages=messages))

        async with httpx.AsyncClient() as http:
            url, streamed = f"{endpoint.url}/v1/chat/completions", {**ASK, "stream": True}
            async with http.stream("POST", url, json=streamed):  # its client goes, its call goes on
                assert await script.calls.get() == 0
        under_way = ask("under way")
        assert await script.calls.get() == 1
        queue = queue_of(gateway)
        waiting = []
        for number in range(3):  # one by one: turns come in the order of the requests
            waiting.append(ask(f"{number}"))
            await until(lambda count=number + 1: len(queue.waiting) == count)
        waiting[1].cancel()  # one whose client goes leaves the queue
        await until(lambda: len(queue.waiting) == 2)
        assert (queue.calls.taken, script.asked) == (2, 2)
        ends[0].set()
        assert await script.calls.get() == 2
        ends[2].set()
        assert (await waiting[0]).choices[0].message.content == "reply 2"
        assert await script.calls.get() == 3
        ends[1].set()
        ends[3].set()
        answers = [(await one).choices[0].message.content for one in (under_way, waiting[2])]
        assert answers == ["reply 1", "reply 3"]
        assert (queue.calls.taken, queue.bodies.taken, script.asked) == (0, 0, 4)
    assert script.check_exact(session) == 4


async def test_a_call_that_waits_ends_with_its_time_and_with_its_episode(
    gateway: Gateway, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "CALLS", 1)
    async with httpx.AsyncClient() as http:
        async with episode(say=lambda number: asyncio.Event().wait()) as (endpoint, script, _):  # type: ignore[arg-type]
            url = f"{endpoint.url}/v1/chat/completions"
            asking = [asyncio.create_task(http.post(url, json=ASK))]
            await script.calls.get()
            monkeypatch.setattr(queue_module, "TURN_S", 0.05)
            late = await http.post(url, json=ASK)
            assert (late.status_code, late.headers["retry-after"]) == (429, "1")
            assert "waited 0.05 s for its turn: the episode has 1 others" in late.json()["error"]["message"]
            claude = anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key, max_retries=0)
            with pytest.raises(anthropic.RateLimitError, match="rate_limit_error"):
                await claude.messages.create(model="policy", max_tokens=5, messages=QUESTION)
            monkeypatch.setattr(queue_module, "TURN_S", 600.0)
            queue = queue_of(gateway)
            queue._most_waiting = 1
            asking.append(asyncio.create_task(http.post(url, json=ASK)))
            await until(lambda: len(queue.waiting) == 1)
            refused = await http.post(url, json=ASK)
            assert refused.status_code == 429
            assert (
                "1 calls of the episode wait already, as many as may; at most 1 are under way"
                in refused.json()["error"]["message"]
            )
        assert [(await one).status_code for one in asking] == [401, 401]
        assert (queue.calls.taken, queue.bodies.taken) == (0, 0)


STREAMS = {
    "chat/completions": ({**ASK, "stream": True}, {"type": "requests", "code": "rate_limit_exceeded"}),
    "responses": (
        {"model": "policy", "input": "q", "stream": True},
        {"type": "requests", "code": "rate_limit_exceeded"},
    ),
    "messages": ({**ASK, "max_tokens": 5, "stream": True}, {"type": "rate_limit_error"}),
}
"""By their paths: a request for a stream, and what the error has that ends it where no turn comes."""


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_waits_for_its_turn_has_comments_and_then_its_reply_or_an_error(
    path: str, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "CALLS", 1)
    ends = [asyncio.Event() for _ in range(3)]

    async def late(number: int) -> str:
        await ends[number].wait()
        return "late"

    async with episode(say=late) as (endpoint, script, _), httpx.AsyncClient() as http:
        body, refusal = STREAMS[path]

        async def lines(response: httpx.Response) -> AsyncIterator[str]:
            async for line in response.aiter_lines():
                if line:
                    yield line

        async def wait_in_queue(lines: AsyncIterator[str]) -> None:
            assert [await anext(lines) for _ in range(2)] == [": the policy is sampling"] * 2
            assert not script.calls.qsize()

        async with asyncio.timeout(10), http.stream("POST", f"{endpoint.url}/v1/{path}", json=body) as first:
            assert await script.calls.get() == 0
            async with http.stream("POST", f"{endpoint.url}/v1/{path}", json=body) as second:
                assert second.status_code == 200
                await wait_in_queue(waiting := lines(second))
                ends[0].set()
                assert await script.calls.get() == 1
                monkeypatch.setattr(queue_module, "TURN_S", 0.3)
                async with http.stream("POST", f"{endpoint.url}/v1/{path}", json=body) as third:
                    await wait_in_queue(late_one := lines(third))
                    name, data = [line async for line in late_one if not line.startswith(":")]
                ends[1].set()
                assert "late" in "".join([line async for line in waiting])
            assert "late" in "".join([line async for line in lines(first)])
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert error["error"].items() >= refusal.items()
    assert error["error"]["message"] == "the call has waited 0.3 s for its turn: the episode has 1 others under way"
    assert path == "chat/completions" or error["type"] == "error"
    assert script.asked == 2


async def test_a_stream_that_waits_ends_with_its_episode_by_an_error_that_clients_raise(
    gateway: Gateway, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "CALLS", 1)
    options: Any = {"stream": True}
    async with episode(say=lambda number: asyncio.Event().wait()) as (endpoint, script, _):  # type: ignore[arg-type]
        ours = openai_client(endpoint)
        claude = anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key)
        asked = [
            await ours.chat.completions.create(model="policy", messages=QUESTION, **options),
            await ours.chat.completions.create(model="policy", messages=QUESTION, **options),
            await ours.responses.create(model="policy", input="q", **options),
            await claude.messages.create(model="policy", messages=QUESTION, max_tokens=5, **options),
        ]
        assert len(queue_of(gateway).waiting) == 3
        assert script.asked == 1
    for stream in asked:
        with pytest.raises((openai.APIError, anthropic.APIError), match="it is over"):
            async for _ in stream:
                pass
    await ours.close()
    await claude.close()


async def test_a_request_of_any_size_leaves_the_queue_with_its_client(
    gateway: Gateway, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "CALLS", 1)
    body = json.dumps({**ASK, "metadata": "x" * (1 << 23)}).encode()
    env: Any = Calculator()
    stuck: Any = lambda number: asyncio.Event().wait()  # noqa: E731
    async with episode(say=stuck, tools=EnvTools(env, ())) as (endpoint, script, _), httpx.AsyncClient() as http:
        asking = asyncio.create_task(http.post(f"{endpoint.url}/v1/chat/completions", json=ASK))
        await script.calls.get()
        queue = queue_of(gateway)
        for path in ("/v1/chat/completions", "/mcp"):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(posted(endpoint, path, body))
            await until(lambda: len(queue.waiting) == 1)
            assert queue.bodies.taken > len(body)
            writer.close()
            await until(lambda: not queue.waiting and queue.bodies.taken < len(body))
        asking.cancel()
    assert (script.asked, queue.calls.taken, queue.bodies.taken) == (1, 0, 0)
    await until(lambda: not gateway._connections._open)
    assert not gateway._connections._kept_of


async def test_the_bodies_of_an_episodes_calls_have_a_size_and_a_time(
    gateway: Gateway, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "BODIES", 4000)
    monkeypatch.setattr(bodies_module, "SMALL_BODY", 3000)
    monkeypatch.setattr(bodies_module, "TOKEN_BYTES", 1)
    ended = asyncio.Event()

    def ask(size: int) -> Any:
        return {**ASK, "metadata": "x" * size}

    async def pieces(size: int) -> AsyncIterator[bytes]:
        yield json.dumps(ask(size)).encode()

    async with episode(say=late_replies(ended)) as (endpoint, script, session), httpx.AsyncClient() as http:
        url = f"{endpoint.url}/v1/chat/completions"
        first = asyncio.create_task(http.post(url, json=ask(2500)))
        await script.calls.get()
        queue = queue_of(gateway)
        second = asyncio.create_task(http.post(url, content=pieces(100)))  # of an unknown size
        await until(lambda: len(queue.waiting) == 1)
        third = asyncio.create_task(http.post(url, json=ask(2500)))
        await until(lambda: len(queue.waiting) == 2)
        ended.set()
        assert [(await one).status_code for one in (first, second, third)] == [200, 200, 200]
        monkeypatch.setattr(bodies_module, "BODY_S", 0.2)
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(posted(endpoint, "/v1/chat/completions", b"{", size=9))
        assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
        monkeypatch.setattr(bodies_module, "BODY_S", 60.0)
        writer.close()
        bodies: Any = ({"json": ask(3100)}, {"content": pieces(3100)})
        for body in bodies:
            too_large = await http.post(url, **body)
            assert (too_large.status_code, too_large.headers["x-should-retry"]) == (400, "false")
            error = too_large.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert error["message"] == "the request has more than 3000 bytes, too many for a max_tokens of 700"
        assert session.exhausted == [error["message"]] * 2  # the episode is truncated, as by any full context
        assert (await http.post(endpoint.mcp, json=ask(3100))).status_code == 404
        assert (queue.calls.taken, queue.bodies.taken) == (0, 0)
        assert (await http.post(url, json=ask(2500))).status_code == 200


def test_a_body_may_be_as_large_as_its_context() -> None:
    small, large = bodies_module.context_limit(700), bodies_module.context_limit(1_000_000)
    assert (small.size, small.items) == (1 << 24, 1 << 15)
    assert (large.size, large.items) == (32_000_000, 2_000_000)
    assert bodies_module.context_limit(10_000_000).size == bodies_module.tool_limit().size == 1 << 26


async def test_a_body_that_would_take_a_parser_long_is_refused_before(episode: Episode) -> None:
    parts = "{}," * (bodies_module.SMALL_ITEMS // 2)
    body = f'{{"model": "policy", "messages": [{{"role": "user", "content": [{parts}{{}}]}}]}}'
    env: Any = Calculator()
    tools = EnvTools(env, (CALCULATOR.spec,))
    async with episode(tools=tools) as (endpoint, _, session), httpx.AsyncClient() as http:
        refused = await http.post(f"{endpoint.url}/v1/chat/completions", content=body)
        assert refused.status_code == 400
        why = "the request has more than 32768 opening brackets and commas, too many for a max_tokens of 700"
        assert refused.json()["error"]["message"] == why
        assert session.exhausted == [why]
        listed = '{"id": 1, "method": "tools/list", "params": {"arguments": {"x": [' + "[]," * 140_000 + "1]}}}"
        refused = await http.post(endpoint.mcp, content=listed)
        assert refused.status_code == 413
        assert "262144 opening brackets and commas, as many as it may" in refused.json()["error"]


async def test_so_many_replies_are_sampled_at_once_and_the_others_wait(
    episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "REPLIES", 2)
    at_once, most = 0, 0

    async def late() -> str:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await settle()
        at_once -= 1
        return "late"

    async with episode(say=lambda number: late()) as (endpoint, script, session), openai_client(endpoint) as client:
        made = await client.chat.completions.create(model="policy", messages=QUESTION, n=7)
        assert len(made.choices) == 7
    assert most == 2
    assert script.check_exact(session) == 7


async def test_an_episode_that_is_over_has_nothing_in_flight(episode: Episode) -> None:
    async with episode(say=lambda number: asyncio.Event().wait()) as (endpoint, script, _):  # type: ignore[arg-type]
        client = openai_client(endpoint)
        asking = asyncio.create_task(client.chat.completions.create(model="policy", messages=QUESTION))
        options: Any = {"stream": True}
        streaming = asyncio.create_task(client.chat.completions.create(model="policy", messages=QUESTION, **options))
        stream = await streaming  # its first comment is a status of 200
        assert [await script.calls.get() for _ in range(2)] == [0, 1]
    assert script.cancelled == 2
    with pytest.raises(openai.AuthenticationError, match="it is over"):
        await asking
    with pytest.raises(openai.APIError, match="it is over"):
        async for _ in stream:
            pass
    for tried in (openai_client(endpoint), anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key)):
        models: Any = tried.models
        with pytest.raises((openai.AuthenticationError, anthropic.AuthenticationError)):
            await models.list()
