"""What the gateway answers, over real sockets, to the real clients of OpenAI and Anthropic, and of MCP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from slipstream.agents import load_renderer
from slipstream.agents.gateway import EnvTools, Gateway
from slipstream.envs import CALCULATOR
from slipstream.errors import EngineError
from slipstream.tests.gateways import (
    CHAT_TOOLS,
    PARAMETERS,
    QUESTION,
    Calculator,
    Episode,
    late_replies,
    openai_client,
)
from slipstream.tests.sessions import Script, call, delivered, session_of
from transformers import PreTrainedTokenizerBase


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

    async def second_try(request: Any) -> None:
        if request.headers["x-stainless-retry-count"] == "1":
            slow.set()

    async with episode(say=late_replies(slow)) as (endpoint, script, session):
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


async def test_fields_that_would_change_the_distribution_are_counted(episode: Episode) -> None:
    async with episode("a", "b") as (endpoint, _, session), openai_client(endpoint) as client:
        await client.chat.completions.create(
            model="policy",
            messages=QUESTION,
            temperature=0.2,
            seed=3,
            top_p=1.0,
            tool_choice="none",
            tools=CHAT_TOOLS,
            extra_body={"top_k": 5, "min_p": 0.0, "repetition_penalty": 1.1},
        )
        await client.chat.completions.create(
            model="policy", messages=QUESTION, temperature=0.0, response_format={"type": "json_object"}
        )
    counted = {"ignored_temperature": 2.0, "ignored_seed": 1.0, "ignored_response_format": 1.0}
    counted |= {"ignored_top_k": 1.0, "ignored_repetition_penalty": 1.0}
    assert session.metrics == counted


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
