"""The built-in agents."""

from __future__ import annotations

from ..envs.base import Environment, Task
from .base import Policy


async def tool_calling(env: Environment, policy: Policy, task: Task) -> float:
    """Reply to the environment, with its tools, until the episode is done."""
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
    """One question, one reply, no tools; messages that follow the reply are ignored."""
    observation = await env.reset(task)
    reply = await policy.chat(observation.messages)
    return (await env.step(reply)).reward
