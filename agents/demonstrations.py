"""Demonstrations as tokens: exactly what a session would have recorded, had the policy sampled the demonstration.

Invariants:
- Loss is on the tokens that the policy would have sampled (content, calls, end of turn) and on no others.
- Context between turns is rendered by the bridge that the session uses, so warm-up and rollouts see the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ..common.images import PlacedImage
from ..envs.base import Message, Observation
from ..errors import PolicyError
from .chat_images import placed_images
from .session import to_chat, to_tools

if TYPE_CHECKING:
    from renderers import Renderer
    from renderers import ToolSpec as ChatTool

Demonstration = tuple[str, Observation, Sequence[Message]]
"""Where a conversation is from, the observation that opens it, and its messages from the assistant's first on."""


class RenderedDemonstration(msgspec.Struct, frozen=True):
    """T tokens and, for each, whether it carries loss; the images in them, and their files by digest."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    images: tuple[PlacedImage, ...] = ()
    image_files: dict[str, bytes] = {}


def render_demonstration(
    renderer: Renderer, opening: Observation, messages: Sequence[Message]
) -> RenderedDemonstration:
    """Render a conversation. Raises PolicyError where the chat format cannot extend it exactly, it does not begin and end with the
    assistant, or the assistant speaks twice in a row."""
    if not messages or messages[0].role != "assistant" or messages[-1].role != "assistant":
        raise PolicyError("a demonstration must begin and end with the assistant")
    tools = to_tools(opening.tools)
    history, pending = list(opening.messages), list[Message]()
    opened = renderer.render(to_chat(history), tools=tools, add_generation_prompt=True)
    images, files = placed_images(opened, history)
    token_ids = opened.token_ids
    loss_mask = [False] * len(token_ids)
    sampled: list[int] = []
    prompt = token_ids
    for message in messages:
        if message.role != "assistant":
            pending.append(message)
            continue
        if sampled and not pending:
            raise PolicyError("the assistant speaks twice in a row, which no session would record")
        if pending:
            bridged = renderer.bridge_to_next_turn(prompt, sampled, to_chat(pending), tools=tools)
            if bridged is None or bridged.token_ids[: len(token_ids)] != token_ids:
                raise PolicyError("this chat format cannot extend the demonstration without rendering it again")
            more, seen = placed_images(bridged, pending)
            images, files = (*images, *more), {**files, **seen}
            history += pending
            pending = []
            loss_mask += [False] * (len(bridged.token_ids) - len(token_ids))
            prompt = bridged.token_ids
        sampled = _sampled(renderer, history, message, tools)
        token_ids = prompt + sampled
        loss_mask += [True] * len(sampled)
        history.append(message)
    return RenderedDemonstration(tuple(token_ids), tuple(loss_mask), images, files)


def _sampled(renderer: Renderer, history: list[Message], message: Message, tools: list[ChatTool] | None) -> list[int]:
    """The tokens that the policy samples for `message`, including the end of its turn."""
    prompt = renderer.render_ids(to_chat(history), tools=tools, add_generation_prompt=True)
    rendered = renderer.render(to_chat([*history, message]), tools=tools)
    if rendered.token_ids[: len(prompt)] != prompt:
        raise PolicyError("this chat format renders the demonstration differently once it is answered")
    positions = range(len(prompt), len(rendered.token_ids))
    return [rendered.token_ids[i] for i in positions if rendered.sampled_mask[i]]
