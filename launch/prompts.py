"""Prompts that are too long for an episode, and the tasks of data sets that have them.

Invariants:
- Every process that plays tasks leaves out the same ones: it follows from the data, the chat format, the tokenizer and
  `agent.max_tokens`, and is computed again where it is needed. Nothing is stored.
- An agent of the user's own makes its own prompts: then no task is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..agents.session import to_chat, to_tools
from ..configs.checks import BUILT_IN_AGENTS
from ..configs.schema import Agent

if TYPE_CHECKING:
    from renderers import Renderer

    from ..envs import EnvPart, Observation


def prompt_tokens(renderer: Renderer, agent: Agent, opening: Observation) -> int:
    """Tokens of the first prompt that a built-in agent makes of an opening."""
    tools = to_tools(opening.tools) if agent.kind == "tool_calling" else None
    return len(renderer.render_ids(to_chat(opening.messages), tools=tools, add_generation_prompt=True))


def leave_out_long_prompts(parts: Sequence[EnvPart], renderer: Renderer, agent: Agent) -> dict[str, int]:
    """Leave out the tasks whose prompt has `agent.max_tokens` tokens or more, in the environments that know all their prompts
    beforehand; returns how many, by environment. Raises ConfigError where none is left."""
    from ..envs.dataset.source import DatasetSource

    if agent.kind not in BUILT_IN_AGENTS:
        return {}

    def fits(opening: Observation) -> bool:
        return prompt_tokens(renderer, agent, opening) < agent.max_tokens

    sources = {part.name: part.source for part in parts if isinstance(part.source, DatasetSource)}
    return {name: source.leave_out_long_prompts(fits, agent.max_tokens) for name, source in sources.items()}
