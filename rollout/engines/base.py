"""The engine contract: the requests that Slipstream makes to an inference server of any kind.

Invariants:
- Token ids in, token ids out. Neither side tokenizes.
- A completion's version spans are reported by the server, never guessed by the client.
- When a server dies during a request, no token is lost that had arrived with its version: they are in `EngineFailure.partial`.
- A request that would kill a server (ids outside the vocabulary, prompts beyond the context) is refused by the client.
- Weights are replaced only while paused, so that a span boundary is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ...agents.base import Completion
from ...configs.schema import Partial
from ...errors import EngineError
from ...weightsync.plan import GroupPlan, TransferPlan


class SamplingParams(msgspec.Struct, frozen=True):
    """Sampling of one completion. `stop_token_ids` end it and are part of it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class EngineLoad(msgspec.Struct, frozen=True):
    """The load of a replica: sequences decoding, sequences queued, share of its KV cache in use."""

    running: int
    waiting: int
    kv_usage: float


EMPTY = Completion((), (), (), "abort")  # a completion that ended before its first token


class PartialCompletion(msgspec.Struct):
    """A completion in progress, for a caller that may stop waiting for it. The engine sets `certain`."""

    certain: Callable[[], Completion] | None = None

    @property
    def partial(self) -> Completion:
        """What has arrived with its versions (`finish_reason` `abort`), possibly nothing."""
        try:
            return self.certain() if self.certain else EMPTY
        except EngineError:  # what has arrived is invalid
            return EMPTY


class RequestRejected(EngineError):
    """The server refuses this request, as every other server would. The server itself is healthy."""


class EngineFailure(EngineError):
    """The server failed during a completion. `partial` holds the tokens that had arrived (`finish_reason` `abort`), possibly none;
    continuing from prompt + partial on another replica equals an uninterrupted completion."""

    def __init__(self, message: str, partial: Completion) -> None:
        super().__init__(message)
        self.partial = partial


class Engine(Protocol):
    """A client of one replica. Every method raises EngineError, or DeadlineExceeded when the server does not answer."""

    name: str

    ranks: int
    """Processes that each hold a shard of the replica's weights, and join a broadcast group."""

    stages: bool
    """Whether the replica generates while it receives weights; else it must be paused before `receive_weights`."""

    scores_paused: bool
    """Whether `score` is answered while paused. Then no request samples from weights before the canary verified them; else requests
    under way do so until the canary is answered, right after the resume."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        version: int | None = None,
        growing: PartialCompletion | None = None,
    ) -> Completion:
        """Sample a completion; one that `pause("abort_resume")` or a drain cut short ends with `abort`.

        `version` is the version that the caller expects: only requests with an equal one share cached prefixes, so that none uses
        keys and values of other weights; without it no prefix is shared. When the caller is cancelled, the request ends on the
        server; the tokens that arrived before that, or before a deadline, are in `growing`.

        Raises:
            PolicyError: an id outside the vocabulary, or no room in the context for another token.
            RequestRejected: the server refuses the request.
            EngineFailure: the server failed, or stopped sending, in the middle.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs in nats of `token_ids[1:]`, each given the tokens before it, at temperature 1. Used for the canary."""
        ...

    async def get_load(self) -> EngineLoad: ...

    async def pause(self, mode: Partial) -> None:
        """Stop stepping. `recompute`: requests stay, their KV and every cached prefix is dropped and recomputed with the next
        weights. `keep_kv`: requests and KV stay. `abort_resume`: requests end at once with the tokens they have."""
        ...

    async def resume(self) -> None:
        """Step again; no effect on a server that is not paused."""
        ...

    async def join_group(self, plan: GroupPlan) -> None:
        """Join a broadcast group with the learner, leaving any other. Blocks until the group is complete."""
        ...

    async def receive_weights(self, plan: TransferPlan) -> None:
        """Begin to stage one version's tensors; the old weights keep serving. Each rank sends an ack to
        `plan.acks` when it holds all of them and they match `plan.checksum`, or why not."""
        ...

    async def swap_weights(self, version: int) -> None:
        """Load the staged tensors and serve them as `version`. Call while paused."""
        ...

    async def version(self) -> int | None:
        """The policy version served, None before the first push."""
        ...

    async def wait_ready(self, deadline_s: float) -> None:
        """Return as soon as the server answers; DeadlineExceeded when it does not within `deadline_s`."""
        ...

    async def close(self) -> None:
        """Close the connections. Completions in flight end at once with EngineFailure; their requests are aborted on the server."""
        ...
