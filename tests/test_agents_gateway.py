"""The gateway over real sockets, spoken to by the real clients of OpenAI and Anthropic."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import httpx
import openai
import pytest
from renderers import Renderer
from slipstream.agents import Session, load_renderer
from slipstream.agents import session as session_module
from slipstream.agents.gateway import Endpoint, EnvTools, Gateway
from slipstream.agents.gateway import bodies as bodies_module
from slipstream.agents.gateway import connections as connections_module
from slipstream.agents.gateway import endpoint as endpoint_module
from slipstream.agents.gateway import request_queue as queue_module
from slipstream.agents.gateway.request_queue import RequestQueue
from slipstream.envs import CALCULATOR, Message, StepResult, ToolSpec, call_tool
from slipstream.errors import EngineError, ToolError
from slipstream.tests.scripted import settle
from slipstream.tests.sessions import Script, call, delivered, session_of
from transformers import PreTrainedTokenizerBase

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
QUESTION: Any = [{"role": "user", "content": "q"}]


Episode = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Endpoint, Script, Session]]]


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway(keepalive_s=0.05) as gateway:
        yield gateway


@pytest.fixture
def episode(gateway: Gateway, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> Episode:
    @contextlib.asynccontextmanager
    async def opened(
        *texts: str, say: Callable[[int], str | Awaitable[str]] | None = None, **options: Any
    ) -> AsyncIterator[tuple[Endpoint, Script, Session]]:
        tools = options.pop("tools", None)
        script = Script(tokenizer, say or texts.__getitem__)
        session = session_of(renderer, tokenizer, script, **options)
        async with gateway.endpoint(session, tools) as endpoint:
            yield endpoint, script, session

    return opened


def queue_of(gateway: Gateway) -> RequestQueue:
    (calls,) = gateway._episodes.values()
    return calls.requests


async def until(holds: Callable[[], bool]) -> None:
    """Returns once `holds`: the loop turns until then."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - sockets have no event for what has come
            await asyncio.sleep(0)


def posted(endpoint: Endpoint, path: str, body: bytes, *, size: int | None = None) -> bytes:
    """A request as a client writes it, of a body that is to have `size` bytes."""
    head = f"POST /e/{endpoint.key}{path} HTTP/1.1\r\nHost: gateway\r\nContent-Length: {len(body) if size is None else size}"
    return f"{head}\r\n\r\n".encode() + body


def openai_client(endpoint: Endpoint, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, **options)


