"""The learner backend contract: what it does with micro-batches (rows, `packing.py`).

Invariants:
- Position n of a per-token array belongs to token n: its log-prob is computed from the logits at n - 1 of the same sequence. The
  first token of a sequence is never trained on.
- Log-probs and entropies exist at trained tokens only and are 0 elsewhere. Logits of context are never computed.
- A loss is a sum over trained tokens; the backend divides it by the *global* count of trained tokens, so that neither
  micro-batches nor ranks change what a step does. Other means scale the tokens (`algorithms/policy_loss.py`).
- The caller gives each step its learning rate: schedules are pure functions of the step (`step.py`) and have no state.
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
from .packing import MicroBatch


class LossOutput(msgspec.Struct, frozen=True):
    """A policy loss on one row: the sum over its trained tokens, and sums of what to report (each divided by tokens later)."""

    loss_sum: torch.Tensor
    sums: dict[str, torch.Tensor]


PolicyLoss = Callable[[torch.Tensor, torch.Tensor, MicroBatch], LossOutput]
"""(log-probs float32[N], entropy float32[N], row) -> LossOutput. It is called on rows without a trained token too, and then
returns 0 under the same names."""

Gather = Callable[[torch.Tensor], torch.Tensor]
"""`Backend.gather`."""

BatchLoss = Callable[[Sequence[MicroBatch], Gather], PolicyLoss]
"""Collective. (this rank's rows of one step, gather) -> the loss on each of them. It computes what depends on the whole step, such
as a mean over sequences, before the first gradient. Proximal log-probs may still be NaN here, where the step's own forward pass
gives them (`step.py`); rows that the loss is called on have them."""


class BackendStepResult(msgspec.Struct, frozen=True):
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
    """A model that is scored with and never stepped, such as a reference policy: it has neither optimizer nor checkpoints."""

    def logprobs(self, rows: Sequence[MicroBatch], temperature: float | None = None) -> list[torch.Tensor]:
        """Collective. float32[N] per row on CPU, without gradient, 0 where not trained (ranks may have unequal counts).

        Among ranks that share a data rank, the rows of the first are scored; each rank gets back as many as it gave. `temperature`
        replaces the one that the policy is trained at.
        """
        ...

    def close(self) -> None:
        """Free the model and leave the process group. No other method may be called afterwards."""
        ...


class Backend(Scorer, Protocol):
    """Holds the policy, its optimizer and its sharding. Methods marked *collective* are called by every rank together.

    Attributes:
        rank: this process among all `world_size`; rank 0 talks to the buffer and the replicas.
        data_rank: which of the `data_size` parts of a batch this rank takes. Ranks that share one copy of the model, or the work on
            their rows, have one data rank and take the same rows.
        device: where this rank computes.
        shares_prefixes: whether a common prefix of sequences of a row is computed once (`packing.py`).
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
        """Collective. float64[n, C] of each data rank, concatenated in their order, on CPU (n may differ and be 0)."""
        ...

    def step(self, rows: Sequence[MicroBatch], loss: PolicyLoss, lr: float) -> BackendStepResult:
        """Collective. Forward, backward, clip, one optimizer step over this rank's rows (ranks may have unequal counts). Raises
        LearnerError: no rank has a trained token, or the loss or the gradient is not finite; the weights are unchanged."""
        ...

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective. Hugging Face name and full tensor in the serving dtype, one at a time, in a fixed order.

        Tied tensors appear once. The caller owns each tensor. Every rank must exhaust the iterator. Where adapters are trained,
        only the adapters (`weightsync/adapters.py`).
        """
        ...

    def save(self, directory: Path, state: CheckpointState) -> Future[None]:
        """Collective. Begin to write sharded weights, optimizer and `state` as they are now; the next step may begin meanwhile.

        The directory appears complete or not at all. The future is done when it exists, and fails with a LearnerError.
        """
        ...

    def load(self, directory: Path) -> CheckpointState:
        """Collective. Resume from `save`, also on another number of ranks."""
        ...

    def export(self, directory: Path) -> None:
        """Collective. A Hugging Face folder in the serving dtype, tokenizer included; complete or not at all."""
        ...
