"""The gateway's dialect of OpenAI's Responses API, without a memory of its own: every request carries the whole conversation. The
policy calls a function `f` of a namespace `n` by the name `n__f`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...envs.base import JSON, Message, ToolCall, ToolSpec
from ...errors import PolicyError
from ..base import Reply, SampleRequest
from .chat import ROLES
from .dialect import (
    SHOWN,
    Answer,
    CompletionRequest,
    Content,
    Count,
    arguments_of,
    encoded_arguments,
    event,
    ignored_of,
    named,
    openai_error,
    parse,
    role_of,
    text_of,
)

NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
}
"""Fields that are accepted and not followed, with the values that ask for nothing."""

FUNCTION_FORM = '{"type": "function", "name": ..., "description": ..., "parameters": ...}'
REFUSED = ("previous_response_id", "conversation", "prompt", "background")
"""Fields that need a memory on this side."""


class _Item(msgspec.Struct):
    type: str = "message"
    role: str = ""
    content: Content = None
    name: str = ""
    namespace: str | None = None
    arguments: str | JSON = ""
    call_id: str = ""
    output: Content = None


class _ResponsesTool(msgspec.Struct):
    type: str
    name: str = ""
    description: str | None = None
    parameters: JSON | None = None
    tools: list[_ResponsesTool] | None = None  # of a namespace


class _Format(msgspec.Struct):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _Format | None = None


class _ResponsesBody(msgspec.Struct):
    model: str
    input: str | Annotated[list[_Item], Meta(min_length=1)]
    instructions: str | None = None
    tools: list[_ResponsesTool] | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    text: _Text | None = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    temperature: Any = None
    top_p: Any = None
    top_logprobs: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None


class _Echo(msgspec.Struct):
    tools: list[JSON] | None = None


class ResponsesDialect:
    """POST /v1/responses."""

    path = "/responses"

    def read(self, body: bytes) -> CompletionRequest:
        """See `Dialect.read`."""
        asked = parse(body, _ResponsesBody, "responses request")
        for name in REFUSED:
            if getattr(asked, name):
                raise PolicyError(f"{name}: not supported, no response is stored here; send the whole input")
        messages = [Message("system", asked.instructions)] if asked.instructions else []
        messages += [Message("user", asked.input)] if isinstance(asked.input, str) else _messages(asked.input)
        _check_names(asked.tools or [], "tools")
        tools = _flat(asked.tools or [])
        functions = [(_name(space, tool.name), tool) for space, tool in tools if tool.type == "function"]
        specs = [ToolSpec(name, tool.description or "", tool.parameters or {}) for name, tool in functions]
        ignored = [f"tools.{t.type}" for _, t in tools if t.type != "function"]
        if asked.text and asked.text.format and asked.text.format.type != "text":
            ignored.append("text.format")
        return CompletionRequest(
            asked.model,
            named(messages),
            tuple(specs),
            SampleRequest(asked.max_output_tokens),
            stream=bool(asked.stream),
            ignored=(*ignored_of(asked, NEUTRAL), *ignored),
            echo={
                "instructions": asked.instructions,
                "tool_choice": asked.tool_choice or "auto",
                "tools": parse(body, _Echo, "responses request").tools or [],
            },
        )

    def write(self, request: CompletionRequest, answer: Answer) -> JSON:
        """See `Dialect.write`."""
        (reply,) = answer.replies
        cut = reply.completion.finish_reason == "length" and not reply.message.tool_calls
        prompt, sampled = reply.prompt_tokens, len(reply.completion.token_ids)
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "model": answer.model,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "output": _items(answer.id, reply, request.echo["tools"]),
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
            "metadata": {},
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            },
            **request.echo,
        }

    def events(self, request: CompletionRequest, answer: Answer) -> Iterator[bytes]:
        """See `Dialect.events`."""
        whole, numbers = self.write(request, answer), itertools.count()

        def made(kind: str, **data: Any) -> bytes:
            return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield made("response.created", response=begun)
        yield made("response.in_progress", response=begun)
        for index, item in enumerate(whole["output"]):
            place = {"item_id": item["id"], "output_index": index}
            empty = {"message": {"content": []}, "function_call": {"arguments": ""}}.get(item["type"], {})
            yield made(
                "response.output_item.added", output_index=index, item={**item, "status": "in_progress", **empty}
            )
            if item["type"] == "message":
                (part,) = item["content"]
                place["content_index"] = 0
                yield made("response.content_part.added", part={**part, "text": ""}, **place)
                yield made("response.output_text.delta", delta=part["text"], logprobs=[], **place)
                yield made("response.output_text.done", text=part["text"], logprobs=[], **place)
                yield made("response.content_part.done", part=part, **place)
            elif item["type"] == "function_call":
                arguments = item["arguments"]
                yield made("response.function_call_arguments.delta", delta=arguments, **place)
                yield made("response.function_call_arguments.done", arguments=arguments, name=item["name"], **place)
            yield made("response.output_item.done", output_index=index, item=item)
        yield made(f"response.{whole['status']}", response=whole)

    def error(self, status: int, message: str, code: str) -> JSON:
        """See `Dialect.error`."""
        return openai_error(status, message, code)

    def error_event(self, status: int, message: str, code: str) -> bytes:
        """See `Dialect.error_event`. Its fields are those of the API; `error` is what makes OpenAI's Python client raise."""
        said = {"type": "error", "sequence_number": 0, "code": code or None, "message": message, "param": None}
        return event({**said, **self.error(status, message, code)}, "error")