async def test_chat_completions_with_tools_are_one_branch(episode: Episode) -> None:
    texts = ("Let me see.\n" + call("add", a=1, b=2) + call("add", b=4, a=3), "It is 3 and 7.", "Bye.")
    async with episode(*texts) as (endpoint, script, session), openai_client(endpoint) as client:
        messages: Any = [{"role": "system", "content": "s"}, {"role": "user", "content": "1 + 2?"}]
        made = await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS, logprobs=True)
        (choice,) = made.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        calls: Any = choice.message.tool_calls
        assert [json.loads(one.function.arguments) for one in calls] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [token.logprob for token in choice.logprobs.content][:2] == [-0.01, -0.02]
        assert "".join(token.token for token in choice.logprobs.content).endswith("<|im_end|>")
        (prompt, sampled) = script.log[0]
        assert made.usage is not None
        assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len(prompt), len(sampled))
        messages.append(choice.message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": one.id, "content": "3"} for one in calls]
        second = await client.chat.completions.create(model="policy", messages=messages, tools=CHAT_TOOLS)
        assert second.choices[0].message.content == "It is 3 and 7."
        messages += [{"role": "assistant", "content": " It is 3 and 7.\n"}, {"role": "user", "content": "Bye"}]
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = [c async for c in await client.chat.completions.create(
            model="policy", messages=messages, tools=CHAT_TOOLS, **options
        )]  # fmt: skip
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Bye."
        assert chunks[-1].usage.completion_tokens == len(script.log[2][1])
    assert script.check_exact(session) == 1


async def test_streamed_chat_completions_carry_tool_calls(episode: Episode) -> None:
    async with episode(call("add", a=1, b=2)) as (endpoint, script, session), openai_client(endpoint) as client:
        async with client.chat.completions.stream(model="policy", messages=QUESTION, tools=CHAT_TOOLS) as stream:
            async for _ in stream:
                pass
            choice = (await stream.get_final_completion()).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        assert choice.message.tool_calls[0].function.arguments == '{"a":1,"b":2}'
    assert script.check_exact(session) == 1


async def test_several_replies_and_calls_at_once_are_a_tree(episode: Episode) -> None:
    say = "reply {}. Observation: forged".format
    async with episode(say=say) as (endpoint, script, session), openai_client(endpoint) as client:
        create = client.chat.completions.create
        made = await create(model="policy", messages=QUESTION, n=3, stop=["Observation:", "never"])
        assert [c.message.content for c in made.choices] == [f"reply {i}. " for i in range(3)]
        assert {c.finish_reason for c in made.choices} == {"stop"}
        kept = sum(t.sampled for t in delivered(session))
        cut = sum(len(sampled) for _, sampled in script.log) - kept
        assert cut > 0
        history: Any = [*QUESTION, {"role": "assistant", "content": made.choices[1].message.content}]
        same: Any = {"role": "user", "content": "same"}
        others: Any = [{"role": "user", "content": f"sub {i}"} for i in range(3)]
        await asyncio.gather(*(create(model="policy", messages=[*history, m]) for m in (same, same, *others)))
        (length,) = (await create(model="policy", messages=QUESTION, max_tokens=2)).choices
        assert length.finish_reason == "length"
    assert script.check_exact(session, cut) == 3 + 4 + 1
    prompts = [prompt for prompt, _ in script.log[3:8]]
    assert len({prompt[: len(script.log[1][0])] for prompt in prompts}) == 1


async def test_responses_plain_and_streamed_are_one_branch(episode: Episode) -> None:
    texts = ("Hm." + call("add", a=1, b=2), "three", "four")
    tools: Any = [{"type": "function", "name": "add", "parameters": PARAMETERS}, {"type": "web_search"}]
    async with episode(*texts) as (endpoint, script, session), openai_client(endpoint) as client:
        items: Any = [{"role": "developer", "content": "d"}, {"role": "user", "content": "go"}]
        ask: Any = {"model": "policy", "tools": tools, "instructions": "i"}
        made = await client.responses.create(input=items, **ask)
        message, function = made.output
        assert made.output_text == "Hm."
        assert function.type == "function_call"
        assert json.loads(function.arguments) == {"a": 1, "b": 2}
        items += [message.model_dump(), function.model_dump()]
        items += [{"type": "function_call_output", "call_id": function.call_id, "output": "3"}]
        async with client.responses.stream(input=items, **ask) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert (final.output_text, final.status) == ("three", "completed")
        items += [*(one.model_dump(exclude={"parsed"}) for one in final.output), {"role": "user", "content": "on"}]
        cut = await client.responses.create(input=items, max_output_tokens=1, **ask)
        assert cut.status == "incomplete"
        assert cut.usage is not None
        assert cut.usage.output_tokens == 1
    assert script.check_exact(session) == 1
    assert session.metrics == {"ignored_tools": 3.0}


async def test_functions_of_a_namespace_are_called_by_a_longer_name(episode: Episode) -> None:
    """As Codex passes the tools of MCP servers on."""
    function = {"type": "function", "name": "add", "parameters": PARAMETERS}
    inner = [function, {"type": "custom", "name": "patch"}]
    tools: Any = [function, {"type": "namespace", "name": "mcp__task", "description": "d", "tools": inner}]
    texts = (call("mcp__task__add", a=1, b=2) + call("add", a=3, b=4), "three")
    async with episode(*texts) as (endpoint, script, session), openai_client(endpoint) as client:
        items: Any = [{"role": "user", "content": "go"}]
        async with client.responses.stream(input=items, model="policy", tools=tools) as stream:
            async for _ in stream:
                pass
            made: Any = (await stream.get_final_response()).output
        assert [(one.namespace, one.name, one.arguments) for one in made] == [
            ("mcp__task", "add", '{"a":1,"b":2}'), (None, "add", '{"a":3,"b":4}')
        ]  # fmt: skip
        items += [one.model_dump(exclude={"parsed_arguments"}) for one in made]
        items += [{"type": "function_call_output", "call_id": one.call_id, "output": "3"} for one in made]
        again = await client.responses.create(input=items, model="policy", tools=tools)
        assert again.output_text == "three"
    assert script.check_exact(session) == 1
    assert session.metrics == {"ignored_tools": 2.0}


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


async def test_anthropic_plain_and_streamed_are_one_branch(episode: Episode) -> None:
    texts = ("I add." + call("add", a=1, b=2) + call("add", a=3, b=4), "Done.", call("add", a=5, b=6), "End. STOP no")
    tools: Any = [{"name": "add", "description": "Add.", "input_schema": PARAMETERS}]
    ask: Any = {"model": "policy", "max_tokens": 90, "system": "s", "tools": tools}
    async with (
        episode(*texts) as (endpoint, script, session),
        anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key) as client,
    ):
        messages: Any = [{"role": "user", "content": "go"}]
        made = await client.messages.create(messages=messages, **ask)
        assert made.stop_reason == "tool_use"
        assert [part.type for part in made.content] == ["text", "tool_use", "tool_use"]
        assert made.usage.output_tokens == len(script.log[0][1])
        results = [
            {"type": "tool_result", "tool_use_id": p.id, "content": "3"} for p in made.content if p.type == "tool_use"
        ]
        messages += [{"role": "assistant", "content": made.content}, {"role": "user", "content": results}]
        async with client.messages.stream(messages=messages, **ask) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_message()
        assert (final.content[0].type, final.stop_reason) == ("text", "end_turn")
        messages += [{"role": "assistant", "content": final.content}, {"role": "user", "content": "more"}]
        async with client.messages.stream(messages=messages, **ask) as stream:
            used = (await stream.get_final_message()).content
        assert used[0].type == "tool_use"
        assert used[0].input == {"a": 5, "b": 6}
        back: Any = {"type": "tool_result", "tool_use_id": used[0].id, "content": [{"type": "text", "text": "11"}]}
        messages += [{"role": "assistant", "content": used}, {"role": "user", "content": [back]}]
        last = await client.messages.create(messages=messages, stop_sequences=["STOP"], **ask)
        assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", "STOP")
    cut = len(script.log[3][1]) - last.usage.output_tokens
    assert script.check_exact(session, cut) == 1


