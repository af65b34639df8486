"""The learner backend contract: what it does with micro-batches (rows, `packing.py`); and what all backends have in common.

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..common.routed_experts import RouterShape
from ..errors import LearnerError
from .checkpoint_folder import CheckpointState
from .distributed import all_ranks_agree, gather_rows, maximum_of
from .packing import MicroBatch, scoring_microbatch
from .router_replay import ReplayedChoices


class TokenOutputs(msgspec.Struct, frozen=True):
    """What a policy loss saw at the K trained tokens of a row, in its order and without gradient; see `common.annotations`."""

    log_ratio: torch.Tensor  # float[K]; -inf in expert traces, which have none
    entropy: torch.Tensor  # float[K]
    advantage: torch.Tensor  # float[K]
    weight: torch.Tensor  # float[K]
    clipped: torch.Tensor  # bool[K]
    dropped: torch.Tensor  # bool[K]


class LossOutput(msgspec.Struct, frozen=True):
    """A policy loss on one row: the sum over its trained tokens, and sums of what to report (each divided by tokens later)."""

    loss_sum: torch.Tensor
    sums: dict[str, torch.Tensor]
    tokens: TokenOutputs | None = None  # None for losses of other models than the policy


PolicyLoss = Callable[[torch.Tensor, torch.Tensor, MicroBatch], LossOutput]
"""(log-probs float32[N], entropy float32[N], row) -> LossOutput. It is called on rows without a trained token too, and then
returns 0 under the same names."""


def listening(loss: PolicyLoss, hear: Callable[[TokenOutputs, MicroBatch], None]) -> PolicyLoss:
    """`loss`, of which `hear` receives what it saw at the tokens of each row."""

    def of_row(logprobs: torch.Tensor, entropy: torch.Tensor, row: MicroBatch) -> LossOutput:
        output = loss(logprobs, entropy, row)
        if output.tokens is not None:
            hear(output.tokens, row)
        return output

    return of_row


Gather = Callable[[torch.Tensor], torch.Tensor]  # `Backend.gather`

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
    disagreement: float | None = None  # `ReplayedChoices.disagreement` of the step; None where no choice was replayed


class Scorer(ABC):
    """A model that is scored with and never stepped, such as a reference policy: it has neither optimizer nor checkpoints."""

    @abstractmethod
    def logprobs(self, rows: Sequence[MicroBatch], temperature: float | None = None) -> list[torch.Tensor]:
        """Collective. float32[N] per row on CPU, without gradient, 0 where not trained (ranks may have unequal counts). Of ranks
        that share a data rank, the rows of the first are scored; each gets back as many as it gave. `temperature` replaces that of
        training."""

    def top_logprobs(self, rows: Sequence[MicroBatch], count: int) -> list[torch.Tensor]:
        """Collective. As `logprobs`, float32[N, 1 + 2 count]: the log-prob of the token, those of the `count` likeliest tokens in
        its place, and their ids, which are exact below 2^24. Raises LearnerError where a model gives those of given tokens only."""
        name = type(self).__name__
        raise LearnerError(f"{name} gives log-probs of the sampled tokens only; see learner.algorithm.kl.estimator")

    @abstractmethod
    def close(self) -> None:
        """Free the model and leave the process group. No other method may be called afterwards."""


class ShardedModel(Scorer):
    """A model that is split over ranks. Methods marked *collective* are called by every rank together."""

    rank: int  # this process among all `world_size`; rank 0 talks to the buffer and the replicas
    world_size: int
    data_rank: int  # of `data_size`; ranks of one data rank share a copy of the model, or the work on their rows
    data_size: int
    leads_rows: (
        bool  # whether it is the one of its data rank's ranks that records what the loss saw: the loss runs on several
    )
    device: torch.device
    routers: RouterShape | None = None  # those that take over recorded experts; None where none do
    _choices: ReplayedChoices | None = None  # what they take over
    _data: dist.ProcessGroup  # ranks that have different rows
    _multiple = 1  # passes come in multiples of it

    def _pad_passes(self, rows: Sequence[MicroBatch]) -> tuple[list[MicroBatch], int]:
        """Collective. These rows, padded to the largest number on any data rank; trained tokens on all ranks. Raises LearnerError
        where a row trains a token that nothing predicts."""
        if any(bool(row.loss_mask[list(row.cu_seqlens[:-1])].any()) for row in rows):
            raise LearnerError("a packed row trains the first token of a sequence, which nothing predicts")
        trained = sum(int(row.loss_mask.sum()) for row in rows)
        local = torch.tensor([[len(rows), trained]], dtype=torch.float64)
        counts = gather_rows(local, self.device, self._data)
        count = -(-int(counts[:, 0].max()) // self._multiple) * self._multiple
        return [*rows, *[scoring_microbatch([[0]])] * (count - len(rows))], int(counts[:, 1].sum())


class Backend(ShardedModel):
    """Holds the policy, its optimizer and its sharding."""

    shares_prefixes: bool  # whether a common prefix of sequences of a row is computed once (`packing.py`)
    _optimizer: Any

    def maximum(self, value: float) -> float:
        """Collective. The largest `value` of any rank."""
        with all_ranks_agree("comparing a number"):
            return maximum_of(value, self.device)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Collective. float64[n, C] of each data rank, concatenated in their order, on CPU (n may differ and be 0)."""
        with all_ranks_agree("gathering numbers"):
            return gather_rows(values, self.device, self._data)

    def step(self, rows: Sequence[MicroBatch], loss: PolicyLoss, lr: float) -> BackendStepResult:
        """Collective. Forward, backward, clip, one optimizer step over this rank's rows (ranks may have unequal counts). Raises
        LearnerError: no rank has a trained token, or the loss or the gradient is not finite; the weights are unchanged."""
        with all_ranks_agree("stepping"):
            padded, tokens = self._pad_passes(rows)
            if tokens == 0:
                raise LearnerError("the batch holds no trained token on any rank; nothing was changed")
            try:
                sums = self._backward(padded, loss, tokens)
                grad_norm, loss_mean = self._clip_gradients(), sums.pop("loss") / tokens
                if not (math.isfinite(loss_mean) and math.isfinite(grad_norm)):
                    raise LearnerError(
                        f"loss {loss_mean}, gradient norm {grad_norm}: not finite; the weights are unchanged. "
                        "Look for extreme rewards or log-probs in this batch, or lower the learning rate"
                    )
                for group in self._optimizer.param_groups:
                    group["lr"] = lr
                self._optimizer.step()
            finally:
                self._zero_gradients()
            disagreement = None if self._choices is None else self._choices.disagreement(self.device)
        means = {name: value / tokens for name, value in sums.items()}
        return BackendStepResult(loss_mean, grad_norm, tokens, means, disagreement)

    def without_adapters(self) -> Scorer | None:
        """The frozen model under the adapters, which lives as long as this backend; None where all weights are trained."""
        return None

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective. On rank 0 Hugging Face name and full tensor in the serving dtype, one at a time, in a fixed order; nothing on
        the other ranks. Tied tensors come once, and only the adapters where these are trained (`weight_check.py`). Buffers that a
        checkpoint has, such as the bias by which DeepSeek-V3 balances experts, come in their own dtype: no step changes or rounds
        them. Rank 0 owns each tensor, and frees it before it asks for the next where memory counts. Every rank must exhaust the
        iterator."""

    @abstractmethod
    def save(self, directory: Path, state: CheckpointState) -> Future[None]:
        """Collective. Begin to write sharded weights, optimizer and `state` as they are now; the next step may begin meanwhile.
        The directory appears complete or not at all. The future is done when it exists, and fails with a LearnerError."""

    @abstractmethod
    def load(self, directory: Path) -> CheckpointState:
        """Collective. Resume from `save`, also on another number of ranks."""

    @abstractmethod
    def export(self, directory: Path) -> None:
        """Collective. A Hugging Face folder in the serving dtype, tokenizer included; complete or not at all."""

    @abstractmethod
    def _backward(self, rows: Sequence[MicroBatch], loss: PolicyLoss, tokens: int) -> dict[str, float]:
        """Collective. Compute the gradient of the mean loss; the sums over rows and ranks by name, `loss` among them."""

    @abstractmethod
    def _clip_gradients(self) -> float:
        """Collective. The norm of the gradient before it is clipped."""

    def _zero_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
