"""Expert traces: answers to rows of a data set that others gave, a file of their own beside the rows.

Invariants:
- A trace repeats the prompt of its row. Equal opening messages are the same prompt, whichever of the rows that have it was meant.
- A trace is one answer: text, or one message of the assistant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...errors import ConfigError
from ..base import JSON, Message
from .examples import MISSING, Columns, lookup, read_example
from .rows import open_rows

ANSWERS = ("trace", "completion", "target")  # the second is TRL's, the third LUFFY's


class Trace(msgspec.Struct, frozen=True):
    """An answer, and where it is, for messages."""

    place: str
    text: str


class TaskTrace(msgspec.Struct, frozen=True):
    """A trace, and the first index of the task that it answers."""

    index: int
    trace: Trace


def read_traces(key: str, path: str, prompt: str, system: str) -> dict[tuple[Message, ...], list[Trace]]:
    """All traces of `path` by the opening messages that they answer, made of the column `prompt` as those of a data set are. Raises
    ConfigError naming `key`: as `open_rows`, or a row has no usable prompt or answer."""
    rows, columns = open_rows(key, path), Columns(prompt, "", "")
    found: dict[tuple[Message, ...], list[Trace]] = {}
    for number in range(len(rows)):
        place = rows.place(number)
        try:
            row = rows.row(number)
            example = read_example(row, columns, system, needs_answer=False)
            found.setdefault(example.messages, []).append(Trace(place, _answer(row)))
        except ValueError as error:
            raise ConfigError(f"{key}: {place}: {error}") from None
    return found


def _answer(row: JSON) -> str:
    """Raises ValueError."""
    column = next((name for name in ANSWERS if lookup(row, name) is not MISSING), None)
    if column is None:
        raise ValueError(f"it has no answer; call its column {' or '.join(ANSWERS)}; it has {', '.join(row)}")
    text = _text(row[column])
    if text is None or not text.strip():
        wanted = 'text, and a list of one message, [{"role": "assistant", "content": "..."}]'
        raise ValueError(f"its {column!r} is {row[column]!r:.60}; allowed are {wanted}")
    return text


def _text(answer: Any) -> str | None:
    if isinstance(answer, list) and len(answer) == 1 and isinstance(answer[0], Mapping):
        answer = answer[0].get("content") if answer[0].get("role") == "assistant" else None
    return answer if isinstance(answer, str) else None
