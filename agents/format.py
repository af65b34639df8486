"""Our messages and tools in the shape that the `renderers` package takes (OpenAI's chat format)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from renderers import Message as ChatMessage
from renderers import ToolSpec as ChatTool

from ..envs.base import Message, ToolSpec


def to_chat(messages: Sequence[Message]) -> list[ChatMessage]:
    """Messages as `renderers` takes them."""
    return [_chat(message) for message in messages]


def to_tools(tools: Sequence[ToolSpec]) -> list[ChatTool]:
    """Tools wrapped as `{"type": "function", "function": ...}`: the form that models saw in their own training."""
    wrapped = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]
    return cast(list[ChatTool], wrapped)


def _chat(message: Message) -> ChatMessage:
    chat: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        chat["tool_calls"] = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        chat |= {"tool_call_id": message.tool_call_id, "name": message.name}
    return cast(ChatMessage, chat)
