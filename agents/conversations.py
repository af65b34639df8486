"""Conversations of a data set in OpenAI's chat format, the usual one: rows of a file, or of what the `datasets` package loads.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}], "tools": [...]}

A row of preferences has two conversations, of which `chosen` is better; what comes before both may be in `prompt`:

    {"prompt": [{"role": "user", "content": "2 + 2?"}],
     "chosen": [{"role": "assistant", "content": "4"}], "rejected": [{"role": "assistant", "content": "5"}], "tools": [...]}

Invariants:
- Every field of a message or a tool is used or rejected, never ignored; other fields beside those above are ignored. One that is
  null is not there: in tables all rows have all fields.
- An error is one line that names where the row is and the allowed values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec

from ..envs.base import JSON, Message, Observation, ToolCall, ToolSpec
from ..envs.dataset.rows import open_rows
from ..errors import ConfigError
from .demonstrations import Demonstration


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a row; unknown fields are rejected."""


class _CalledFunction(_Strict, frozen=True):
    name: str
    arguments: str | JSON = {}


class _Call(_Strict, frozen=True):
    function: _CalledFunction
    id: str = ""
    type: Literal["function"] = "function"


class _ChatMessage(_Strict, frozen=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: tuple[_Call, ...] | None = None
    tool_call_id: str = ""
    name: str = ""


class _Tool(_Strict, frozen=True):
    function: _DescribedFunction
    type: Literal["function"] = "function"


class _DescribedFunction(_Strict, frozen=True):
    name: str
    description: str = ""
    parameters: JSON = {}


class _Line(msgspec.Struct, frozen=True):
    messages: tuple[_ChatMessage, ...]
    tools: tuple[_Tool, ...] | None = None


class _Preference(msgspec.Struct, frozen=True):
    chosen: tuple[_ChatMessage, ...]
    rejected: tuple[_ChatMessage, ...]
    prompt: tuple[_ChatMessage, ...] = ()
    tools: tuple[_Tool, ...] | None = None


class _InvalidLine(Exception):
    """A row that is not a conversation; the message says why."""


L = TypeVar("L", _Line, _Preference)
T = TypeVar("T")
Conversation = tuple[
    Observation, list[Message]
]  # what the assistant sees first, and all messages from its first one on


def read_conversations(key: str, path: str) -> Iterator[Demonstration]:
    """The conversations of the data set `path`, which the config names at `key`. Raises ConfigError as `open_rows`, and where a row
    is not one that starts with another role than the assistant and ends with the assistant, who never speaks twice in a row."""
    for where, (opening, messages) in _rows(key, path, _Line, _conversation):
        yield where, opening, messages


def read_preferences(key: str, path: str) -> Iterator[tuple[Demonstration, Demonstration]]:
    """The chosen and the rejected conversation of each row of the data set `path`; errors as those of `read_conversations`, and
    where the two are the same."""
    for where, (chosen, rejected) in _rows(key, path, _Preference, _preference):
        yield (f"{where}, chosen", *chosen), (f"{where}, rejected", *rejected)


def _rows(key: str, path: str, kind: type[L], made: Callable[[L], T]) -> Iterator[tuple[str, T]]:
    """What `made` makes of each row, after where it is."""
    rows = open_rows(key, path)
    for number in range(len(rows)):
        where = f"{key}: {rows.place(number)}"
        try:
            columns = {name: _without_nulls(value) for name, value in rows.row(number).items() if value is not None}
            yield where, made(msgspec.convert(columns, type=kind))
        except (msgspec.MsgspecError, ValueError, _InvalidLine) as error:
            raise ConfigError(f"{where}: {error}") from None


def _without_nulls(column: Any) -> Any:
    """A list of messages, or whatever a column is, without the fields of a message that are null."""
    if not isinstance(column, list):
        return column
    return [{k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else item for item in column]


def _preference(line: _Preference) -> tuple[Conversation, Conversation]:
    found: list[Conversation] = []
    for name in ("chosen", "rejected"):
        try:
            found.append(_conversation(_Line((*line.prompt, *getattr(line, name)), line.tools)))
        except _InvalidLine as error:
            raise _InvalidLine(f"prompt and {name}: {error}") from None
    if found[0] == found[1]:
        raise _InvalidLine("chosen and rejected are the same, so neither can be preferred")
    return found[0], found[1]


def _conversation(line: _Line) -> Conversation:
    messages = [_message(index, message) for index, message in enumerate(line.messages)]
    roles = [message.role for message in messages]
    if "assistant" not in roles:
        raise _InvalidLine("no message is the assistant's, so there is nothing to imitate")
    first = roles.index("assistant")
    if first == 0:
        raise _InvalidLine("messages[0] is the assistant's; the first message must be of another role")
    if roles[-1] != "assistant":
        raise _InvalidLine(f"messages[{len(roles) - 1}] is of role {roles[-1]}; the last one must be the assistant's")
    for index in range(1, len(roles)):
        if roles[index] == roles[index - 1] == "assistant":
            raise _InvalidLine(
                f"messages[{index - 1}] and messages[{index}] are both the assistant's; join them into one"
            )
    tools = [tool.function for tool in line.tools or ()]
    specs = tuple(ToolSpec(tool.name, tool.description, tool.parameters) for tool in tools)
    return Observation(tuple(messages[:first]), specs), messages[first:]


def _message(index: int, message: _ChatMessage) -> Message:
    calls = message.tool_calls or ()
    if calls and message.role != "assistant":
        raise _InvalidLine(
            f"messages[{index}] is of role {message.role} and has tool_calls, which only the assistant may have"
        )
    if message.content is None and not calls:
        raise _InvalidLine(f"messages[{index}] has no content")
    return Message(
        role=message.role,
        content=message.content or "",
        tool_calls=tuple(ToolCall(c.function.name, _arguments(index, c.function.arguments), c.id) for c in calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _arguments(index: int, arguments: str | JSON) -> JSON:
    """OpenAI encodes them as a JSON string, most data sets as an object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments, type=JSON)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _InvalidLine(f"messages[{index}] calls a tool with arguments that are no JSON object: {error}") from None
