"""From the config's `agent` section to the agent coroutine and the chat format.

Invariants:
- `renderers` imports a client of OpenAI's, most of a second of processor time: only what loads a chat format imports it.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

from ..common.image_processor import ImageProcessor
from ..common.targets import load_target
from ..errors import ConfigError
from . import builtin
from .base import Agent
from .foreign import SIGNATURES, ForeignAgent, is_agent, is_foreign
from .forgotten_await import forgotten_await
from .plain_text import MarkingTokenizer, PlainTextRenderer

if TYPE_CHECKING:
    from renderers import Renderer, RendererConfig
    from renderers.base import Tokenizer

BUILTIN: dict[str, Agent] = {"tool_calling": builtin.tool_calling, "single_turn": builtin.single_turn}


def load_agent(kind: str) -> Agent | ForeignAgent:
    """The built-in agent `kind`, or the user's, as `package.module:coroutine`; `is_foreign` tells the two signatures apart. Raises
    ConfigError naming `agent.kind`."""
    if kind in BUILTIN:
        return BUILTIN[kind]
    if ":" not in kind:
        raise ConfigError(f"agent.kind: {kind!r} is not {', '.join(BUILTIN)} or of the form package.module:coroutine")
    agent = load_target("agent.kind", kind)
    if not inspect.iscoroutinefunction(agent):
        raise ConfigError(f"agent.kind: {kind} is not a coroutine; write {SIGNATURES}")
    if is_agent(agent) and (why := forgotten_await(agent)):
        raise ConfigError(f"agent.kind: {kind}: {why}")
    if is_agent(agent) or is_foreign(agent):
        return agent
    raise ConfigError(f"agent.kind: {kind} takes {inspect.signature(agent)}; write {SIGNATURES}")


def load_renderer(name: str, tokenizer: Any, *, thinking: bool) -> Renderer:
    """The chat format `name` over `tokenizer` (a transformers tokenizer); `thinking` applies to formats with such a switch.
    `auto` is that of the model's name on the hub, `default` the tokenizer's own chat template. Sampled thinking stays in the
    context of later turns: the policy saw it when it acted. Control tokens in the text of users and tools stay text
    (`plain_text.py`). Raises ConfigError naming `agent.renderer` where the name is unknown, or the tokenizer has not the special
    tokens of that format."""
    from renderers import DefaultRendererConfig, config_from_name, create_renderer
    from renderers.configs import Qwen3VLRendererConfig

    from .chat_template import ChatTemplateRenderer
    from .image_renderer import ImageRenderer

    try:
        config = config_from_name(name)
    except ValueError as error:
        raise ConfigError(f"agent.renderer: {error}") from error
    try:
        if config is None:
            config = cast(Any, create_renderer(tokenizer)).config  # each has one
        if isinstance(config, DefaultRendererConfig):
            return cast("Renderer", PlainTextRenderer(ChatTemplateRenderer(tokenizer, thinking=thinking), tokenizer))
        switch = type(config).template_field_names() & {"enable_thinking", "thinking"}
        config = type(config)(thinking_retention="all", **dict.fromkeys(switch, thinking))
        marking = cast("Tokenizer", MarkingTokenizer(tokenizer))
        create_renderer(tokenizer, cast("RendererConfig", config))  # checks the tokenizer, by its type too
        if isinstance(config, Qwen3VLRendererConfig):
            # Its own choice of a processor needs torchvision, and gives other numbers where that is installed.
            config = Qwen3VLRendererConfig(thinking_retention="all")
            made = ImageRenderer(marking, config, processor=ImageProcessor(tokenizer.name_or_path))
            return cast("Renderer", PlainTextRenderer(made, tokenizer))
        return cast("Renderer", PlainTextRenderer(create_renderer(marking, cast("RendererConfig", config)), tokenizer))
    except Exception as error:  # formats check their tokenizer in different ways, often by assertion
        raise ConfigError(f"agent.renderer: {name!r} does not fit the tokenizer of this model: {error}") from error
