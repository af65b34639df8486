"""The learner on PyTorch FSDP2: `fully_shard` over a transformers causal LM, one unit per layer and one for the rest.

Invariants:
- Master weights, gradients and AdamW moments are float32 and sharded over all ranks; bfloat16 is for computing,
  gathering and serving only.
- What a step does depends on neither the number of ranks nor how sequences are packed: FSDP averages gradients over ranks, so
  each loss sum is scaled by world size / global trained tokens.
- Every rank makes the same number of forward and backward passes: those with fewer rows run one without a trained token.
- Nothing is written to the weights before the loss and the gradient norm are known to be finite on every rank.
- One rank is the same code as many; without `RANK` in the environment it meets itself, without a port.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from ..configs.schema import Model, Optimizer
from ..errors import LearnerError
from . import attention, checkpoint
from .backend import PackedRow, PolicyLoss, StepResult
from .batch import scoring_row
from .logprobs import token_logprobs
from .model import load_model
from .ranks import check_rows, choose_device, gather_rows, join, to_device, together


class Fsdp2Backend:
    """Implements `Backend`.

    Args:
        model: path and compute dtype of the policy.
        optimizer: AdamW; its learning rate and warm-up are read by the caller, who gives each step its rate.
        device: `auto`, `cpu` or `cuda`.
        temperature: log-probs and entropies are those of softmax(logits / temperature).
        timeout_s: longest that a rank waits for the others in any collective.

    Raises:
        ConfigError: the model cannot be loaded, there is no such device, or the rendezvous variables are incomplete.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, *, device: str, temperature: float, timeout_s: float
    ) -> None:
        self.device = choose_device(device)
        self._temperature = temperature
        self._source = model.path
        self._clip_norm = optimizer.clip_norm
        dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        self._attention = attention.implementation(self.device, dtype)
        self._model = load_model(model.path, self._attention)
        join(self.device, timeout_s)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.data_rank, self.data_size = self.rank, self.world_size
        self._shard(dtype)
        self._parameters = list(self._model.parameters())
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self._parameters if p.ndim > 1], "weight_decay": optimizer.weight_decay},
                {"params": [p for p in self._parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
        )

    def logprobs(self, rows: Sequence[PackedRow], temperature: float | None = None) -> list[torch.Tensor]:
        """See `Backend.logprobs`."""
        with together("computing log-probs"), torch.no_grad():
            padded, _ = self._even(rows)
            return [self._score(row, temperature or self._temperature)[0].cpu() for row in padded][: len(rows)]

    def maximum(self, value: float) -> float:
        """See `Backend.maximum`."""
        with together("comparing a number"):
            tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
            return tensor.item()

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """See `Backend.gather`."""
        with together("gathering numbers"):
            return gather_rows(values, self.device)

    def step(self, rows: Sequence[PackedRow], loss: PolicyLoss, lr: float) -> StepResult:
        """See `Backend.step`."""
        with together("stepping"):
            padded, tokens = self._even(rows)
            if tokens == 0:
                raise LearnerError("the batch holds no trained token on any rank; nothing was changed")
            try:
                sums = self._accumulate(padded, loss, self.world_size / tokens)
                norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
                grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
                loss_mean = sums.pop("loss") / tokens
                if not (math.isfinite(loss_mean) and math.isfinite(grad_norm)):
                    raise LearnerError(
                        f"loss {loss_mean}, gradient norm {grad_norm}: not finite; the weights are unchanged. "
                        "Look for extreme rewards or log-probs in this batch, or lower the learning rate"
                    )
                for group in self._optimizer.param_groups:
                    group["lr"] = lr
                self._optimizer.step()
            finally:
                self._optimizer.zero_grad(set_to_none=True)
        means = {name: value / tokens for name, value in sums.items()}
        return StepResult(loss=loss_mean, grad_norm=grad_norm, tokens=tokens, means=means)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Backend.named_weights`."""
        modules: list[tuple[str, torch.nn.Module]] = list(self._model.named_modules())
        for prefix, module in modules:
            if not isinstance(module, FSDPModule):
                continue
            with together("gathering weights"):
                module.unshard()
            try:
                # Units below this one are still sharded; they come in their turn.
                gathered = {
                    f"{prefix}.{name}" if prefix else name: parameter.detach()
                    for name, parameter in module.named_parameters()
                    if not isinstance(parameter, DTensor)
                }
                # transformers fuses experts in memory; checkpoints and engines know them one by one.
                for name, tensor in revert_weight_conversion(self._model, gathered).items():
                    # A copy, because the gathered storage is freed on `reshard`.
                    yield name, tensor.clone(memory_format=torch.contiguous_format)
            finally:
                module.reshard()

    def save(self, directory: Path, state: checkpoint.CheckpointState) -> None:
        """See `Backend.save`."""
        with together(f"saving {directory}"):
            checkpoint.save(directory, self._model, self._optimizer, state)

    def load(self, directory: Path) -> checkpoint.CheckpointState:
        """See `Backend.load`."""
        with together(f"loading {directory}"):
            return checkpoint.load(directory, self._model, self._optimizer)

    def export(self, directory: Path) -> None:
        """See `Backend.export`."""
        with together(f"exporting {directory}"):
            checkpoint.export(directory, self._model, self.named_weights(), self._source)

    def close(self) -> None:
        """See `Backend.close`. Sharded tensors must be gone before the process group is, or the exit aborts now and then."""
        del self._model, self._optimizer, self._parameters
        gc.collect()
        dist.destroy_process_group()

    def _shard(self, dtype: torch.dtype) -> None:
        mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("data",))
        policy = MixedPrecisionPolicy()
        if dtype is not torch.float32:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        layers = self._model._no_split_modules or ()
        for module in self._model.modules():
            if type(module).__name__ in layers:
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(self._model, mesh=mesh, mp_policy=policy)

    def _score(self, row: PackedRow, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies, float32[N] each on the device, 0 where not trained."""
        trained = row.trained.nonzero().squeeze(1)
        token_ids = row.token_ids.to(self.device)
        targets = trained.to(self.device)
        output = self._model(
            input_ids=token_ids[None],
            position_ids=row.position_ids.to(self.device)[None],
            logits_to_keep=targets - 1,
            **attention.forward_arguments(self._attention, row.cu_seqlens, self.device),
        )
        chosen, entropy = token_logprobs(output.logits[0], token_ids[targets], temperature)
        zeros = torch.zeros(len(token_ids), device=self.device)
        return zeros.index_copy(0, targets, chosen), zeros.index_copy(0, targets, entropy)

    def _accumulate(self, rows: Sequence[PackedRow], loss: PolicyLoss, scale: float) -> dict[str, float]:
        """Backward through every row. Returns the sums over rows and ranks by name, `loss` among them."""
        totals: dict[str, torch.Tensor] = {}
        for row in rows:
            output = loss(*self._score(row, self._temperature), to_device(row, self.device))
            (output.loss_sum * scale).backward()
            for name, value in {**output.sums, "loss": output.loss_sum}.items():
                totals[name] = totals.get(name, 0.0) + value.detach().double()
        names = sorted(totals)
        stacked = torch.stack([totals[name] for name in names])
        dist.all_reduce(stacked)
        return dict(zip(names, stacked.tolist(), strict=True))

    def _even(self, rows: Sequence[PackedRow]) -> tuple[list[PackedRow], int]:
        """This rank's rows, filled up to the largest number on any rank and to at least one; trained tokens on all ranks."""
        check_rows(rows)
        mine = torch.tensor([len(rows), sum(int(row.trained.sum()) for row in rows)], device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        counts = torch.stack(everyone)
        missing = max(1, int(counts[:, 0].max())) - len(rows)
        return [*rows, *[scoring_row([[0]])] * missing], int(counts[:, 1].sum())
