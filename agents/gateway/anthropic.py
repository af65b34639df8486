"""The gateway's dialect of Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...envs.base import JSON, Message, ToolCall
from ..base import Reply, SampleRequest
from .dialect import (
    Answer,
    CompletionRequest,
    Content,
    Count,
    Part,
    encoded_arguments,
    event,
    ignored_of,
    named,
    parse,
    role_of,
    stops_of,
    text_of,
    text_of_part,
    tool_of,
)

NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
}
"""Fields that are accepted and not followed, with the values that ask for nothing."""

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class _AnthropicMessage(msgspec.Struct):
    role: str
    content: str | list[Part]


class _AnthropicTool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: JSON | None = None
    type: str | None = None


class _MessagesBody(msgspec.Struct):
    model: str
    messages: Annotated[list[_AnthropicMessage], Meta(min_length=1)]
    max_tokens: Count
    system: Content = None
    tools: list[_AnthropicTool] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    tool_choice: Any = None
    thinking: Any = None


class AnthropicDialect:
    """POST /v1/messages."""

    path = "/messages"

    def read(self, body: bytes) -> CompletionRequest:
        """See `Dialect.read`."""
        asked = parse(body, _MessagesBody, "messages request")
        messages = [Message("system", text_of(asked.system, "system"))] if asked.system else []
        for number, message in enumerate(asked.messages):
            messages += _messages(message, f"messages[{number}]")
        tools = asked.tools or []
        specs = [
            tool_of(tool.name, tool.description, tool.input_schema, f"tools[{number}]")
            for number, tool in enumerate(tools)
            if tool.input_schema is not None
        ]
        ignored = [f"tools.{t.type or t.name}" for t in tools if t.input_schema is None]  # run by Anthropic's servers
        return CompletionRequest(
            asked.model,
            named(messages),
            tuple(specs),
            SampleRequest(asked.max_tokens, stops_of(asked.stop_sequences, "stop_sequences")),
            stream=bool(asked.stream),
            ignored=(*ignored_of(asked, NEUTRAL), *ignored),
        )

    def write(self, request: CompletionRequest, answer: Answer) -> JSON:
        """See `Dialect.write`."""
        (reply,) = answer.replies
        content: list[JSON] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content or not reply.message.tool_calls:
            content.append({"type": "text", "text": reply.content})
        calls = reply.message.tool_calls
        content += [{"type": "tool_use", "id": c.id, "name": c.name, "input": c.arguments} for c in calls]
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": content,
            "stop_reason": _stop_reason(reply),
            "stop_sequence": reply.stop or None,
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": len(reply.completion.token_ids)},
        }

    def events(self, request: CompletionRequest, answer: Answer) -> Iterator[bytes]:
        """See `Dialect.events`."""
        whole = self.write(request, answer)
        begun = {
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**whole["usage"], "output_tokens": 0},
        }
        yield _event("message_start", message={**whole, **begun})
        calls = iter(answer.replies[0].message.tool_calls)
        for index, block in enumerate(whole["content"]):
            if block["type"] == "tool_use":
                empty, delta = (
                    {"input": {}},
                    {"type": "input_json_delta", "partial_json": encoded_arguments(next(calls))},
                )
            else:
                field = block["type"]
                empty, delta = {field: ""}, {"type": f"{field}_delta", field: block[field]}
            yield _event("content_block_start", index=index, content_block={**block, **empty})
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        yield _event("message_delta", delta=ended, usage={"output_tokens": whole["usage"]["output_tokens"]})
        yield _event("message_stop")

    def error(self, status: int, message: str, code: str) -> JSON:
        """See `Dialect.error`."""
        return {"type": "error", "error": {"type": ERRORS.get(status, "api_error"), "message": message}}

    def error_event(self, status: int, message: str, code: str) -> bytes:
        """See `Dialect.error_event`."""
        return event(self.error(status, message, code), "error")


def _messages(message: _AnthropicMessage, place: str) -> list[Message]:
    """The results of tools come first: they answer the assistant's calls."""
    role: Any = role_of(message.role, ("user", "assistant", "system"), f"{place}.role")
    if isinstance(message.content, str):
        return [Message(role, message.content)]
    found, calls, texts = list[Message](), list[ToolCall](), list[str]()
    for number, part in enumerate(message.content):
        where = f"{place}.content[{number}]"
        if part.type == "tool_result":
            found.append(Message("tool", text_of(part.content, f"{where}.content"), (), part.tool_use_id))
        elif part.type == "tool_use":
            calls.append(ToolCall(part.name, part.input, part.id))
        else:
            texts.append(text_of_part(part, where))
    return [*found, Message(role, "".join(texts), tuple(calls))] if texts or calls or not found else found


def _stop_reason(reply: Reply) -> str:
    if reply.message.tool_calls:
        return "tool_use"
    if reply.stop:
        return "stop_sequence"
    return "max_tokens" if reply.completion.finish_reason == "length" else "end_turn"


def _event(name: str, **data: Any) -> bytes:
    return event({"type": name, **data}, name)
