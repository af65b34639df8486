"""The agents that come with Slipstream."""

from __future__ import annotations

from ..envs.base import Environment, Task
from .base import Policy


async def tool_calling(env: Environment, policy: Policy, task: Task) -> float:
    """Answer the environment, with its tools on offer, until it says that the episode is over."""
    observation = await env.reset(task)
    messages = list(observation.messages)
    total = 0.0
    while True:
        reply = await policy.chat(messages, observation.tools)
        result = await env.step(reply)
        total += result.reward
        if result.done:
            return total
        messages += [reply, *result.messages]


async def single_turn(env: Environment, policy: Policy, task: Task) -> float:
    """One question, one answer, no tools; whatever the environment would say next is not asked for."""
    observation = await env.reset(task)
    reply = await policy.chat(observation.messages)
    return (await env.step(reply)).reward
