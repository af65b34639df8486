"""Agents that were written elsewhere: they get messages and an endpoint, know neither environment nor policy, and return an answer.

async def solve(messages, endpoint) -> str
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeGuard

from ..envs.base import Message
from .base import Agent
from .gateway.endpoint import Endpoint

ForeignAgent = Callable[[Sequence[Message], Endpoint], Awaitable[str]]
"""Answers the opening messages of an environment with the policy at `endpoint`. The environment takes the answer as a step."""

SIGNATURES = "`async def agent(env, policy, task)` or `async def agent(messages, endpoint) -> str`"
OURS = {"env", "environment", "policy", "session", "task"}  # parameters of an agent that is given the environment


def is_agent(function: Callable[..., Any]) -> TypeGuard[Agent]:
    """Whether it takes an environment, a policy and a task."""
    return len(_parameters(function)) == 3


def is_foreign(function: Callable[..., Any]) -> TypeGuard[ForeignAgent]:
    """Whether it takes messages and an endpoint."""
    names = _parameters(function)
    return len(names) == 2 and not OURS & set(names)


def _parameters(function: Callable[..., Any]) -> list[str]:
    """The parameters that it must be given; none where it cannot be given them by position alone."""
    parameters = inspect.signature(function).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_position = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in required)
    return [p.name for p in required] if by_position else []
