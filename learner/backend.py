"""The learner backend contract, and the rows that travel through it.

Invariants:
- Rows are packed without padding: one flat axis of N tokens, cut into sequences by `cu_seqlens`.
- Position n of the per-token arrays speaks of token n itself: its log-prob is computed from the logits at n - 1 of the same
  sequence; the first token of a sequence is never trained on.
- Log-probs and entropies exist at trained tokens only and are 0 elsewhere: the rest is context and costs no vocabulary.
- A loss is a sum over trained tokens; the backend divides it by the *global* count of trained tokens, so that neither
  micro-batches nor ranks change what a step does. Other means are sums of scaled tokens (`algorithms/aggregation.py`).
- The learning rate comes with each step: schedules are pure functions of the step (`schedule.py`), not state to be saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from ..errors import LearnerError
from .checkpoint import CheckpointState


class PackedRow(msgspec.Struct, frozen=True):
    """One micro-batch: S sequences, N tokens in all.

    Attributes:
        token_ids: int64[N].
        position_ids: int64[N], restarting at 0 with each sequence.
        cu_seqlens: S + 1 offsets, from 0 to N.
        trained: bool[N], tokens that carry loss; false at the first token of each sequence.
        behavior_logprobs: float32[N], of the policy that sampled them, 0 where not trained.
        proximal_logprobs: float32[N], of the policy at the start of this step, 0 where not trained; NaN where still unknown.
        advantages: float32[N], 0 where not trained.
        lags: int32[N], learner version minus the version that sampled the token, -1 where not trained.
        mixed: bool[N], trained tokens whose sampling used keys and values of older weights too: no version gives their log-prob.
        earned: bool[N], trained tokens of episodes whose reward is above 0.
        reference_logprobs: float32[N], of the reference policy, 0 where not trained; None where there is none.
        returns: float32[N], what a critic learns to say, 0 where not trained; None where there is none.
    """

    token_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: tuple[int, ...]
    trained: torch.Tensor
    behavior_logprobs: torch.Tensor
    proximal_logprobs: torch.Tensor
    advantages: torch.Tensor
    lags: torch.Tensor
    mixed: torch.Tensor
    earned: torch.Tensor
    reference_logprobs: torch.Tensor | None = None
    returns: torch.Tensor | None = None


class LossOutput(msgspec.Struct, frozen=True):
    """A policy loss on one row: the sum over its trained tokens, and sums of what to report (each divided by tokens later)."""

    loss_sum: torch.Tensor
    sums: dict[str, torch.Tensor]


PolicyLoss = Callable[[torch.Tensor, torch.Tensor, PackedRow], LossOutput]
"""(log-probs float32[N], entropy float32[N], row) -> LossOutput. Called on rows without a trained token too, and must then
return 0 and the same names."""

Gather = Callable[[torch.Tensor], torch.Tensor]
"""`Backend.gather`."""

BatchLoss = Callable[[Sequence[PackedRow], Gather], PolicyLoss]
"""Collective. (this rank's rows of one step, gather) -> the loss on each of them. What depends on the whole step, such as a mean
over sequences, is found out here, before the first gradient. Here proximal log-probs may still be NaN, where the step's own forward
pass gives them (`step.py`); rows that the loss is called on have them."""


class StepResult(msgspec.Struct, frozen=True):
    """One optimizer step: `means` are the loss's sums over all data ranks divided by the global count of trained tokens."""

    loss: float
    grad_norm: float
    tokens: int
    means: dict[str, float]


def require_trained(tokens: int) -> None:
    """Raises LearnerError where a step has no trained token on any rank."""
    if tokens == 0:
        raise LearnerError("the batch holds no trained token on any rank; nothing was changed")


def require_finite(loss: float, grad_norm: float) -> None:
    """Raises LearnerError where a step must not be taken."""
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise LearnerError(
            f"loss {loss}, gradient norm {grad_norm}: not finite; the weights are unchanged. "
            "Look for extreme rewards or log-probs in this batch, or lower the learning rate"
        )


class Scorer(Protocol):
    """A model that is asked and never stepped, such as a reference policy: it has neither optimizer nor checkpoints."""

    def logprobs(self, rows: Sequence[PackedRow], temperature: float | None = None) -> list[torch.Tensor]:
        """Collective. float32[N] per row on CPU, without gradient, 0 where not trained (ranks may have unequal counts).

        Of ranks with one data rank the first one's rows count; the others get as many back as they gave. `temperature` replaces the
        one that the policy is trained at.
        """
        ...

    def close(self) -> None:
        """Free the model and leave the process group; nothing can be called afterwards."""
        ...


class Backend(Scorer, Protocol):
    """Holds the policy, its optimizer and its sharding. Methods marked *collective* are called by every rank together.

    Attributes:
        rank: this process among all `world_size`; 0 is the one that speaks for the learner.
        data_rank: which of the `data_size` parts of a batch this rank takes. Several ranks may hold one copy of the model among
            them, or share the work on their rows: they have one data rank and take the same rows.
        device: where this rank computes.
        shares_prefixes: whether sequences of a row that begin alike cost what they have in common once (`prefixes.py`).
    """

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    device: torch.device
    shares_prefixes: bool

    def maximum(self, value: float) -> float:
        """Collective. The largest `value` of any rank."""
        ...

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Collective. float64[n, C] of each data rank, one below the other in their order, on CPU (n may differ and be 0)."""
        ...

    def step(self, rows: Sequence[PackedRow], loss: PolicyLoss, lr: float) -> StepResult:
        """Collective. Forward, backward, clip, one optimizer step over this rank's rows (ranks may have unequal counts).

        Raises:
            LearnerError: no rank has a trained token, or the loss or the gradient is not finite; the weights are unchanged.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective. Hugging Face name and full tensor in the serving dtype, one at a time, in a fixed order.

        Tied tensors appear once. Each tensor is the caller's own. Every rank must exhaust the iterator. Where adapters are
        trained, the adapters alone (`weightsync/adapters.py`).
        """
        ...

    def save(self, directory: Path, state: CheckpointState) -> Future[None]:
        """Collective. Begin to write sharded weights, optimizer and `state` as they are now; the next step may be taken meanwhile.

        The directory appears whole or not at all. The future is done when it is there, and fails with a LearnerError.
        """
        ...

    def load(self, directory: Path) -> CheckpointState:
        """Collective. Resume from `save`, also on another number of ranks."""
        ...

    def export(self, directory: Path) -> None:
        """Collective. A Hugging Face folder in the serving dtype, tokenizer included; whole or not at all."""
        ...