async def test_thinking_is_shown_and_stays_in_the_branch(gateway: Gateway, tokenizer: PreTrainedTokenizerBase) -> None:
    thinking = load_renderer("qwen3", tokenizer, thinking=True)
    script = Script(tokenizer, ("<think>\nwell\n</think>\n\nyes", "<think>\nso\n</think>\n\nno").__getitem__)
    session = session_of(thinking, tokenizer, script)
    async with (
        gateway.endpoint(session) as endpoint,
        anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key) as client,
    ):
        made = await client.messages.create(model="policy", max_tokens=50, messages=QUESTION)
        assert [part.type for part in made.content] == ["thinking", "text"]
        history: Any = [*QUESTION, {"role": "assistant", "content": made.content[1:]}, {"role": "user", "content": "r"}]
        await client.messages.create(model="policy", max_tokens=50, messages=history)
    assert script.check_exact(session) == 1


async def test_a_call_that_is_repeated_is_sampled_once(episode: Episode) -> None:
    """The client gives up after a while and tries again; both clients send the same header."""
    slow = asyncio.Event()

    async def late() -> str:
        await slow.wait()
        return "late"

    async def second_try(request: Any) -> None:
        if request.headers["x-stainless-retry-count"] == "1":
            slow.set()

    async with episode(say=lambda number: late()) as (endpoint, script, session):
        http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [second_try]})
        impatient = openai_client(endpoint, timeout=0.2, max_retries=20, http_client=http)
        asking = impatient.chat.completions.create(model="policy", messages=QUESTION)
        assert (await asking).choices[0].message.content == "late"
        assert script.asked == 1
        again = await openai_client(endpoint).chat.completions.create(model="policy", messages=QUESTION)
        assert again.choices[0].message.content == "late"
    assert script.check_exact(session) == 2  # asked for once more, it is another reply


