"""Episodes behind a gateway, and what clients of it write. The fixtures `gateway` and `episode` are in conftest.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import openai
from slipstream.agents import Session
from slipstream.agents.gateway import Endpoint, Gateway
from slipstream.agents.gateway.request_queue import RequestQueue
from slipstream.envs import CALCULATOR, Message, StepResult, call_tool
from slipstream.errors import ToolError
from slipstream.tests.scripted import settle
from slipstream.tests.sessions import Script

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}

CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]

QUESTION: Any = [{"role": "user", "content": "q"}]

ASK = {"model": "policy", "messages": QUESTION}

Episode = Callable[..., contextlib.AbstractAsyncContextManager[tuple[Endpoint, Script, Session]]]


def queue_of(gateway: Gateway) -> RequestQueue:
    (calls,) = gateway._episodes.values()
    return calls.requests


async def until(holds: Callable[[], bool]) -> None:
    """Returns once `holds`: the loop turns until then."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - sockets have no event for what has come
            await asyncio.sleep(0)


def late_replies(ended: asyncio.Event) -> Callable[[int], Awaitable[str]]:
    """For a `Script`: every reply comes once `ended` is set."""

    async def say(number: int) -> str:
        await ended.wait()
        return "late"

    return say


def posted(endpoint: Endpoint, path: str, body: bytes, *, size: int | None = None) -> bytes:
    """A request as a client writes it, of a body that is to have `size` bytes."""
    head = f"POST /e/{endpoint.key}{path} HTTP/1.1\r\nHost: gateway\r\nContent-Length: {len(body) if size is None else size}"
    return f"{head}\r\n\r\n".encode() + body


def openai_client(endpoint: Endpoint, **options: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, **options)


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
