"""Plays episodes of environments that own their loop.

    env.step ──> the environment's library ──completions──> gateway ──> session
             <── reward, metrics, error

Invariants:
- The library's calls have ended when its episode is scored: the endpoint is closed with it.
- Which agent the config names has no part in such an episode.
"""

from __future__ import annotations

from typing import cast

from ..agents.base import Agent, Policy
from ..agents.gateway import Gateway
from ..agents.session import Session
from ..envs.base import Environment, Task
from ..envs.self_played import PolicyEndpoint, play_message


def self_played(gateway: Gateway) -> Agent:
    """The agent of environments that play themselves. `gateway` must be open while it plays."""

    async def play(env: Environment, policy: Policy, task: Task) -> None:
        await env.reset(task)
        async with gateway.endpoint(cast(Session, policy)) as endpoint:
            await env.step(play_message(PolicyEndpoint(f"{endpoint.url}/v1", endpoint.key)))

    return play