def _check_names(tools: Sequence[_ResponsesTool], place: str) -> None:
    """Raises PolicyError for a function without a name."""
    for number, tool in enumerate(tools):
        if tool.type == "namespace":
            _check_names(tool.tools or (), f"{place}[{number}].tools")
        elif tool.type == "function" and not tool.name:
            raise PolicyError(f"{place}[{number}].name: missing or empty; a function is {FUNCTION_FORM}")


def _flat(tools: Sequence[_ResponsesTool]) -> list[tuple[str, _ResponsesTool]]:
    """Every tool with its namespace, "" for none."""
    return [
        one
        for t in tools
        for one in ([(t.name, inner) for inner in t.tools or ()] if t.type == "namespace" else [("", t)])
    ]


def _name(namespace: str | None, name: str) -> str:
    """By which the policy calls a function."""
    return f"{namespace}__{name}" if namespace else name


def _messages(items: Sequence[_Item]) -> list[Message]:
    """One message of the assistant for its text and the calls that follow it."""
    found: list[Message] = []
    for number, item in enumerate(items):
        last = found[-1] if found and found[-1].role == "assistant" else None
        if item.type == "function_call":
            call = ToolCall(
                _name(item.namespace, item.name), arguments_of(item.arguments, f"input[{number}]"), item.call_id
            )
            if last is None:
                found.append(Message("assistant", "", (call,)))
            else:
                found[-1] = msgspec.structs.replace(last, tool_calls=(*last.tool_calls, call))
        elif item.type == "function_call_output":
            found.append(Message("tool", text_of(item.output, f"input[{number}].output"), (), item.call_id))
        elif item.type == "message":
            known = role_of(item.role, ("system", "developer", "user", "assistant"), f"input[{number}].role")
            role: Any = ROLES.get(known, known)
            found.append(Message(role, text_of(item.content, f"input[{number}].content")))
        elif item.type != "reasoning":  # which its branch has as tokens
            raise PolicyError(
                f"input[{number}].type: {item.type[:SHOWN]!r} is not supported; messages and function calls are"
            )
    return found


def _items(answer_id: str, reply: Reply, tools: Sequence[JSON]) -> list[JSON]:
    flat = _flat(msgspec.convert(tools, list[_ResponsesTool]))
    places = {_name(space, tool.name): {"name": tool.name, "namespace": space} for space, tool in flat if space}
    items: list[JSON] = []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{answer_id}", "summary": summary})
    if reply.content or not reply.message.tool_calls:
        part = {"type": "output_text", "text": reply.content, "annotations": []}
        message = {"type": "message", "id": f"msg_{answer_id}", "role": "assistant", "content": [part]}
        items.append({**message, "status": "completed"})
    items += [
        {
            "type": "function_call",
            "id": f"fc_{answer_id}_{number}",
            "call_id": call.id,
            **places.get(call.name, {"name": call.name}),
            "arguments": encoded_arguments(call),
            "status": "completed",
        }
        for number, call in enumerate(reply.message.tool_calls)
    ]
    return items
