"""The chat format of models whose family `renderers` does not know: the chat template that comes with the tokenizer.

    before:  user "a", assistant TEXT             <user>a<end><assistant>TEXT|<end>
    after:   the same, and the new messages       <user>a<end><assistant>TEXT|<end><user>new<end><assistant>
                                                                             what a later turn adds begins at |

Invariants:
- A turn ends with the token that the template writes after an assistant's text, whatever the tokenizer calls its end of text.
- A later turn extends what was sampled, token by token. Where a template shows earlier messages in another way once there are later
  ones, there is no extension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from renderers import ChatTemplateTokenizer, RenderedTokens, ToolSpec
from renderers import Message as ChatMessage
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

from .plain_text import MarkingTokenizer

TEXT = "\ufdd1"  # a noncharacter that stands for an assistant's text
EXCHANGE = cast(list[ChatMessage], [{"role": "user", "content": "a"}, {"role": "assistant", "content": TEXT}])
CALL = "<tool_call>"  # how Qwen2.5 and Hermes write calls, and so do their templates


class ChatTemplateRenderer(DefaultRenderer):
    """Over `tokenizer`, one of transformers; its template gets `thinking` as `enable_thinking` and `thinking`. Tool calls are read
    where the template writes them as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`. Raises ValueError where the
    tokenizer has no template, or one that cannot render a question and its answer."""

    def __init__(self, tokenizer: Any, *, thinking: bool) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        parser = "qwen3" if CALL in str(tokenizer.chat_template) and CALL in tokenizer.get_vocab() else None
        switches: dict[str, Any] = {"enable_thinking": thinking, "thinking": thinking}
        marking = cast(ChatTemplateTokenizer, MarkingTokenizer(tokenizer))
        super().__init__(marking, DefaultRendererConfig(tool_parser=parser, **switches))
        exchange = self._text(EXCHANGE)
        if TEXT not in exchange:
            raise ValueError("its chat template does not show what an assistant says")
        special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        ends = [token for token in self._encode(exchange.partition(TEXT)[2]) if token in special]
        self._turn_end: int | None = ends[0] if ends else tokenizer.eos_token_id

    def get_stop_token_ids(self) -> list[int]:
        """The end of a turn, and the tokenizer's end of text."""
        ends = (self._turn_end, self._tokenizer.eos_token_id)
        return list(dict.fromkeys(end for end in ends if end is not None))

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """All tokens, each with index -1: a template does not say which message they are of. `sampled_mask` is of the last message,
        where it is an assistant's."""
        chat = list(messages)
        ids = self.render_ids(chat, tools=tools, add_generation_prompt=add_generation_prompt)
        mask = [False] * len(ids)
        if chat[-1]["role"] == "assistant" and not add_generation_prompt and self._turn_end in ids:
            begin = len(self.render_ids(chat[:-1], tools=tools, add_generation_prompt=True))
            end = len(ids) - ids[::-1].index(self._turn_end)
            mask[begin:end] = [True] * (end - begin)
        return RenderedTokens(token_ids=ids, message_indices=[-1] * len(ids), sampled_mask=mask)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: Sequence[ChatMessage],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """See `Renderer.bridge_to_next_turn`. A completion that was cut gets the end of its turn."""
        try:
            exchange = self._text(EXCHANGE, tools=tools)
            longer = self._text([*EXCHANGE, *new_messages], tools=tools, add_generation_prompt=True)
        except Exception:  # templates refuse conversations in ways of their own; the session renders the whole one
            return None
        if not longer.startswith(exchange.rstrip()):
            return None
        added = self._encode(longer[exchange.rindex(TEXT) + len(TEXT) :])
        if added[:1] != [self._turn_end]:
            return None
        if previous_completion_ids and previous_completion_ids[-1] in self.get_stop_token_ids():
            if previous_completion_ids[-1] != self._turn_end:
                return None
            added = added[1:]
        return RenderedTokens(token_ids=[*previous_prompt_ids, *previous_completion_ids, *added])

    def _text(self, messages: Sequence[ChatMessage], **options: Any) -> str:
        options |= self.config.model_extra or {}
        return self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
