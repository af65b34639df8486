"""The agent contract: one coroutine that plays one episode, the same for training, evaluation and debugging.

Invariants:
- An agent uses a `Policy` and an `Environment`; it never sees an engine, a version or a socket.
- Every token that the policy samples is recorded with its log-prob and its policy version.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from ..buffer.trajectory import VersionSpan
from ..common.routed_experts import RoutedExperts
from ..envs.base import Environment, Message, Task, ToolSpec

FinishReason = Literal["stop", "length", "abort"]


class RequestTiming(msgspec.Struct, frozen=True):
    """What a completion took, see the fields of `Turn` of the same names."""

    asked: float
    queued_s: float
    first_s: float
    decode_s: float
    cached: int | None
    replica: str
    temperature: float

    def then(self, later: RequestTiming) -> RequestTiming:
        """Of a completion that came in two parts."""
        return RequestTiming(
            self.asked,
            self.queued_s + later.queued_s,
            self.first_s + later.first_s,
            self.decode_s + later.decode_s,
            self.cached,
            later.replica,
            self.temperature,
        )


class Completion(msgspec.Struct, frozen=True):
    """The n tokens that an engine sampled after a prompt, the stop token included if there was one."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # in nats, under the distribution that was sampled from
    version_spans: tuple[VersionSpan, ...]  # half-open ranges that cover the n tokens in order
    finish_reason: FinishReason  # `abort`: the request was interrupted and may be continued
    timing: RequestTiming | None = None  # None where it was not measured, or no token came
    experts: RoutedExperts | None = (
        None  # by position in prompt and completion; None where the server does not record them
    )


class Decode(Protocol):
    """The text of token ids, with special tokens or without them."""

    def __call__(self, token_ids: Sequence[int], /, *, special: bool = True) -> str: ...


Generate = Callable[..., Awaitable[Completion]]
"""How a session samples: token ids, the number of tokens to sample at most and, of a prompt with images, a sequence of
`PromptImage` in, a completion out."""


class ContextExhausted(Exception):
    """The context or token budget of the episode is exhausted; the episode ends `truncated`."""


class SampleRequest(msgspec.Struct, frozen=True):
    """How to sample replies to a conversation."""

    max_tokens: Annotated[int, Meta(ge=1)] | None = None  # of one reply; the run's limit applies where it is lower
    stop: tuple[
        str, ...
    ] = ()  # texts that end a reply: with the first token that completes one; what follows has no loss
    n: Annotated[int, Meta(ge=1)] = 1  # replies, each of its own completion
    trained: bool = True  # False: answered by the policy, without loss


class Reply(msgspec.Struct, frozen=True):
    """One sampled reply, as the policy's message and as what a client shows of it."""

    message: Message
    content: str  # of the message; of calls that could not be read their text; without what stands after the stop text
    reasoning: str  # thinking, where the chat format has it
    prompt_tokens: int
    completion: Completion  # up to the token that completed the stop text
    stop: str = ""  # the stop text that ended it


class Policy(Protocol):
    """The model as an agent sees it."""

    async def chat(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Message:
        """Reply to a conversation. `messages` is the whole history; the session renders only the new messages. Raises
        ContextExhausted where it leaves no room for another token."""
        ...

    async def generate(self, token_ids: Sequence[int], max_tokens: int | None = None) -> Completion:
        """Continue raw token ids by at most `max_tokens`; the run's limit applies where it is lower. A prompt that does not begin
        with the tokens of an earlier call opens a new branch."""
        ...


Agent = Callable[[Environment, Policy, Task], Awaitable[float | None]]
"""Plays one episode. The rewards are those that `env.step` returned. An agent returns their sum, which is checked, or None."""
