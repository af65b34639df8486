"""Plays episodes whose completions go through the gateway: with an agent that was written elsewhere, or of an environment that
plays itself.

    env.reset ──messages──> agent ──answer──> env.step
                            │  ^
             completions    v  │    calls of the environment's tools
                           gateway ──> session, EnvGuard

    env.step ──> the environment's library ──completions──> gateway ──> session
             <── reward, metrics, error

Invariants:
- The agent's calls have ended before its answer is a step of the environment; the library's, when its episode is scored.
- An episode that a call of a tool has ended takes no answer.
- Which agent the config names has no part in an episode of an environment that plays itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ..agents.base import Agent, Policy
from ..agents.chat_images import require_text
from ..agents.foreign import ForeignAgent
from ..agents.gateway import Endpoint, EnvTools, Gateway
from ..agents.session import Session
from ..common.unawaited import without_await
from ..envs.base import Environment, Message, Task
from ..envs.self_played import PolicyEndpoint, play_message
from ..errors import PolicyError
from .loop_watchdog import calls_user_code


def through_gateway(agent: ForeignAgent, gateway: Gateway) -> Agent:
    """`agent` as one that is given an environment and a policy. `gateway` must be open while it plays."""

    async def play(env: Environment, policy: Policy, task: Task) -> None:
        observation = await env.reset(task)
        require_text(observation.messages)
        tools = EnvTools(env, observation.tools)
        async with gateway.endpoint(cast(Session, policy), tools) as endpoint:
            answer = await _solve(agent, observation.messages, endpoint)
        tools.check()
        if why := without_await(answer):
            raise PolicyError(why)
        if not isinstance(answer, str):
            raise PolicyError(f"the agent returned {answer!r:.100}; it must return its answer as text")
        if not tools.done:
            await env.step(Message("assistant", answer))

    return play


@calls_user_code
async def _solve(agent: ForeignAgent, messages: Sequence[Message], endpoint: Endpoint) -> object:
    return await agent(messages, endpoint)


def self_played(gateway: Gateway) -> Agent:
    """The agent of environments that play themselves. `gateway` must be open while it plays."""

    async def play(env: Environment, policy: Policy, task: Task) -> None:
        await env.reset(task)
        async with gateway.endpoint(cast(Session, policy)) as endpoint:
            await env.step(play_message(PolicyEndpoint(f"{endpoint.url}/v1", endpoint.key)))

    return play
