"""What a policy loss sees of a packed row: the trained tokens alone, and which sequence each of them belongs to.

Invariants:
- Selecting comes first: untrained positions are in no exponential, and thereby in no gradient.
- A sequence is one of the row's `cu_seqlens`; it is whole in its row, so that sums over it are exact however rows are packed.
- K trained tokens keep the order of the row; a sequence without one has length 0 and appears nowhere.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from ..backend import PackedRow

LOG_RATIO_LIMIT = 20.0
"""Ratios that may saturate do so at e^20, far above any clip. Where a clip or a gate takes the gradient away the ratio must not
become infinite, for infinity times 0 is NaN; squares of reported ratios stay finite, so that a freak token blanks out no metric."""


class Tokens(msgspec.Struct, frozen=True):
    """The K trained tokens of a row.

    Attributes:
        current: float[K], log-probs under the policy that is stepped, p; the only ones with a gradient besides `entropy`.
        proximal: float[K], under the policy at the start of the batch, q.
        behavior: float[K], under the policies that sampled them, b.
        advantages: float[K].
        entropy: float[K], of the current policy, nats.
        sequence: int64[K], the sequence in the row, from 0.
        lags: int32[K], learner version minus the one that sampled.
        lengths: int64[S], trained tokens of each of the row's S sequences.
        selected: bool[K], tokens that the loss treats apart; all false for losses that select none.
        earned: bool[K], tokens of episodes whose reward is above 0.
        reference: float[K], log-probs under the reference policy; None where there is none.
    """

    current: torch.Tensor
    proximal: torch.Tensor
    behavior: torch.Tensor
    advantages: torch.Tensor
    entropy: torch.Tensor
    sequence: torch.Tensor
    lags: torch.Tensor
    lengths: torch.Tensor
    selected: torch.Tensor
    earned: torch.Tensor
    reference: torch.Tensor | None = None

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """float[K]: for each token the sum of `values` over the trained tokens of its sequence."""
        sums = torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.sequence, values)[self.sequence]

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """float[K]: for each token the mean of `values` over the trained tokens of its sequence."""
        return self.sequence_sum(values) / self.lengths[self.sequence]


class Surrogate(msgspec.Struct, frozen=True):
    """A loss before correction and aggregation: nats x advantage per token, float[K]; and bool[K], where a clip was at work."""

    loss: torch.Tensor
    clipped: torch.Tensor


SurrogateLoss = Callable[[Tokens], Surrogate]

Selection = Callable[[PackedRow], torch.Tensor]
"""bool[K]: which trained tokens of a row of this step a loss treats apart."""


def trained_tokens(
    logprobs: torch.Tensor, entropy: torch.Tensor, row: PackedRow, selection: Selection | None
) -> Tokens:
    """The trained tokens of `row`; log-probs and entropies are float[N]."""
    trained = row.trained
    sequence, lengths = sequences_of(row)
    return Tokens(
        current=logprobs[trained],
        proximal=row.proximal_logprobs[trained],
        behavior=row.behavior_logprobs[trained],
        advantages=row.advantages[trained],
        entropy=entropy[trained],
        sequence=sequence,
        lags=row.lags[trained],
        lengths=lengths,
        selected=torch.zeros_like(sequence, dtype=torch.bool) if selection is None else selection(row),
        earned=row.earned[trained],
        reference=None if row.reference_logprobs is None else row.reference_logprobs[trained],
    )


def sequences_of(row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[K], the sequence of each trained token of `row`, and int64[S], the trained tokens of each sequence."""
    starts = torch.tensor(row.cu_seqlens, device=row.trained.device)
    sequence = torch.repeat_interleave(starts.diff())[row.trained]
    return sequence, torch.bincount(sequence, minlength=len(row.cu_seqlens) - 1)