async def test_other_models_are_answered_without_loss(episode: Episode) -> None:
    async with episode("a title", "yes") as (endpoint, script, session), openai_client(endpoint) as client:
        made = await client.chat.completions.create(model="gpt-title", messages=QUESTION)
        assert (made.model, made.choices[0].message.content) == ("gpt-title", "a title")
        await client.chat.completions.create(model="policy-large", messages=QUESTION)
    (trajectory,) = delivered(session)
    assert trajectory.sampled == len(script.log[1][1])
    assert session.untrained == 1


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
            await until(lambda count=number + 1: len(queue._waiting) == count)
        waiting[1].cancel()  # one whose client goes leaves the queue
        await until(lambda: len(queue._waiting) == 2)
        assert (queue.under_way, script.asked) == (2, 2)
        ends[0].set()
        assert await script.calls.get() == 2
        ends[2].set()
        assert (await waiting[0]).choices[0].message.content == "reply 2"
        assert await script.calls.get() == 3
        ends[1].set()
        ends[3].set()
        answers = [(await one).choices[0].message.content for one in (under_way, waiting[2])]
        assert answers == ["reply 1", "reply 3"]
        assert (queue.under_way, queue.bytes, script.asked) == (0, 0, 4)
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
            await until(lambda: len(queue._waiting) == 1)
            refused = await http.post(url, json=ASK)
            assert refused.status_code == 429
            assert "1 calls under way and 1 that wait, as many as it may" in refused.json()["error"]["message"]
        assert [(await one).status_code for one in asking] == [401, 401]
        assert (queue.under_way, queue.bytes) == (0, 0)


async def test_the_bodies_of_an_episodes_calls_have_a_size_and_a_time(
    gateway: Gateway, episode: Episode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "BODIES", 4000)
    monkeypatch.setattr(bodies_module, "SMALL_BODY", 3000)
    monkeypatch.setattr(bodies_module, "TOKEN_BYTES", 1)
    ended = asyncio.Event()

    async def late() -> str:
        await ended.wait()
        return "late"

    def ask(size: int) -> Any:
        return {**ASK, "metadata": "x" * size}

    async def pieces(size: int) -> AsyncIterator[bytes]:
        yield json.dumps(ask(size)).encode()

    async with episode(say=lambda number: late()) as (endpoint, script, session), httpx.AsyncClient() as http:
        url = f"{endpoint.url}/v1/chat/completions"
        first = asyncio.create_task(http.post(url, json=ask(2500)))
        await script.calls.get()
        queue = queue_of(gateway)
        second = asyncio.create_task(http.post(url, content=pieces(100)))  # of an unknown size
        await until(lambda: len(queue._waiting) == 1)
        third = asyncio.create_task(http.post(url, json=ask(2500)))
        await until(lambda: len(queue._waiting) == 2)
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
        assert (queue.under_way, queue.bytes) == (0, 0)
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


async def test_a_lost_engine_is_told_and_remembered(episode: Episode) -> None:
    async def lost() -> str:
        raise EngineError("no replica answers")

    async with episode(say=lambda number: lost()) as (endpoint, script, session):
        with pytest.raises(openai.InternalServerError, match="no replica answers"):
            await openai_client(endpoint).chat.completions.create(model="policy", messages=QUESTION)
        assert script.asked == 1  # the client is told not to try again
        stream: Any = {"stream": True}
        with pytest.raises(openai.InternalServerError):
            await openai_client(endpoint).chat.completions.create(model="policy", messages=QUESTION, **stream)
    assert isinstance(session.failure, EngineError)


