"""A policy that is no model, behind OpenAI's Chat Completions API: for checks and measurements of environments that play
themselves."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from aiohttp import web

from .base import JSON, Message, ToolSpec
from .self_played import PolicyEndpoint

SHUTDOWN_S = 1.0  # how long connections may take to close; the episode has ended by then


@contextlib.asynccontextmanager
async def scripted_endpoint(script: Callable[[Sequence[ToolSpec]], Iterator[Message]]) -> AsyncIterator[PolicyEndpoint]:
    """An endpoint on loopback that replies with the messages of `script`, which is given the tools of the first request; after them
    with "yes"."""
    said: list[Iterator[Message]] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        if not said:
            said.append(script(tuple(_tool(tool) for tool in body.get("tools") or ())))
        whole = _completion(next(said[0], Message("assistant", "yes")))
        if not body.get("stream"):
            return web.json_response(whole)
        return web.Response(text=_streamed(whole), content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield PolicyEndpoint(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "script")
    finally:
        await runner.cleanup()


def _streamed(whole: JSON) -> str:
    """A completion as one chunk, the usage, and the end."""
    (choice,) = whole["choices"]
    calls = choice["message"].get("tool_calls", ())
    delta = choice["message"] | {"tool_calls": [{"index": i} | call for i, call in enumerate(calls)]}
    head = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    said = head | {"choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}]}
    counted = head | {"choices": [], "usage": whole["usage"]}
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in (said, counted)) + "data: [DONE]\n\n"


def _tool(tool: JSON) -> ToolSpec:
    function = tool.get("function", {})
    return ToolSpec(function.get("name", ""), function.get("description") or "", function.get("parameters") or {})


def _completion(message: Message) -> JSON:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for call in message.tool_calls
    ]
    written: JSON = {"role": "assistant", "content": message.content} | ({"tool_calls": calls} if calls else {})
    choice = {"index": 0, "message": written, "finish_reason": "tool_calls" if calls else "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "script",
        "choices": [choice],
        "usage": usage,
    }
