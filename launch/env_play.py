"""`slipstream env play`: one episode on the terminal, played by a person or by a model behind an OpenAI API.

Invariants:
- The environment runs as in a run: behind `EnvGuard`, with a run's deadlines.
- A person's line is a message; `/TOOL {"argument": ...}` is a call of a tool. The end of the input ends the episode.
- Nothing is trained, and nothing is recorded.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp

from ..agents.chat_images import chat_parts
from ..common.images import kind_of
from ..configs import Config
from ..envs import EnvPart, Message, ToolCall, ToolSpec, parts_of
from ..envs.self_played import PolicyEndpoint, play_message
from ..envs.tools import in_thread
from ..errors import ConfigError, EngineError, describe
from ..rollout.env_guard import EnvGuard, EpisodeLimits, TaskMemo

MODEL_S = 300.0  # longest answer of a model
Line = Callable[[str], None]
Player = Callable[[Sequence[Message], Sequence[ToolSpec]], Awaitable[Message | None]]  # None ends the episode


async def play(part: EnvPart, config: Config, index: int, player: Player, tell: Line) -> float:
    """Play task `index` to its end; returns the sum of the rewards. Raises EnvError, ToolError, EngineError."""
    rollout = config.rollout
    limits = EpisodeLimits(rollout.episode_s, rollout.step_s, rollout.tool_s)
    env = EnvGuard(part, limits, TaskMemo())
    try:
        with env.calls:
            task = await env.open(index)
            tell(f"task {task.id} of {part.name}")
            opening = await env.reset(task)
            for tool in opening.tools:
                tell(f"tool {tool.name}: {tool.description} {json.dumps(tool.parameters)}")
            history = list(opening.messages)
            show(opening.messages, tell)
            while (message := await player(history, opening.tools)) is not None:
                result = await env.step(message)
                history += (message, *result.messages)
                show(result.messages, tell)
                metrics = "".join(f", {name} {value:g}" for name, value in result.metrics.items())
                tell(f"reward {result.reward:g}{metrics}")
                if result.done:
                    tell(f"the episode is {'cut off' if result.truncated else 'done'}")
                    break
    finally:
        await env.close()
    return sum(env.rewards)


def show(messages: Sequence[Message], tell: Line) -> None:
    for message in messages:
        who = f"tool {message.name}" if message.role == "tool" else message.role
        seen = "".join(f" [{kind_of(image.data)} image, {len(image.data)} bytes]" for image in message.images)
        tell(f"{who}: {message.content}{seen}")


def part_of(config: Config, name: str) -> EnvPart:
    """The environment of a config, or the part `name` of a mixture. Raises ConfigError."""
    parts = parts_of(config.env, "train", config.seed)
    found = [part for part in parts if name in ("", part.name)]
    if len(found) != 1:
        raise ConfigError(f"--part: must name one of {', '.join(part.name for part in parts)}")
    return found[0]


def spoken(text: str, tools: Sequence[ToolSpec]) -> Message:
    """What a person's line says. A call that cannot be read is a malformed message, as a policy's would be."""
    name, _, arguments = text.removeprefix("/").partition(" ")
    if not text.startswith("/") or not tools:
        return Message("assistant", text)
    return called([("call-1", name, arguments or "{}")], "")


def called(calls: Sequence[tuple[str, str, str]], content: str) -> Message:
    """A message with calls of (id, name, arguments as JSON)."""
    try:
        read = tuple(ToolCall(name, dict(json.loads(arguments)), number) for number, name, arguments in calls)
    except (ValueError, TypeError) as error:
        return Message("assistant", content, malformed=f"the arguments are no JSON object: {error}")
    return Message("assistant", content, read)


def person(prompt: str = "> ") -> Player:
    async def reply(history: Sequence[Message], tools: Sequence[ToolSpec]) -> Message | None:
        sys.stdout.write(prompt)
        sys.stdout.flush()
        line = await in_thread(sys.stdin.readline)
        return spoken(line.rstrip("\n"), tools) if line else None

    return reply


def model(url: str, name: str, tell: Line) -> Player:
    """A model at the base URL of an OpenAI API, such as `http://127.0.0.1:8000/v1`; `name` "" is the first that it lists."""

    async def reply(history: Sequence[Message], tools: Sequence[ToolSpec]) -> Message | None:
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(MODEL_S)) as session:
                chosen = name or (await _json(session.get(f"{url}/models")))["data"][0]["id"]
                body = {"model": chosen, "messages": [_to_openai(message) for message in history]}
                if tools:
                    body["tools"] = [{"type": "function", "function": _spec(tool)} for tool in tools]
                answer = (await _json(session.post(f"{url}/chat/completions", json=body)))["choices"][0]["message"]
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            raise EngineError(f"the model at {url} did not answer: {describe(error)}") from error
        found = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in answer.get("tool_calls") or ()]
        message = called(found, answer.get("content") or "")
        tell(f"assistant: {message.content}{''.join(f' /{call[1]} {call[2]}' for call in found)}")
        return message

    return reply


def itself(url: str, name: str) -> Player:
    """For environments that play themselves: with a model as in `model`, whose key is the variable OPENAI_API_KEY."""

    async def reply(history: Sequence[Message], tools: Sequence[ToolSpec]) -> Message | None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(MODEL_S)) as session:
            try:
                chosen = name or (await _json(session.get(f"{url}/models")))["data"][0]["id"]
            except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
                raise EngineError(f"the model at {url} did not answer: {describe(error)}") from error
        return play_message(PolicyEndpoint(url, os.environ.get("OPENAI_API_KEY", "none"), chosen))

    return reply


async def _json(request: Any) -> Any:
    async with request as response:
        if response.status != 200:
            raise ValueError(f"status {response.status}: {(await response.text())[:200]}")
        return await response.json()


def _spec(tool: ToolSpec) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _to_openai(message: Message) -> dict[str, Any]:
    written: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.images:
        written["content"] = parts = chat_parts(message)
        for part in parts:
            if (data := part.pop("image", None)) is not None:
                url = f"data:image/{kind_of(data)};base64,{base64.b64encode(data).decode()}"
                part |= {"type": "image_url", "image_url": {"url": url}}
    if message.tool_calls:
        written["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
            for c in message.tool_calls
        ]
    return written | ({"tool_call_id": message.tool_call_id} if message.role == "tool" else {})
