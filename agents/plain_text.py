"""Text of users and of tools is data: a control token that is spelled in it stays text, and opens, closes or calls nothing.

    "<|im_end|>" in a tool's result ──marked──> "<" MARK "|im_end|>" ──encoded apart──> ordinary tokens of the same characters

Invariants:
- The tokens of a text decode to that text. Text without a control token is encoded as if this module did not exist.
- Chat formats get a tokenizer that knows the mark; no mark ever becomes a token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from renderers import Message as ChatMessage
    from renderers import RenderedTokens, Renderer, ToolSpec

MARK = "\ufdd0"  # a noncharacter, which Unicode reserves for such uses inside a program
REPLACEMENT = "\ufffd"  # stands for marks that a text has itself
DATA = ("user", "tool")  # roles whose content is not the author's of the environment or the policy's


class MarkingTokenizer:
    """`tokenizer`, a transformers tokenizer, for texts with marks: what stands on both sides of one is encoded apart."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *arguments: Any, **options: Any) -> list[int]:
        pieces = text.split(MARK)
        return [token for piece in pieces for token in self._tokenizer.encode(piece, *arguments, **options)]

    def apply_chat_template(self, messages: Sequence[Any], *, tokenize: bool = True, **options: Any) -> Any:
        """As of a transformers tokenizer, for one conversation: its text, or the tokens of the text."""
        options |= {"tokenize": False, "return_dict": False}
        text = self._tokenizer.apply_chat_template(messages, **options)
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def __call__(self, text: str, **options: Any) -> Any:
        """As of a transformers tokenizer, for one text; offsets are those in the text with its marks."""
        if MARK not in text:
            return self._tokenizer(text, **options)
        encoded: dict[str, list[Any]] = {"input_ids": [], "offset_mapping": []}
        start = 0
        for piece in text.split(MARK):
            part = self._tokenizer(piece, **options)
            encoded["input_ids"] += part["input_ids"]
            encoded["offset_mapping"] += [(a + start, b + start) for a, b in part.get("offset_mapping", ())]
            start += len(piece) + len(MARK)
        return encoded


class PlainTextRenderer:
    """`renderer`, which encodes by a `MarkingTokenizer` of `tokenizer`, with the content of `DATA` messages as plain text."""

    def __init__(self, renderer: Renderer, tokenizer: Any) -> None:
        self._renderer = renderer
        # Some vocabularies add runs of blanks, which are text.
        controls = [token for token in tokenizer.get_added_vocab() if len(token) > 1 and not token.isspace()]
        # By lookahead, so that also control tokens that overlap are found.
        self._controls = re.compile("|".join(f"(?={re.escape(token)})" for token in controls) or r"(?!)")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """See `Renderer.render`."""
        return self._renderer.render(self._marked(messages), tools=tools, add_generation_prompt=add_generation_prompt)

    def render_ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """See `Renderer.render_ids`."""
        return self._renderer.render_ids(
            self._marked(messages), tools=tools, add_generation_prompt=add_generation_prompt
        )

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[ChatMessage],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """See `Renderer.bridge_to_next_turn`."""
        new = self._marked(new_messages)
        return self._renderer.bridge_to_next_turn(previous_prompt_ids, previous_completion_ids, new, tools=tools)

    def _marked(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        return [self._marked_message(message) if message["role"] in DATA else message for message in messages]

    def _marked_message(self, message: ChatMessage) -> ChatMessage:
        content: Any = message["content"]
        if isinstance(content, str):
            return cast("ChatMessage", {**message, "content": self._marked_text(content)})
        parts = [{**part, "text": self._marked_text(part["text"])} if "text" in part else part for part in content]
        return cast("ChatMessage", {**message, "content": parts})

    def _marked_text(self, text: str) -> str:
        if not (MARK in text or self._controls.search(text)):
            return text
        text = text.replace(MARK, REPLACEMENT)
        inside = [found.start() + 1 for found in self._controls.finditer(text)]
        return MARK.join(text[a:b] for a, b in zip([0, *inside], [*inside, len(text)], strict=True))
