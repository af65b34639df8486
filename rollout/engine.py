"""The engine contract: what Slipstream asks of an inference server, whichever it is.

Invariants:
- Token ids in, token ids out. Nothing is tokenized on this side or on that.
- A completion's version spans are the server's own report, never a guess of the client.
- What would kill a server (ids outside the vocabulary, prompts beyond the context) is refused here with a named error.
- Weights are replaced only while paused, so that a span boundary is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from ..agents.base import Completion
from ..weightsync.plan import GroupPlan, TransferPlan

PauseMode = Literal["keep", "abort", "wait"]
"""`keep`: requests stay and continue after `resume`, their KV recomputed. `abort`: partial completions return at once.
`wait`: running requests finish first."""


class Sampling(msgspec.Struct, frozen=True):
    """How to sample one completion. `stop_token_ids` end it and are part of it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


class Engine(Protocol):
    """A client of one replica. Every method raises EngineError, or DeadlineExceeded when the server does not answer."""

    name: str

    async def generate(self, token_ids: Sequence[int], sampling: Sampling, *, salt: str = "") -> Completion:
        """Sample a completion. Requests with different `salt` never share cached prefixes."""
        ...

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs in nats of `token_ids[1:]`, each given what precedes it, at temperature 1. Used for the canary."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop stepping; with `keep`, drop cached keys and values so that they are recomputed with the next weights."""
        ...

    async def resume(self) -> None: ...

    async def join_group(self, plan: GroupPlan) -> None:
        """Join a broadcast group with the learner. Blocks until the whole group has met."""
        ...

    async def receive_weights(self, plan: TransferPlan) -> None:
        """Receive one version's tensors into a staging buffer; the old weights keep serving."""
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
