"""The engine contract: what Slipstream asks of an inference server, whichever it is.

Invariants:
- Token ids in, token ids out. Nothing is tokenized on this side or on that.
- A completion's version spans are the server's own report, never a guess of the client.
- A server that dies under a request costs no token that had reached us with its version: they are in `Broken.partial`.
- What would kill a server (ids outside the vocabulary, prompts beyond the context) is refused here with a named error.
- Weights are replaced only while paused, so that a span boundary is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ..agents.base import Completion
from ..configs.schema import Partial
from ..errors import EngineError
from ..weightsync.plan import GroupPlan, TransferPlan


class Sampling(msgspec.Struct, frozen=True):
    """How to sample one completion. `stop_token_ids` end it and are part of it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class Pressure(msgspec.Struct, frozen=True):
    """How busy a replica is: sequences decoding, sequences queued, share of its KV cache in use."""

    running: int
    waiting: int
    kv_usage: float


NOTHING = Completion((), (), (), "abort")
"""A completion that was cut off before its first token."""


class Growing:
    """A completion as it grows, for a caller that may stop waiting for it. The engine sets `certain`."""

    def __init__(self) -> None:
        self.certain: Callable[[], Completion] | None = None

    @property
    def partial(self) -> Completion:
        """What has arrived with its versions (`finish_reason` `abort`), possibly nothing."""
        try:
            return self.certain() if self.certain else NOTHING
        except EngineError:  # what has arrived is impossible: nobody can vouch for any of it
            return NOTHING


class Refused(EngineError):
    """The server will not take this request, and no other server would. It says nothing about the server."""


class Broken(EngineError):
    """The server went away in the middle of a completion. `partial` holds what had arrived (`finish_reason` `abort`), possibly
    nothing; going on from prompt + partial elsewhere equals never having been interrupted."""

    def __init__(self, message: str, partial: Completion) -> None:
        super().__init__(message)
        self.partial = partial


class Engine(Protocol):
    """A client of one replica. Every method raises EngineError, or DeadlineExceeded when the server does not answer."""

    name: str

    ranks: int
    """Processes that each hold a part of the replica's weights, and join a broadcast group."""

    stages: bool
    """Whether the replica goes on generating while it receives weights; else it must be paused before `receive_weights`."""

    scores_paused: bool
    """Whether `score` is answered while paused. Then no request sees weights before the canary has proven them; else requests
    under way sample from them until the canary is answered, right after the resume."""

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        version: int | None = None,
        growing: Growing | None = None,
    ) -> Completion:
        """Sample a completion; one that `pause("abort_resume")` or a drain cut short ends with `abort`.

        `version` is what the caller believes the replica serves: only requests with an equal one share cached prefixes, so that
        none sees keys and values of other weights; without it nothing is shared. A caller that is cancelled no longer has a
        request on the server; what had arrived by then, or by a deadline, is in `growing`.

        Raises:
            PolicyError: an id outside the vocabulary, or no room in the context for another token.
            Refused: the server does not take such a request.
            Broken: the server went away, or fell silent, in the middle.
        """
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs in nats of `token_ids[1:]`, each given what precedes it, at temperature 1. Used for the canary."""
        ...

    async def pressure(self) -> Pressure:
        """How busy the replica is right now."""
        ...

    async def pause(self, mode: Partial) -> None:
        """Stop stepping. `recompute`: requests stay, their KV and every cached prefix is dropped and computed anew with the next
        weights. `keep_kv`: requests and KV stay. `abort_resume`: requests end at once with what they have."""
        ...

    async def resume(self) -> None:
        """Step again; does no harm to a server that is not paused."""
        ...

    async def join_group(self, plan: GroupPlan) -> None:
        """Join a broadcast group with the learner, leaving any other. Blocks until the whole group has met."""
        ...

    async def receive_weights(self, plan: TransferPlan) -> None:
        """Begin to stage one version's tensors; the old weights keep serving. Each of the replica's ranks tells `plan.receipts`
        when it holds all of them, and they match `plan.checksum`, or why not."""
        ...

    async def swap_weights(self, version: int) -> None:
        """Load the staged tensors and serve them as `version`. Call while paused."""
        ...

    async def version(self) -> int | None:
        """The policy version served, None when no weights were pushed yet."""
        ...

    async def wait_ready(self, deadline_s: float) -> None:
        """Return as soon as the server answers; DeadlineExceeded when it does not within `deadline_s`."""
        ...

    async def close(self) -> None: ...
