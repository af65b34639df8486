"""Requests to the gateway that no client should send: each is answered by one line, and costs no other episode anything."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from slipstream.agents import session as session_module
from slipstream.agents.gateway import Gateway
from slipstream.agents.gateway import endpoint as endpoint_module
from slipstream.common.tasks import in_thread
from slipstream.tests.gateways import (
    ASK,
    CHAT_TOOLS,
    PARAMETERS,
    QUESTION,
    Episode,
    openai_client,
    until,
)

LEGACY = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
BROKEN = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.mark.parametrize(
    ("path", "body", "complaint"),
    [
        ("chat/completions", "{", "chat completion request: Input data was truncated"),
        ("chat/completions", "[]", "Expected `object`, got `array`"),
        ("chat/completions", {}, "missing required field `model`"),
        ("chat/completions", {"model": "policy"}, "missing required field `messages`"),
        ("chat/completions", {**ASK, "messages": []}, "length >= 1"),
        ("chat/completions", {**ASK, "messages": "x"}, "$.messages"),
        ("chat/completions", {**ASK, "messages": [{"role": "robot"}]}, "messages[0].role: 'robot' is not system, "),
        ("chat/completions", {**ASK, "messages": IMAGE}, "messages[0].content[0].type: 'image_url' is not supported"),
        ("chat/completions", {**ASK, "messages": [*QUESTION, {"role": "assistant"}]}, "needs a message to answer"),
        ("chat/completions", {**ASK, "n": 0}, "Expected `int` >= 1 - at `$.n`, which is 0"),
        (
            "chat/completions",
            {**ASK, "messages": [{**QUESTION[0], "content": 5}]},
            "$.messages[0].content`, which is 5",
        ),
        ("chat/completions", '{"n": 0, "model": "policy", "messages": {', "$.n"),
        (
            "chat/completions",
            '{"n": 0, "n": {}, "messages": 5, "messages": [{"role": 3}]}',
            "this is no chat completion request",
        ),
        ("chat/completions", {**ASK, "stop": ["x"] * 65}, "stop: 65 stop texts are too many; at most 64 are allowed"),
        (
            "chat/completions",
            {**ASK, "tools": [{"type": "function", "name": "f"}]},
            'tools[0].function: missing; a tool is {"type',
        ),
        (
            "chat/completions",
            {**ASK, "tools": [{"function": {"name": ""}}]},
            "tools[0].function.name: missing or empty",
        ),
        ("chat/completions", {**ASK, "messages": [*QUESTION, LEGACY]}, "messages[1].function_call: deprecated and not"),
        (
            "chat/completions",
            {**ASK, "messages": [*QUESTION, BROKEN]},
            "messages[1].tool_calls[0].function.arguments: no JSON",
        ),
        ("chat/completions", {**ASK, "max_tokens": -1}, "$.max_tokens"),
        ("chat/completions", {**ASK, "stop": ["", "x"]}, "must not be empty"),
        ("chat/completions", {**ASK, "functions": [{}]}, "use tools"),
        ("chat/completions", {**ASK, "modalities": ["audio"]}, "only text is"),
        ("responses", {"model": "policy", "input": []}, "length >= 1"),
        ("responses", {"model": "policy", "input": "x", "previous_response_id": "r"}, "send the whole input"),
        ("responses", {"model": "policy", "input": [{"type": "item_reference"}]}, "input[0].type: 'item_reference'"),
        ("responses", {"model": "policy", "input": [{"role": "robot", "content": "x"}]}, "'robot' is not system"),
        ("responses", {"model": "policy", "input": [{"type": "function_call", "arguments": "{"}]}, "no JSON object"),
        ("messages", {"model": "policy", "messages": QUESTION}, "missing required field `max_tokens`"),
        (
            "messages",
            {**ASK, "max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "'image'",
        ),
        ("messages", {**ASK, "max_tokens": "5"}, "$.max_tokens"),
        ("messages", {**ASK, "max_tokens": 5, "stop_sequences": [""]}, "stop_sequences: a stop text must not be empty"),
        (
            "messages",
            {**ASK, "max_tokens": 5, "messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role: 'tool' is not",
        ),
        (
            "messages",
            {**ASK, "max_tokens": 5, "tools": [{"name": "", "input_schema": {}}]},
            "tools[0].name: missing or empty",
        ),
        (
            "responses",
            {"model": "policy", "input": "x", "tools": CHAT_TOOLS},
            "tools[0].name: missing or empty; a function is {",
        ),
    ],
)
async def test_what_is_no_request_is_told_in_one_line(episode: Episode, path: str, body: Any, complaint: str) -> None:
    async with episode() as (endpoint, _, session), httpx.AsyncClient() as client:
        content = body if isinstance(body, str) else json.dumps(body)
        response = await client.post(f"{endpoint.url}/v1/{path}", content=content)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert complaint in error["message"]
    assert "\n" not in error["message"]
    assert response.headers["x-should-retry"] == "false"
    assert session.failure is None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/messages/count_tokens"),
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/"),
    ],
)
async def test_what_no_api_here_has_is_told_in_one_line(
    gateway: Gateway, episode: Episode, method: str, path: str
) -> None:
    async with episode() as (endpoint, _, _), httpx.AsyncClient() as client:
        answers = [await client.request(method, f"{base}{path}", json=ASK) for base in (endpoint.url, gateway.url)]
    for answer in answers:
        assert answer.status_code == 404
        said = f"there is no {method} '{path}' here; there are POST /v1/chat/completions, /v1/responses, /v1/messages and /mcp, "
        assert answer.json()["error"]["message"] == f"{said}and GET /v1/models"
        assert answer.headers["x-should-retry"] == "false"
    assert (answers[0].json().get("type") == "error") == ("messages" in path)


async def test_a_body_that_is_not_encoded_as_it_says_is_told_in_one_line(
    gateway: Gateway, episode: Episode, caplog: pytest.LogCaptureFixture
) -> None:
    async with episode("a") as (endpoint, _, _), httpx.AsyncClient() as client:
        url, headers = f"{endpoint.url}/v1/chat/completions", {"Content-Encoding": "gzip"}
        refused = await client.post(url, content=b"no gzip", headers=headers)
        packed = await client.post(url, content=gzip.compress(json.dumps(ASK).encode()), headers=headers)
    assert refused.status_code == 400
    why = "the request's body cannot be read: Can not decode content-encoding: gzip"
    assert refused.json()["error"]["message"] == why
    assert packed.status_code == 200
    assert not caplog.records
    await until(lambda: not gateway._connections._open)
    assert not gateway._connections._kept_of


async def test_a_long_list_of_tools_is_rendered_beside_the_event_loop(
    episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[str]()

    def seen(work: Callable[[], Any], name: str) -> asyncio.Future[Any]:
        begun.append(name)
        return in_thread(work, name)

    monkeypatch.setattr(session_module, "in_thread", seen)
    function = {"description": "d" * 100, "parameters": PARAMETERS}
    many: Any = [{"type": "function", "function": {"name": f"tool_{number}", **function}} for number in range(80)]
    async with episode("a", "b", max_tokens=1 << 20) as (endpoint, script, session), openai_client(endpoint) as client:
        await client.chat.completions.create(model="policy", messages=QUESTION, tools=CHAT_TOOLS)
        assert begun == []
        await client.chat.completions.create(model="policy", messages=QUESTION, tools=many)
        assert begun == ["rendering a prompt"]
    assert script.check_exact(session) == 2


async def test_types_of_tools_that_are_not_known_fill_neither_metrics_nor_the_log(
    episode: Episode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_warned", set())
    async with episode(say="reply {}".format) as (endpoint, _, session), openai_client(endpoint) as client:
        tools: Any = [{"type": f"{number}\n{'long' * 500}"} for number in range(300)]
        await client.chat.completions.create(model="policy", messages=QUESTION, tools=tools)
        await client.responses.create(model="policy", input="q", tools=tools)
    assert session.metrics == {"ignored_tools": 600.0}
    assert len(caplog.text.splitlines()) <= 100
    assert max(map(len, caplog.text.splitlines())) < 300
