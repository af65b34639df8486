"""Checks of what a replica answers: each completion is checked where it arrives, before any of its tokens counts.

    chunks ──> CompletionStream ──> check_completion (request, vocabulary) ──> VersionClock (does this version exist?) ──> caller

Invariants:
- A reply is compared with what is known without the replica: the request, the vocabulary, and the versions that the learner made.
- A reply that is false in one point is refused as a whole, as a FalseReply: none of its tokens is accepted.
- A check costs a few passes in C over lists: no Python code runs for each token.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence

from ...agents.base import Completion
from ...buffer.trajectory import LOGPROB_LIMIT
from .base import FalseReply, SamplingParams

IMPOSSIBLE = -9999.0  # what servers report for a log-prob that is minus infinity or not a number
VERSION_DIGITS = 10  # of a version: it is an int32 in the learner


class VersionClock:
    """The newest policy version that exists, as far as this process knows. `ask` returns the newest of the learner now; it is asked
    only when a reply names a newer one, once for all replies that wait. Without it no newer version will ever exist."""

    def __init__(self, newest: int = 0, ask: Callable[[], Awaitable[int]] | None = None) -> None:
        self.newest = newest
        self._ask = ask
        self._asking = asyncio.Lock()

    async def exists(self, version: int) -> bool:
        """Whether the learner has made `version`. Raises what `ask` raises."""
        if version > self.newest and self._ask is not None:
            async with self._asking:
                if version > self.newest:
                    self.newest = max(self.newest, await self._ask())
        return version <= self.newest


def check_completion(
    name: str, done: Completion, sampling: SamplingParams, vocab_size: int, oldest: int | None
) -> Completion:
    """`done`, a completion or the part of one that arrived from replica `name`; `oldest` is a version that the replica had proven
    before it got the request. Raises FalseReply."""
    tokens, spans = done.token_ids, done.version_spans
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        foreign = next(token for token in tokens if not 0 <= token < vocab_size)
        raise FalseReply(f"{name}: it sampled token id {foreign}, outside the vocabulary, 0 to {vocab_size - 1}")
    check_count(name, len(tokens), sampling)
    check_logprobs(name, done.logprobs)
    versions = [span.version for span in spans]
    if versions != sorted(versions):
        raise FalseReply(f"{name}: the versions of a reply fall: {versions[:10]}")
    if versions and oldest is not None and versions[0] < oldest:
        raise FalseReply(f"{name}: it sampled with version {versions[0]}, and had taken version {oldest} before")
    if done.finish_reason != "abort" and not tokens:
        raise FalseReply(f"{name}: a completion ended by {done.finish_reason!r} without a token")
    if done.finish_reason == "stop" and tokens[-1] not in sampling.stop_token_ids:
        raise FalseReply(f"{name}: it stopped at token id {tokens[-1]}, which is no stop token of the request")
    return done


def check_count(name: str, tokens: int, sampling: SamplingParams) -> None:
    """Raises FalseReply where a reply has more tokens than its request allows."""
    if tokens > sampling.max_tokens:
        raise FalseReply(f"{name}: it sent {tokens} tokens of the {sampling.max_tokens} that were asked for")


def check_logprobs(name: str, logprobs: Sequence[float]) -> None:
    """Raises FalseReply where one is no log-prob in nats: not finite, or positive."""
    if not logprobs:
        return
    # A sum with an infinity or a NaN is not finite; without one, minimum and maximum are reliable.
    if not (math.isfinite(sum(logprobs)) and min(logprobs) > IMPOSSIBLE and max(logprobs) <= LOGPROB_LIMIT):
        wrong = next((v for v in logprobs if not IMPOSSIBLE < v <= LOGPROB_LIMIT), sum(logprobs))
        why = "a probability is at most 1" if wrong > LOGPROB_LIMIT else "its weights are probably not finite"
        raise FalseReply(f"{name}: a log-prob of {wrong}; {why}")
