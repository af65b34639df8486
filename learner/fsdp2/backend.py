"""Steps of a model that FSDP2 holds, by AdamW.

Invariants:
- Gradients and AdamW moments are float32 and sharded like the weights.
- What a step does depends on neither the number of ranks nor how sequences are packed: FSDP averages gradients over all ranks, so
  each loss sum is scaled by world size / global trained tokens. Ranks that share a row hold parts of its gradient.
- Nothing is written to the weights before the loss and the gradient norm are known to be finite on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from ...configs.backends import Fsdp2
from ...configs.schema import Model, Optimizer
from .. import checkpoint as folders
from ..backend import PackedRow, PolicyLoss, StepResult, require_finite, require_trained
from ..checkpoint import CheckpointState, Saver
from ..ranks import apart, maximum_of, to_device, together
from . import checkpoint, lora
from .model import Fsdp2Model, WithoutAdapters


class Fsdp2Backend(Fsdp2Model):
    """Implements `Backend`.

    Args:
        optimizer: AdamW; its learning rate and warm-up are read by the caller, who gives each step its rate.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, config: Fsdp2, *, temperature: float, timeout_s: float
    ) -> None:
        super().__init__(model, config, temperature=temperature, timeout_s=timeout_s)
        self._source = model.path
        self._clip_norm = optimizer.clip_norm
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self._parameters if p.ndim > 1], "weight_decay": optimizer.weight_decay},
                {"params": [p for p in self._parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            fused=self.device.type == "cuda",  # one kernel for all tensors, and one call of FSDP's for them
        )
        self._saver = Saver(apart(timeout_s))

    def maximum(self, value: float) -> float:
        """See `Backend.maximum`."""
        with together("comparing a number"):
            return maximum_of(value, self.device)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """See `Backend.gather`."""
        with together("gathering numbers"):
            return self._parts.gather(values)

    def step(self, rows: Sequence[PackedRow], loss: PolicyLoss, lr: float) -> StepResult:
        """See `Backend.step`."""
        with together("stepping"):
            padded, tokens = self._even(rows)
            require_trained(tokens)
            try:
                sums = self._accumulate(padded, loss, self.world_size / tokens)
                norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
                grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
                loss_mean = sums.pop("loss") / tokens
                require_finite(loss_mean, grad_norm)
                for group in self._optimizer.param_groups:
                    group["lr"] = lr
                self._optimizer.step()
            finally:
                self._optimizer.zero_grad(set_to_none=True)
        means = {name: value / tokens for name, value in sums.items()}
        return StepResult(loss=loss_mean, grad_norm=grad_norm, tokens=tokens, means=means)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Backend.named_weights`."""
        return self._gathered(lora.alone if self._adapted else self._as_stored)

    def without_adapters(self) -> WithoutAdapters | None:
        """The frozen model under the adapters; None where all weights are trained. It is there as long as this is."""
        return WithoutAdapters(self) if self._adapted else None

    def save(self, directory: Path, state: CheckpointState) -> Future[None]:
        """See `Backend.save`."""
        with together(f"saving {directory}"):
            return checkpoint.save(self._saver, directory, self._model, self._optimizer, state)

    def load(self, directory: Path) -> CheckpointState:
        """See `Backend.load`."""
        with together(f"loading {directory}"):
            return checkpoint.load(directory, self._model, self._optimizer, of=self._source)

    def export(self, directory: Path) -> None:
        """See `Backend.export`."""
        with together(f"exporting {directory}"):
            folders.export(directory, self._model, self._gathered(self._as_stored), self._source)

    def close(self) -> None:
        """See `Scorer.close`."""
        self._saver.close()
        del self._optimizer, self._parameters
        super().close()

    def _accumulate(self, rows: Sequence[PackedRow], loss: PolicyLoss, scale: float) -> dict[str, float]:
        """Backward through every row. Returns the sums over rows and ranks by name, `loss` among them."""
        totals: dict[str, torch.Tensor] = {}
        for row in rows:
            output = loss(*self._score(row, self._temperature), to_device(row, self.device))
            (output.loss_sum * scale).backward()
            for name, value in {**output.sums, "loss": output.loss_sum}.items():
                totals[name] = totals.get(name, 0.0) + value.detach().double()
        names = sorted(totals)
        stacked = self._parts.sum(torch.stack([totals[name] for name in names]))
        return dict(zip(names, stacked.tolist(), strict=True))
