"""Examples of a data set, made from its rows: the prompt, the reference answer and the id, in the columns that the row has or that
the config names.

Invariants:
- Columns are found once, in the first row; every row must have them.
- A row that cannot be used raises ValueError, which says what is wrong with it; the caller knows where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...configs.environments import DataSection
from ...errors import ConfigError
from ..base import JSON, Message

PROMPTS = ("prompt", "messages", "question")
ANSWERS = ("answer", "solution", "ground_truth", "reward_model.ground_truth")  # the last is verl's
ID = "id"
ROLES = ("system", "user", "assistant", "tool")
MISSING = object()


class Columns(msgspec.Struct, frozen=True):
    """Where a row has its prompt, its reference answer and its id; "" for the latter two where it has none. A name with dots leads
    into objects: `reward_model.ground_truth`."""

    prompt: str
    answer: str
    id: str


class Example(msgspec.Struct, frozen=True):
    """A row as a task: the opening `messages`, the `prompt` as the row has it (text, or a list of messages), the `reference`
    answer, None without one, and the whole row."""

    messages: tuple[Message, ...]
    prompt: Any
    reference: Any
    row: JSON


def find_columns(key: str, config: DataSection, first: JSON, *, needs_answer: bool) -> Columns:
    """Raises ConfigError naming `key` where the first row lacks a column that is named or needed."""
    has = ", ".join(first) or "none"

    def choose(option: str, named: str, candidates: tuple[str, ...], *, needed: bool) -> str:
        if named:
            if lookup(first, named) is MISSING:
                raise ConfigError(f"{key}.{option}: there is no column {named!r}; the first row has {has}")
            return named
        found = next((name for name in candidates if lookup(first, name) is not MISSING), "")
        if needed and not found:
            wanted = f"no {option} column was found; name it, or call it {' or '.join(candidates)}"
            raise ConfigError(f"{key}.{option}: {wanted}; the first row has {has}")
        return found

    return Columns(
        choose("prompt", config.prompt, PROMPTS, needed=True),
        choose("answer", config.answer, ANSWERS, needed=needs_answer),
        choose("id", config.id, (ID,), needed=False),
    )


def lookup(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of the path through objects that a name with dots is; MISSING where there is none, or null."""
    if name in row:
        return MISSING if row[name] is None else row[name]
    value: Any = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or value.get(key) is None:
            return MISSING
        value = value[key]
    return value


def read_example(row: JSON, columns: Columns, system: str, *, needs_answer: bool) -> Example:
    """Raises ValueError: the row has no usable prompt, or lacks an answer that the reward needs."""
    prompt = lookup(row, columns.prompt)
    if prompt is MISSING:
        raise ValueError(f"it has no {columns.prompt!r}; it has {', '.join(row) or 'no columns'}")
    messages = read_messages(prompt, columns.prompt)
    if system and messages[0].role != "system":
        messages = (Message("system", system), *messages)
    reference = lookup(row, columns.answer) if columns.answer else MISSING
    if reference is MISSING:
        if needs_answer:
            raise ValueError(f"it has no {columns.answer!r}, which the reward compares with")
        reference = None
    return Example(messages, prompt, reference, row)


def read_messages(prompt: Any, column: str) -> tuple[Message, ...]:
    """Text as one message of the user, or a list of messages in OpenAI's form. Raises ValueError."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"its {column!r} is empty")
        return (Message("user", prompt),)
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"its {column!r} is {prompt!r:.60}; allowed are text and a list of messages")
    messages: list[Message] = []
    for item in prompt:
        if not isinstance(item, Mapping) or item.get("role") not in ROLES or not isinstance(item.get("content"), str):
            raise ValueError(
                f"its {column!r} has {item!r:.60}, which is no message; write "
                f'{{"role": "user", "content": "..."}}, the role one of {", ".join(ROLES)}'
            )
        messages.append(Message(item["role"], item["content"]))
    if messages[-1].role == "assistant":
        raise ValueError(f"its {column!r} ends with a message of the assistant, which leaves nothing to answer")
    return tuple(messages)
