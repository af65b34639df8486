"""What the gateway's dialects, the APIs in which an agent may ask for a completion, have in common. A dialect is pure: bytes in,
structs and bytes out.

Invariants:
- A field that would change the distribution that the learner assumes, such as `temperature`, is accepted, not followed, and named
  in `CompletionRequest.ignored`; one that cannot be answered, such as an image, raises PolicyError.
- What a dialect writes, it reads back to the message that was sampled: a history that a client returns continues its branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta

from ...envs.base import JSON, Message, ToolCall, ToolSpec
from ...errors import PolicyError
from ..base import Reply, SampleRequest

T = TypeVar("T", bound=msgspec.Struct)

SHOWN = 80  # characters of a client's value in an error or a log
MOST_REPLIES = 128  # `n` of one request, as at OpenAI
MOST_STOPS = 64  # each of which is looked for in every reply; OpenAI takes 4
PLACE = re.compile(r"at `\$([^`]*)`$")  # that msgspec names
STEP = re.compile(r"\[(\d+)\]|\.(\w+)")  # of a place
Count = Annotated[int, Meta(ge=1)]

UNSEEN = {
    "thinking",
    "redacted_thinking",
    "reasoning",
}  # parts that the branch has as tokens; clients return them or not


class CompletionRequest(msgspec.Struct, frozen=True):
    """A request in any dialect."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    sample: SampleRequest = SampleRequest()
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    ignored: tuple[str, ...] = ()  # fields that were set and are not followed
    echo: JSON = {}  # what the answer repeats of the request


class Answer(msgspec.Struct, frozen=True):
    """The replies to a request. `token_texts` holds, where log-probs are asked for, the text of each token of each reply."""

    id: str  # unique, in hexadecimal digits
    created: int  # seconds since 1970
    model: str  # as the client named it
    replies: tuple[Reply, ...]
    token_texts: tuple[tuple[str, ...], ...] = ()


class Dialect(Protocol):
    """One API for completions."""

    path: str
    """Below the base URL."""

    def read(self, body: bytes) -> CompletionRequest:
        """Raises PolicyError, in one line: it is no request, or asks for something that is not supported."""
        ...

    def write(self, request: CompletionRequest, answer: Answer) -> JSON:
        """The body of the response."""
        ...

    def events(self, request: CompletionRequest, answer: Answer) -> Iterator[bytes]:
        """The response as server-sent events."""
        ...

    def error(self, status: int, message: str, code: str) -> JSON:
        """The body of an error. `code` is one of OpenAI's, or ""."""
        ...

    def error_event(self, status: int, message: str, code: str) -> bytes:
        """The same as the last event of a stream that has begun."""
        ...


class Part(msgspec.Struct):
    """A part of a message's content, of any type."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    id: str = ""
    name: str = ""
    input: JSON = {}
    tool_use_id: str = ""
    content: str | list[Part] | None = None


Content = str | list[Part] | None


def parse(body: bytes, kind: type[T], what: str) -> T:
    """`body` as JSON of `kind`. Raises PolicyError naming the place of the first fault, and what is there."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PolicyError(f"this is no {what}: {error}{_value_at(body, PLACE.search(str(error)))}") from None


def _value_at(body: bytes, place: re.Match[str] | None) -> str:
    """The value that an error names, as the end of its line; "" where it names none."""
    if place is None or "..." in place[1]:
        return ""
    try:
        value: Any = msgspec.json.decode(body)
        for number, name in STEP.findall(place[1]):
            value = value[int(number)] if number else value[name]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, LookupError, TypeError):  # wrong elsewhere, too
        return ""
    return f", which is {msgspec.json.encode(value)[:SHOWN].decode(errors='replace')}"


def role_of(role: str, allowed: Sequence[str], place: str) -> str:
    """Raises PolicyError where `role` is not `allowed`."""
    if role not in allowed:
        raise PolicyError(f"{place}: {role[:SHOWN]!r} is not {', '.join(allowed[:-1])} or {allowed[-1]}")
    return role


def text_of(content: Content, place: str) -> str:
    """The text of the content at `place`. Raises PolicyError where it has images or other media."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(text_of_part(part, f"{place}[{number}]") for number, part in enumerate(content))


def text_of_part(part: Part, place: str) -> str:
    """See `text_of`."""
    if part.type in ("text", "input_text", "output_text", "summary_text"):
        return part.text or ""
    if part.type == "refusal":
        return part.refusal or ""
    if part.type in UNSEEN:
        return ""
    raise PolicyError(f"{place}.type: {part.type[:SHOWN]!r} is not supported; only text is")


def tool_of(name: str, description: str | None, parameters: JSON | None, place: str) -> ToolSpec:
    """Raises PolicyError where the tool has no name."""
    if not name:
        raise PolicyError(f"{place}.name: missing or empty; a tool needs a name")
    return ToolSpec(name, description or "", parameters or {})


def arguments_of(arguments: str | JSON, place: str) -> JSON:
    """The arguments of the tool call at `place`. Raises PolicyError where they are no JSON object."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return msgspec.json.decode(arguments or "{}", type=JSON)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise PolicyError(f"{place}.arguments: no JSON object: {arguments[:SHOWN]!r}") from None


def stops_of(stop: str | Sequence[str] | None, place: str) -> tuple[str, ...]:
    """The stop texts. Raises PolicyError for an empty one, and for more than `MOST_STOPS`."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise PolicyError(f"{place}: a stop text must not be empty")
    if len(stops) > MOST_STOPS:
        raise PolicyError(f"{place}: {len(stops)} stop texts are too many; at most {MOST_STOPS} are allowed")
    return stops


def ignored_of(body: msgspec.Struct, neutral: Mapping[str, Sequence[object]]) -> list[str]:
    """The fields of `body` that are set to something else than the values that ask for nothing."""
    return [name for name, values in neutral.items() if getattr(body, name) not in (None, *values)]


def named(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Tool messages with the names of the tools, which clients leave out, by the ids of the calls."""
    names: dict[str, str] = {}
    found: list[Message] = []
    for message in messages:
        names |= {call.id: call.name for call in message.tool_calls}
        name = message.name or names.get(message.tool_call_id, "")
        found.append(msgspec.structs.replace(message, name=name) if message.role == "tool" else message)
    return tuple(found)


def encoded_arguments(call: ToolCall) -> str:
    """The arguments as the JSON text that OpenAI's APIs have."""
    return msgspec.json.encode(call.arguments).decode()


def event(data: JSON, name: str = "") -> bytes:
    """One server-sent event."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + msgspec.json.encode(data) + b"\n\n"


def openai_error(status: int, message: str, code: str) -> JSON:
    """An error of OpenAI's APIs."""
    kind = "server_error" if status >= 500 else "requests" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code or None}}
