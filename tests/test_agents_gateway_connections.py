"""The connections of a gateway: idle, busy, refused, and those whose client takes no answer."""

from __future__ import annotations

import asyncio
import json
import resource
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from slipstream.agents.gateway import EnvTools, Gateway
from slipstream.agents.gateway import connections as connections_module
from slipstream.envs import ToolSpec
from slipstream.tests.gateways import (
    ASK,
    QUESTION,
    Calculator,
    Episode,
    late_replies,
    openai_client,
    posted,
    until,
)


async def test_the_key_alone_and_the_unix_socket_lead_to_the_episode(gateway: Gateway, episode: Episode) -> None:
    async with episode("a", "b") as (endpoint, script, session):
        by_key = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=endpoint.key)
        await by_key.chat.completions.create(model="policy", messages=QUESTION)
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(gateway.socket))) as local:
            url, headers = "http://gateway/v1/chat/completions", {"Authorization": f"Bearer {endpoint.key}"}
            async with local.post(url, json=ASK, headers=headers) as response:
                assert (await response.json())["choices"][0]["message"]["content"] == "b"
        assert endpoint.environ["OPENAI_BASE_URL"].endswith("/v1")
        assert endpoint.environ["ANTHROPIC_API_KEY"] == endpoint.key
        wrong = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="wrong")
        with pytest.raises(openai.AuthenticationError):
            await wrong.chat.completions.create(model="policy", messages=QUESTION)
    assert script.check_exact(session) == 2


def test_a_gateway_raises_the_limit_of_open_files_as_far_as_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections_module.MOST if hard == resource.RLIM_INFINITY else min(2 * connections_module.MOST, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert connections_module.open_limit() == wanted // 2
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_idle_connections_make_room_and_busy_ones_do_not(gateway: Gateway, episode: Episode) -> None:
    gateway._connections.limit = 4
    ended = asyncio.Event()
    say = late_replies(ended)
    async with episode(say=say) as (endpoint, script, _), episode(say=say) as (second, other_script, _):
        silent = await asyncio.open_connection("127.0.0.1", gateway.port)
        by_socket = await asyncio.open_unix_connection(str(gateway.socket))
        async with httpx.AsyncClient() as http:
            url, elsewhere = (f"{one.url}/v1/chat/completions" for one in (endpoint, second))
            asking = [asyncio.create_task(http.post(to, json=ASK)) for to in (url, url, elsewhere)]
            assert {await one.calls.get() for one in (script, script, other_script)} == {0, 1}
            beyond = await http.post(url, json=ASK)
            assert beyond.status_code == 429
            why = "the episode has 2 requests without an answer, or one that was not taken, as many as it may"
            assert beyond.json()["error"]["message"] == why
            asking.append(asyncio.create_task(http.post(elsewhere, json=ASK)))
            assert await other_script.calls.get() == 1
            assert [await reader.read() for reader, _ in (silent, by_socket)] == [b"", b""]
            async with httpx.AsyncClient() as other:
                refused = await other.post(url, json=ASK)
            assert refused.status_code == 503
            why = "the gateway has 4 connections open, as many as it may"
            assert refused.json()["error"] == {"message": why, "code": "too_many_connections"}
            async with openai_client(endpoint, max_retries=0) as client:
                with pytest.raises(openai.InternalServerError, match=why):
                    await client.chat.completions.create(model="policy", messages=QUESTION)
            ended.set()
            assert {(await one).status_code for one in asking} == {200}
            async with httpx.AsyncClient() as other:
                assert (await other.post(url, json=ASK)).status_code == 200  # in place of an idle one
        for _, writer in (silent, by_socket):
            writer.close()
    await until(lambda: not gateway._connections._open)
    assert not gateway._connections._busy_of


async def test_connections_idle_for_so_long_and_so_many_for_an_episode(
    gateway: Gateway, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "IDLE", 1)
    async with episode("a", "b", "c", "d") as (endpoint, _, _):
        url = f"{endpoint.url}/v1/chat/completions"
        async with httpx.AsyncClient() as http, httpx.AsyncClient() as other:
            assert "connection" not in (await http.post(url, json=ASK)).headers
            assert (await other.post(url, json=ASK)).headers["connection"] == "close"
            assert "connection" not in (await http.post(url, json=ASK)).headers
            assert (await other.get(f"{gateway.url}/v1/models")).headers["connection"] == "close"  # no key
        await until(lambda: not gateway._connections._open)
        monkeypatch.setattr(connections_module, "IDLE_S", 0.2)  # of those that begin now
        kept = await asyncio.open_connection("127.0.0.1", gateway.port)
        kept[1].write(posted(endpoint, "/v1/chat/completions", json.dumps(ASK).encode()))
        async with asyncio.timeout(10):
            assert (await kept[0].read()).startswith(b"HTTP/1.1 200 ")  # its answer, then its end
        kept[1].close()
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: not gateway._connections._open)
    assert not gateway._connections._kept_of


async def test_answers_that_end_together_leave_no_more_idle_connections(
    gateway: Gateway, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "IDLE", 2)
    ended = asyncio.Event()

    async with episode(say=late_replies(ended)) as (endpoint, script, _), httpx.AsyncClient() as http:
        url = f"{endpoint.url}/v1/chat/completions"
        asking = [asyncio.create_task(http.post(url, json=ASK)) for _ in range(6)]
        assert [await script.calls.get() for _ in asking] == list(range(6))
        ended.set()
        answers = [await one for one in asking]
        assert {answer.status_code for answer in answers} == {200}
        assert sum(answer.headers.get("connection") == "close" for answer in answers) == 4
        await until(lambda: len(gateway._connections._open) == 2)
        assert {(await http.post(url, json=ASK)).status_code for _ in range(3)} == {200}
        assert len(gateway._connections._idle) == 2
    await until(lambda: not gateway._connections._open)
    assert not gateway._connections._kept_of


async def test_a_client_that_does_not_take_its_answer_loses_its_connection(
    gateway: Gateway, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "ANSWER_S", 0.1)
    env: Any = Calculator()
    tools = EnvTools(env, (ToolSpec("long", "x" * (1 << 24), {}),))
    async with episode(tools=tools) as (endpoint, _, _):
        _, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1)
        writer.write(posted(endpoint, "/mcp", b'{"id": 1, "method": "tools/list"}'))
        await until(lambda: bool(gateway._connections._open))
        await until(lambda: not gateway._connections._open)
        writer.close()
