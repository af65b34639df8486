"""What computes tokens behind our own server: a batch of sequences that moves one token at a time.

Invariants:
- All methods are called by one thread, the server's engine thread; none blocks longer than one forward pass.
- A stepper knows no sockets, no versions and no pause: whoever calls `step` decides when.
- Weights may be replaced between two steps. Running sequences go on with the keys and values they have, unless `recompute` is
  called.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch

from ...agents.base import FinishReason
from ..engine import Pressure, Sampling


class Sequence(msgspec.Struct, frozen=True):
    """A request: `token_ids` to continue. Only sequences of equal `salt` share cached prefixes; lower `priority` goes first."""

    id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    salt: str = ""
    priority: int = 0


class Sampled(msgspec.Struct, frozen=True):
    """One token of sequence `id`, its log-prob in nats under the distribution it was drawn from, and whether it was the last."""

    id: str
    token: int
    logprob: float
    finish: FinishReason | None = None


class Stepper(Protocol):
    """Decodes sequences with `model`, whose parameters the server replaces in place."""

    model: torch.nn.Module

    def add(self, sequence: Sequence) -> None:
        """Take a sequence into the batch, or queue it until there is room."""
        ...

    def abort(self, id: str) -> None:
        """Forget a sequence, if it is there; nothing more comes of it."""
        ...

    def step(self) -> list[Sampled]:
        """Advance the batch; at most one token per sequence. Empty when there is nothing to do, or while prompts are computed."""
        ...

    def busy(self) -> bool:
        """Whether a step would have anything to do."""
        ...

    def recompute(self) -> None:
        """Drop every key and value, cached prefixes included. Running sequences compute theirs anew and lose no token."""
        ...

    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probs in nats of `token_ids[1:]` at temperature 1, from a pass of their own."""
        ...

    def pressure(self) -> Pressure: ...
