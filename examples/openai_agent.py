"""An agent written with the OpenAI SDK, trained as it is.

    cd examples && slipstream train quickstart agent.kind=openai_agent:solve

Of Slipstream it knows the two arguments of `solve`: the messages that open a task, and the endpoint that speaks OpenAI's API with
the policy behind it. It owns its loop and its tool. What it returns is the answer that the environment rewards; every token that
the policy sampled for it is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from slipstream.agents import Endpoint
from slipstream.envs import CALCULATOR, InvalidCall, Message
from slipstream.envs.tools import calculate

TOOLS: Any = [{"type": "function", "function": msgspec.to_builtins(CALCULATOR.spec)}]
HTTP = DefaultAsyncHttpxClient()  # one for all episodes of a worker: a client of its own takes 20 ms


async def solve(messages: Sequence[Message], endpoint: Endpoint) -> str:
    """Answer a question, with as many calls of the calculator as the policy wants."""
    client = AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, http_client=HTTP)
    history: list[Any] = [{"role": message.role, "content": message.content} for message in messages]
    while True:
        made = await client.chat.completions.create(model="policy", messages=history, tools=TOOLS)
        reply: Any = made.choices[0].message
        if not reply.tool_calls:
            return reply.content
        history.append(reply)
        for call in reply.tool_calls:
            history.append({"role": "tool", "tool_call_id": call.id, "content": calculator(call.function.arguments)})


def calculator(arguments: str) -> str:
    """The value of the expression in `arguments`, JSON text that the policy wrote; or what is wrong with it."""
    try:
        return calculate(str(json.loads(arguments).get("expression")))
    except InvalidCall as error:
        return f"error: {error}"
