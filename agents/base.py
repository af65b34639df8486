"""The agent contract: one coroutine that plays one episode, the same for training, evaluation and debugging.

Invariants:
- An agent uses a `Policy` and an `Environment`; it never sees an engine, a version or a socket.
- Every token that the policy samples is recorded with its log-prob and its policy version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, Protocol

import msgspec

from ..buffer.trajectory import VersionSpan
from ..envs.base import Environment, Message, Task, ToolSpec

FinishReason = Literal["stop", "length", "abort"]


class Completion(msgspec.Struct, frozen=True):
    """The n tokens that an engine sampled after a prompt, the stop token included if there was one."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # in nats, under the distribution that was sampled from
    version_spans: tuple[VersionSpan, ...]  # half-open ranges that cover the n tokens in order
    finish_reason: FinishReason  # `abort`: the request was interrupted and may be continued


Generate = Callable[[Sequence[int], int], Awaitable[Completion]]
"""How a session samples: token ids and the number of tokens to sample at most in, a completion out."""


class ContextExhausted(Exception):
    """The context or token budget of the episode is exhausted; the episode ends `truncated`."""


class Policy(Protocol):
    """The model as an agent sees it."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Reply to a conversation. `messages` is the whole history; the session renders only the new messages. Raises
        ContextExhausted where it leaves no room for another token."""
        ...

    async def generate(self, token_ids: Sequence[int]) -> Completion:
        """Continue raw token ids. A prompt that does not extend the current branch opens a new one."""
        ...


Agent = Callable[[Environment, Policy, Task], Awaitable[float]]
"""Plays one episode and returns its return, the sum of the step rewards."""
