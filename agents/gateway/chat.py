"""The gateway's dialect of OpenAI's Chat Completions API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ...envs.base import JSON, Message, ToolCall, ToolSpec
from ...errors import PolicyError
from ..base import Reply, SampleRequest
from .dialect import (
    MOST_REPLIES,
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
    stops_of,
    text_of,
    tool_of,
)

TOOL_FORM = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}'
Role = Literal["system", "user", "assistant", "tool"]
ROLES: dict[str, Role] = {"developer": "system", "function": "tool"}

NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "seed": (),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
}
"""Fields that are accepted and not followed, with the values that ask for nothing."""


class _Function(msgspec.Struct):
    name: str
    arguments: str | JSON = {}
    description: str | None = None
    parameters: JSON | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _ChatMessage(msgspec.Struct):
    role: str
    content: Content = None
    tool_calls: list[_Call] | None = None
    function_call: Any = None
    tool_call_id: str | None = None
    name: str | None = None


class _Tool(msgspec.Struct):
    type: str = "function"
    function: _Function | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class _Body(msgspec.Struct):
    model: str
    messages: Annotated[list[_ChatMessage], Meta(min_length=1)]
    tools: list[_Tool] | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_REPLIES)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    logprobs: bool | None = None
    modalities: list[str] | None = None
    functions: Any = None
    temperature: Any = None
    top_p: Any = None
    seed: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None  # this and the next four are vLLM's and SGLang's
    top_k: Any = None
    min_p: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    top_logprobs: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    response_format: Any = None


class ChatDialect:
    """POST /v1/chat/completions."""

    path = "/chat/completions"

    def read(self, body: bytes) -> CompletionRequest:
        """See `Dialect.read`."""
        asked = parse(body, _Body, "chat completion request")
        if asked.functions:
            raise PolicyError("functions: deprecated and not supported; use tools")
        if asked.modalities not in (None, ["text"]):
            raise PolicyError(f"modalities: {str(asked.modalities)[:SHOWN]} is not supported; only text is")
        specs, ignored = _tools(asked.tools or [])
        stops = stops_of(asked.stop, "stop")
        return CompletionRequest(
            asked.model,
            named(_message(message, f"messages[{number}]") for number, message in enumerate(asked.messages)),
            tuple(specs),
            SampleRequest(asked.max_completion_tokens or asked.max_tokens, stops, asked.n or 1),
            stream=bool(asked.stream),
            usage_in_stream=asked.stream_options is not None and bool(asked.stream_options.include_usage),
            logprobs=bool(asked.logprobs),
            ignored=(*ignored_of(asked, NEUTRAL), *ignored),
        )

    def write(self, request: CompletionRequest, answer: Answer) -> JSON:
        """See `Dialect.write`."""
        choices = [
            {
                "index": index,
                "finish_reason": _finish_reason(reply),
                "message": _written(reply),
                "logprobs": _logprobs(answer, index) if request.logprobs else None,
            }
            for index, reply in enumerate(answer.replies)
        ]
        return {**_head(answer, "chat.completion"), "choices": choices, "usage": _usage(answer)}

    def events(self, request: CompletionRequest, answer: Answer) -> Iterator[bytes]:
        """See `Dialect.events`."""
        head = _head(answer, "chat.completion.chunk")

        def chunk(index: int, delta: JSON, finish_reason: str | None = None, logprobs: JSON | None = None) -> bytes:
            choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
            return event({**head, "choices": [choice]})

        for index, reply in enumerate(answer.replies):
            message = _written(reply)
            calls, content = message.pop("tool_calls", []), message.pop("content")
            yield chunk(index, {**message, "content": ""})
            logprobs = _logprobs(answer, index) if request.logprobs else None
            if content:
                yield chunk(index, {"content": content}, None, logprobs)
            for number, call in enumerate(calls):
                yield chunk(index, {"tool_calls": [{"index": number, **call}]})
            yield chunk(index, {}, _finish_reason(reply), None if content else logprobs)
        if request.usage_in_stream:
            yield event({**head, "choices": [], "usage": _usage(answer)})
        yield b"data: [DONE]\n\n"

    def error(self, status: int, message: str, code: str) -> JSON:
        """See `Dialect.error`."""
        return openai_error(status, message, code)

    def error_event(self, status: int, message: str, code: str) -> bytes:
        """See `Dialect.error_event`."""
        return event(self.error(status, message, code), "error")


def _tools(tools: Sequence[_Tool]) -> tuple[list[ToolSpec], list[str]]:
    """The functions, and the types of other tools."""
    specs, ignored = list[ToolSpec](), list[str]()
    for number, tool in enumerate(tools):
        place = f"tools[{number}].function"
        if (function := tool.function) is not None:
            specs.append(tool_of(function.name, function.description, function.parameters, place))
        elif tool.type == "function":
            raise PolicyError(f"{place}: missing; a tool is {TOOL_FORM}")
        else:
            ignored.append(f"tools.{tool.type}")
    return specs, ignored


def _message(message: _ChatMessage, place: str) -> Message:
    if message.function_call is not None:
        raise PolicyError(f"{place}.function_call: deprecated and not supported; use tool_calls")
    known = role_of(message.role, ("system", "developer", "user", "assistant", "tool", "function"), f"{place}.role")
    role: Any = ROLES.get(known, known)
    calls = [
        ToolCall(
            call.function.name, arguments_of(call.function.arguments, f"{place}.tool_calls[{number}].function"), call.id
        )
        for number, call in enumerate(message.tool_calls or ())
    ]
    return Message(
        role,
        text_of(message.content, f"{place}.content"),
        tuple(calls),
        message.tool_call_id or "",
        message.name or "" if role == "tool" else "",
    )


def _written(reply: Reply) -> JSON:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": encoded_arguments(call)}}
        for call in reply.message.tool_calls
    ]
    message: JSON = {"role": "assistant", "content": reply.content or (None if calls else "")}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    return {**message, "tool_calls": calls} if calls else message


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.message.tool_calls else reply.completion.finish_reason


def _head(answer: Answer, kind: str) -> JSON:
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: Answer) -> JSON:
    prompt = answer.replies[0].prompt_tokens
    sampled = sum(len(reply.completion.token_ids) for reply in answer.replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _logprobs(answer: Answer, index: int) -> JSON:
    logprobs = answer.replies[index].completion.logprobs
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(answer.token_texts[index], logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}