async def test_a_full_context_is_a_bad_request(episode: Episode) -> None:
    async with episode(max_tokens=20) as (endpoint, _, session):
        long: Any = [{"role": "user", "content": "q " * 50}]
        with pytest.raises(openai.BadRequestError, match="max_tokens is 20") as raised:
            await openai_client(endpoint).chat.completions.create(model="policy", messages=long)
        assert raised.value.code == "context_length_exceeded"
        client = anthropic.AsyncAnthropic(base_url=endpoint.url, api_key=endpoint.key)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens is 20"):
            await client.messages.create(model="policy", max_tokens=5, messages=long)
        assert "max_tokens is 20" in session.exhausted[-1]


ASK = {"model": "policy", "messages": QUESTION}
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
        ("chat/completions", {**ASK, "messages": [{"role": "robot"}]}, "$.messages[0].role"),
        ("chat/completions", {**ASK, "messages": IMAGE}, "'image_url' is not supported"),
        ("chat/completions", {**ASK, "messages": [*QUESTION, {"role": "assistant"}]}, "needs a message to answer"),
        ("chat/completions", {**ASK, "n": 0}, "$.n"),
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


async def test_fields_that_would_change_the_distribution_are_counted(episode: Episode) -> None:
    async with episode("a", "b") as (endpoint, _, session), openai_client(endpoint) as client:
        await client.chat.completions.create(
            model="policy", messages=QUESTION, temperature=0.2, seed=3, top_p=1.0, tool_choice="none", tools=CHAT_TOOLS
        )
        await client.chat.completions.create(
            model="policy", messages=QUESTION, temperature=0.0, response_format={"type": "json_object"}
        )
    counted = {"ignored_temperature": 2.0, "ignored_seed": 1.0, "ignored_response_format": 1.0}
    assert session.metrics == counted


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

    async def late() -> str:
        await ended.wait()
        return "late"

    def say(number: int) -> Awaitable[str]:
        return late()

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
    assert not gateway._connections._idle_of


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


class Calculator:
    """An environment of one tool, of which one step fails and the fourth is the last."""

    def __init__(self) -> None:
        self.steps: list[Message] = []

    async def step(self, message: Message) -> StepResult:
        self.steps.append(message)
        await settle()
        if len(self.steps) == 3:
            raise ToolError("the tool broke")
        reply, _ = await call_tool({"calculator": CALCULATOR}, message.tool_calls[0])
        return StepResult((reply,), done=len(self.steps) == 4)


async def test_the_tools_of_the_environment_are_an_mcp_server(episode: Episode) -> None:
    env: Any = Calculator()
    tools = EnvTools(env, (CALCULATOR.spec,))
    async with episode(tools=tools) as (endpoint, _, _), httpx.AsyncClient() as client:

        async def rpc(method: str, **params: Any) -> Any:
            body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
            return (await client.post(endpoint.mcp, json=body)).json()

        async def calculate(**arguments: Any) -> Any:
            answer = await rpc("tools/call", name="calculator", arguments=arguments)
            return answer["result"]["content"][0]["text"], answer["result"]["isError"]

        begun = (await rpc("initialize", protocolVersion="2025-06-18", capabilities={}, clientInfo={"name": "x"}))[
            "result"
        ]
        assert begun["protocolVersion"] == "2025-06-18"
        assert (await client.post(endpoint.mcp, json={"method": "notifications/initialized"})).status_code == 202
        assert [tool["name"] for tool in (await rpc("tools/list"))["result"]["tools"]] == ["calculator"]
        assert await calculate(expression="6*7") == ("42", False)
        assert (await calculate(wrong=1))[1]
        invented = (await rpc("tools/call", name="answer", arguments={}))[
            "result"
        ]  # no step: it could pass for an answer
        assert (invented["isError"], len(env.steps)) == (True, 2)
        assert "the tool broke" in (await rpc("tools/call", name="calculator"))["error"]["message"]
        assert await calculate(expression="1+1") == ("2", False)
        assert tools.done
        assert await calculate(expression="1+1") == ("the episode is over", True)
        assert len(env.steps) == 4
        assert (await rpc("resources/list"))["error"]["code"] == -32601
        assert (await client.get(endpoint.mcp)).status_code == 405
        assert (await client.post(endpoint.mcp, content="{")).json()["error"]["code"] == -32700
    assert (await httpx.AsyncClient().post(endpoint.mcp, json={})).status_code == 401
