"""Scripted policies, which play environments without a model: text, nothing, broken calls, calls of no tool, calls that fit a
schema and that do not."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from .base import Message, Observation, TaskFile, TaskSource, ToolCall, ToolSpec
from .scripted_endpoint import scripted_endpoint
from .self_played import play_message

EXTRA_TURNS = 4  # messages of text after one of each kind
SAMPLES = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}  # of a JSON type


def moves(
    tools: Sequence[ToolSpec], rng: random.Random, files: tuple[TaskFile, ...] | None = None
) -> Iterator[Message]:
    """One message of each kind that policies send, in a random order, then text; each with what is in the task's folder."""
    said = [
        Message("assistant", "I do not know."),
        Message("assistant", ""),
        Message("assistant", "", malformed="a tool call could not be read"),
        Message("assistant", "", (ToolCall("no_such_tool", {}, "c0"),)),
    ]
    for tool in tools:
        fitting = {k: sample(v) for k, v in tool.parameters.get("properties", {}).items()}
        said.append(Message("assistant", "", (ToolCall(tool.name, {}, "c1"),)))
        said.append(
            Message("assistant", "", (ToolCall(tool.name, fitting, "c2"), ToolCall(tool.name, {"x": None}, "c3")))
        )
    rng.shuffle(said)
    for message in said:
        yield msgspec.structs.replace(message, files=files)
    for _ in range(EXTRA_TURNS):
        yield Message("assistant", rng.choice(["yes", "42", "[up]", "<answer>1</answer>"]), files=files)


def sample(schema: Any) -> Any:
    """A value that a property's schema allows, as far as it is simple."""
    if not isinstance(schema, dict):
        return "1"
    if schema.get("enum"):
        return schema["enum"][0]
    return schema.get("minimum", SAMPLES.get(str(schema.get("type")), "1"))


@contextlib.asynccontextmanager
async def scripted(source: TaskSource, opening: Observation, index: int) -> AsyncIterator[Iterator[Message]]:
    """What the scripted policy of an episode says to its environment; to one that plays itself, where it says it."""
    rng = random.Random(index)
    if not getattr(source, "self_played", False):
        yield moves(opening.tools, rng, opening.files or None)
        return
    async with scripted_endpoint(lambda tools: moves(tools, rng)) as endpoint:
        yield iter((play_message(endpoint),))
