"""Steps of a model that Megatron-core holds, by AdamW: one optimizer step for all copies.

Invariants:
- Master weights, gradients and AdamW moments are float32.
- What a step does depends neither on the layout nor on how sequences are packed: each loss sum is divided by the global count of
  trained tokens before its backward pass, and gradients are summed.
- Nothing is written to the weights before the loss and the gradient norm are known to be finite on every rank.
- The optimizer's state is sharded over data ranks always, also over one: a checkpoint is the same in every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from ...configs.backends import Megatron
from ...configs.schema import Model, Optimizer
from .. import checkpoint as folders
from ..backend import PackedRow, PolicyLoss, StepResult, require_finite, require_trained
from ..checkpoint import CheckpointState, Saver
from ..ranks import apart, gather_rows, maximum_of, together
from . import checkpoint
from .family import Policy, full_weights
from .model import MegatronModel, Output


class MegatronBackend(MegatronModel):
    """Implements `Backend`.

    Args:
        optimizer: AdamW; its learning rate and warm-up are read by the caller, who gives each step its rate.
    """

    shares_prefixes = False

    def __init__(
        self, model: Model, optimizer: Optimizer, layout: Megatron, *, temperature: float, timeout_s: float
    ) -> None:
        self._path = model.path
        self._rules = optimizer
        super().__init__(model, layout, temperature=temperature, timeout_s=timeout_s)
        checkpoint.begin_states(self._optimizer)
        self._saver = Saver(apart(timeout_s))

    def maximum(self, value: float) -> float:
        """See `Backend.maximum`."""
        with together("comparing a number"):
            return maximum_of(value, self.device)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """See `Backend.gather`."""
        with together("gathering numbers"):
            return gather_rows(values, self.device, self._among.data)

    def step(self, rows: Sequence[PackedRow], loss: PolicyLoss, lr: float) -> StepResult:
        """See `Backend.step`."""
        with together("stepping"):
            padded, tokens = self._even(rows)
            require_trained(tokens)

            def judge(logprobs: torch.Tensor, entropy: torch.Tensor, row: PackedRow) -> Output:
                output = loss(logprobs, entropy, row)
                return output.loss_sum / tokens, {**output.sums, "loss": output.loss_sum}

            try:
                sums = self._total(self._passes(padded, judge, self._temperature, forward_only=False))
                loss_mean = sums.pop("loss") / tokens
                self._optimizer.prepare_grads()
                grad_norm = float(self._optimizer.get_grad_norm())
                require_finite(loss_mean, grad_norm)
                for group in self._optimizer.param_groups:
                    group["lr"] = lr
                self._optimizer.step()
            finally:
                self._forget_gradients()
        means = {name: value / tokens for name, value in sums.items()}
        return StepResult(loss=loss_mean, grad_norm=grad_norm, tokens=tokens, means=means)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Backend.named_weights`. Every rank gets every tensor."""
        weights = full_weights(self._parts)
        while True:
            with together("gathering weights"):
                named = next(weights, None)
            if named is None:
                return
            yield named

    def save(self, directory: Path, state: CheckpointState) -> Future[None]:
        """See `Backend.save`."""
        with together(f"saving {directory}"):
            return checkpoint.save(self._saver, directory, self._parts, self._optimizer, state)

    def load(self, directory: Path) -> CheckpointState:
        """See `Backend.load`."""
        with together(f"loading {directory}"):
            return checkpoint.load(directory, self._passed, self._optimizer)

    def export(self, directory: Path) -> None:
        """See `Backend.export`."""
        with together(f"exporting {directory}"):
            folders.export(directory, self._source, self.named_weights(), self._path)

    def close(self) -> None:
        """See `Scorer.close`."""
        self._saver.close()
        del self._optimizer
        super().close()

    def _prepared(self) -> list[Any]:
        wrapped, self._optimizer = _distribute(self._parts, self._rules, self._dtype)
        return wrapped

    def _write(self, parameter: Any, shard: torch.Tensor) -> None:
        """Into the optimizer's master weights, too, unrounded."""
        super()._write(parameter, shard)
        for one in self._optimizer.chained_optimizers:
            if parameter in one.model_param_group_index_map and parameter.dtype is not torch.float32:
                held = one._get_model_param_range_map(parameter)["param"]
                parameter.main_param.copy_(shard.reshape(-1)[held.start : held.end])

    def _total(self, found: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
        """The sums over rows and data ranks by name, on every rank."""
        stages = self._among.stages
        told: list[dict[str, float]] = [{}]
        if self._among.last_stage:
            names = sorted(found[0])
            stacked = torch.stack([sum((one[name].double() for one in found), torch.zeros(())) for name in names])
            dist.all_reduce(stacked, group=self._among.data)
            told = [dict(zip(names, stacked.tolist(), strict=True))]
        if stages.size() > 1:
            dist.broadcast_object_list(told, group_src=stages.size() - 1, group=stages)
        return told[0]

    def _forget_gradients(self) -> None:
        for part in self._passed:
            part.zero_grad_buffer()
        self._optimizer.zero_grad()


def _distribute(parts: Sequence[Policy], optimizer: Optimizer, dtype: torch.dtype) -> tuple[list[Any], Any]:
    """`parts` with gradients in float32 buffers that are summed over data ranks, and AdamW with its state sharded over them."""
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped: list[Any] = [
        DistributedDataParallel(part.config, how, part, disable_bucketing=index > 0) for index, part in enumerate(parts)
    ]
    config = OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        clip_grad=optimizer.clip_norm,
        use_distributed_optimizer=True,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )
    made = get_megatron_optimizer(config, wrapped)
    for group in made.param_groups:  # which only Megatron's own scheduler would do; 0 for norms
        group["weight_decay"] = optimizer.weight_decay * group["wd_mult"]
    return wrapped, made
