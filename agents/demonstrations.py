"""Demonstrations as tokens: exactly what a session would have recorded, had the policy said what the demonstration says.

Invariants:
- Loss is on the tokens that the policy would have sampled (content, calls, end of turn) and on no others.
- The context between turns comes from the same bridge that the session uses, so warm-up and rollouts see the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from renderers import Renderer
from renderers import ToolSpec as ChatTool

from ..envs.base import Message, Observation
from ..errors import PolicyError
from .format import to_chat, to_tools


class RenderedDemonstration(msgspec.Struct, frozen=True):
    """T tokens and, for each, whether it is imitated."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def render_demonstration(
    renderer: Renderer, opening: Observation, messages: Sequence[Message]
) -> RenderedDemonstration:
    """Render a conversation that ends with the assistant.

    Raises:
        PolicyError: the chat format cannot extend the conversation exactly, it does not end with the assistant, or the assistant
            speaks twice in a row.
    """
    if not messages or messages[0].role != "assistant" or messages[-1].role != "assistant":
        raise PolicyError("a demonstration must begin and end with the assistant")
    tools = to_tools(opening.tools) or None
    history, waiting = list(opening.messages), list[Message]()
    token_ids = renderer.render_ids(to_chat(history), tools=tools, add_generation_prompt=True)
    loss_mask = [False] * len(token_ids)
    said: list[int] = []
    prompt = token_ids
    for message in messages:
        if message.role != "assistant":
            waiting.append(message)
            continue
        if said and not waiting:
            raise PolicyError("the assistant speaks twice in a row, which no session would record")
        if waiting:
            bridged = renderer.bridge_to_next_turn(prompt, said, to_chat(waiting), tools=tools)
            if bridged is None or bridged.token_ids[: len(token_ids)] != token_ids:
                raise PolicyError("this chat format cannot extend the demonstration without rendering it again")
            history += waiting
            waiting = []
            loss_mask += [False] * (len(bridged.token_ids) - len(token_ids))
            prompt = bridged.token_ids
        said = _sampled(renderer, history, message, tools)
        token_ids = prompt + said
        loss_mask += [True] * len(said)
        history.append(message)
    return RenderedDemonstration(tuple(token_ids), tuple(loss_mask))


def _sampled(renderer: Renderer, history: list[Message], message: Message, tools: list[ChatTool] | None) -> list[int]:
    """The tokens that the policy samples to say `message`, the end of its turn included."""
    prompt = renderer.render_ids(to_chat(history), tools=tools, add_generation_prompt=True)
    rendered = renderer.render(to_chat([*history, message]), tools=tools)
    if rendered.token_ids[: len(prompt)] != prompt:
        raise PolicyError("this chat format renders the demonstration differently once it is answered")
    positions = range(len(prompt), len(rendered.token_ids))
    return [rendered.token_ids[i] for i in positions if rendered.sampled_mask[i]]
