"""The learner backend contract, and the rows that travel through it.

Invariants:
- Rows are packed without padding: one flat axis of N tokens, cut into sequences by `cu_seqlens`.
- Position n of the per-token arrays speaks of token n itself: its log-prob is computed from the logits at n - 1 of the same
  sequence; the first token of a sequence is never trained on.
- A loss is a sum over trained tokens already divided by the *global* token count: adding micro-batches and ranks is the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch


class PackedRow(msgspec.Struct, frozen=True):
    """One micro-batch: S sequences, N tokens in all.

    Attributes:
        token_ids: int64[N].
        position_ids: int64[N], restarting at 0 with each sequence.
        cu_seqlens: S + 1 offsets, from 0 to N.
        trained: bool[N], tokens that carry loss.
        behavior_logprobs: float32[N], of the policy that sampled them, 0 where not trained.
        proximal_logprobs: float32[N], of the policy at the start of this step, 0 where not trained.
        advantages: float32[N], 0 where not trained.
        lags: int32[N], learner version minus the version that sampled the token, -1 where not trained.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: tuple[int, ...]
    trained: torch.Tensor
    behavior_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    advantages: torch.Tensor
    lags: torch.Tensor


class LossOutput(msgspec.Struct, frozen=True):
    """A policy loss on one row: the sum over its trained tokens, and sums of what to report (each divided by tokens later)."""

    loss_sum: torch.Tensor
    sums: dict[str, torch.Tensor]


PolicyLoss = Callable[[torch.Tensor, torch.Tensor, PackedRow], LossOutput]
"""(log-probs float32[N], entropy float32[N], row) -> LossOutput; both are 0 at the first token of a sequence."""


class StepResult(msgspec.Struct, frozen=True):
    """One optimizer step: `means` are the loss's sums over all ranks divided by the global count of trained tokens."""

    loss: float
    grad_norm: float
    tokens: int
    means: dict[str, float]


class Backend(Protocol):
    """Holds the policy, its optimizer and its sharding. Methods marked *collective* are called by every rank together."""

    rank: int
    world_size: int

    def logprobs(self, rows: Sequence[PackedRow]) -> list[torch.Tensor]:
        """Collective. float32[N] per row, without gradient, 0 at the first token of each sequence."""
        ...

    def step(self, rows: Sequence[PackedRow], loss: PolicyLoss) -> StepResult:
        """Collective. Forward, backward, clip, one optimizer step over this rank's rows (ranks may have unequal counts).

        Raises:
            LearnerError: the loss or the gradient is not finite; the weights are unchanged.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective. Hugging Face name and full tensor, one at a time, in a fixed order; tied tensors appear once."""
        ...

    def save(self, directory: Path) -> None:
        """Collective. Sharded weights and optimizer; the directory appears whole or not at all."""
        ...

    def load(self, directory: Path) -> None:
        """Collective. Resume from `save`, also on another number of ranks."""
        ...

    def export(self, directory: Path) -> None:
        """Collective. A Hugging Face folder, tokenizer included."""
        ...
