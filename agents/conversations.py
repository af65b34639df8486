"""Conversations from a file: one JSON object a line, in OpenAI's chat format, as data sets of conversations come.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "tools": [...]}

Invariants:
- What is in a message or a tool is used or refused, never ignored; beside `messages` and `tools` a line may hold what it likes.
- What is wrong is one line that names the file, the line and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ..envs.base import JSON, Message, Observation, ToolCall, ToolSpec
from ..errors import ConfigError


class Conversation(msgspec.Struct, frozen=True):
    """Line `number` of its file: what the assistant was shown first, and all that was said from its first message on."""

    number: int
    opening: Observation
    messages: tuple[Message, ...]


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of what a line holds."""


class _Called(_Part, frozen=True):
    name: str
    arguments: str | JSON = {}


class _Call(_Part, frozen=True):
    function: _Called
    id: str = ""
    type: Literal["function"] = "function"


class _Said(_Part, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: tuple[_Call, ...] | None = None
    tool_call_id: str = ""
    name: str = ""


class _Tool(_Part, frozen=True):
    function: _Described
    type: Literal["function"] = "function"


class _Described(_Part, frozen=True):
    name: str
    description: str = ""
    parameters: JSON = {}


class _Line(msgspec.Struct, frozen=True):
    messages: tuple[_Said, ...]
    tools: tuple[_Tool, ...] | None = None


class _Wrong(Exception):
    """What is wrong with a line."""


def read_conversations(key: str, path: str) -> Iterator[Conversation]:
    """The conversations of the file that the config names at `key`; blank lines are none.

    Raises:
        ConfigError: it cannot be read, holds no conversation, or a line is none that begins with somebody else and ends with the
            assistant, the two by turns.
    """
    count = 0
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                count += 1
                try:
                    yield _conversation(number, msgspec.json.decode(line, type=_Line))
                except (msgspec.MsgspecError, UnicodeDecodeError, _Wrong) as error:
                    raise ConfigError(f"{key}: {path}:{number}: {error}") from None
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror or error}") from None
    if not count:
        raise ConfigError(f'{key}: {path} holds no conversation; write one a line, as {{"messages": [...]}}')


def _conversation(number: int, line: _Line) -> Conversation:
    messages = [_message(index, said) for index, said in enumerate(line.messages)]
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise _Wrong("no message is the assistant's, so there is nothing to imitate")
    first = roles.index("assistant")
    if first == 0:
        raise _Wrong("messages[0] is the assistant's; somebody must have spoken before it")
    if roles[-1] != "assistant":
        raise _Wrong(f"messages[{len(roles) - 1}] is of role {roles[-1]}; the last one must be the assistant's")
    for index in range(1, len(roles)):
        if roles[index] == roles[index - 1] == "assistant":
            raise _Wrong(f"messages[{index - 1}] and messages[{index}] are both the assistant's; join them into one")
    return Conversation(
        number=number,
        opening=Observation(tuple(messages[:first]), _tools(line.tools or ())),
        messages=tuple(messages[first:]),
    )


def _message(index: int, said: _Said) -> Message:
    calls = said.tool_calls or ()
    if calls and said.role != "assistant":
        raise _Wrong(f"messages[{index}] is of role {said.role} and has tool_calls, which only the assistant may have")
    if said.content is None and not calls:
        raise _Wrong(f"messages[{index}] has no content")
    return Message(
        role=said.role,
        content=said.content or "",
        tool_calls=tuple(
            ToolCall(call.function.name, _arguments(index, call.function.arguments), call.id) for call in calls
        ),
        tool_call_id=said.tool_call_id,
        name=said.name,
    )


def _arguments(index: int, arguments: str | JSON) -> JSON:
    """OpenAI writes them as JSON in text, most data sets as they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments, type=JSON)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _Wrong(f"messages[{index}] calls a tool with arguments that are no JSON object: {error}") from None


def _tools(tools: Sequence[_Tool]) -> tuple[ToolSpec, ...]:
    return tuple(ToolSpec(t.function.name, t.function.description, t.function.parameters) for t in tools)
