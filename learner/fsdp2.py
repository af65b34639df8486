"""The learner on PyTorch FSDP2: `fully_shard` over a transformers causal LM, one unit per layer and one for the rest.

Invariants:
- Master weights, gradients and AdamW moments are float32 and sharded over all ranks; bfloat16 is for computing,
  gathering and serving only.
- What a step does depends on neither the number of ranks nor how sequences are packed: FSDP averages gradients over all ranks, so
  each loss sum is scaled by world size / global trained tokens. Ranks that share a row hold parts of its gradient.
- Every rank makes the same number of forward and backward passes: those with fewer rows run one without a trained token.
- Nothing is written to the weights before the loss and the gradient norm are known to be finite on every rank.
- Recomputed activations, offload and shared rows change where and when a step is computed, never what it does.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from ..configs.backends import Fsdp2
from ..configs.schema import Model, Optimizer
from ..errors import ConfigError
from . import attention, checkpoint, lora, prefixes
from .backend import PackedRow, PolicyLoss, StepResult, require_finite, require_trained
from .batch import scoring_row
from .context_parallel import check_heads
from .logprobs import token_logprobs
from .model import load_model
from .parts import Parts
from .ranks import check_rows, choose_device, maximum_of, to_device, together


class Fsdp2Backend:
    """Implements `Backend`.

    Args:
        model: path and compute dtype of the policy.
        optimizer: AdamW; its learning rate and warm-up are read by the caller, who gives each step its rate.
        config: how the model is held; `ranks` and `tokens_per_microbatch` are the caller's.
        temperature: log-probs and entropies are those of softmax(logits / temperature).
        timeout_s: longest that a rank waits for the others in any collective.

    Raises:
        ConfigError: the model cannot be loaded or held so, there is no such device, or the rendezvous variables are incomplete.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, config: Fsdp2, *, temperature: float, timeout_s: float
    ) -> None:
        self._temperature = temperature
        self._source = model.path
        self._clip_norm = optimizer.clip_norm
        self.device = choose_device(config.device)
        if config.offload and self.device.type == "cpu":
            raise ConfigError(
                "learner.backend.offload=true keeps what a GPU does not need right now in the host's memory, and this learner "
                "runs on the CPU; allowed here is false"
            )
        dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        self._attention = attention.implementation(self.device, dtype, shared=config.context_parallel > 1)
        self._model = self._load_model(model.path)
        check_heads(self._model.config, config.context_parallel)
        self._adapted = config.lora_rank > 0
        if self._adapted:
            lora.adapt(self._model, config.lora_rank)
        if config.recompute:
            _recompute(self._model)
        if config.compile:
            attention.hide_from_compiler()
            for layer in self._layers():
                layer.compile(dynamic=True)
        self._parts = Parts(self.device, config.context_parallel, timeout_s)
        self.rank, self.world_size = self._parts.rank, self._parts.size
        self.data_rank, self.data_size = self._parts.data_rank, self._parts.data_size
        self._context = self._parts.context
        # Elsewhere each sequence must have keys of its own.
        self.shares_prefixes = self._attention == attention.VARLEN_SDPA and self._context.size == 1
        self._shard(dtype, config.offload)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in self._parameters if p.ndim > 1], "weight_decay": optimizer.weight_decay},
                {"params": [p for p in self._parameters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
        )
        self._saver = checkpoint.Saver(self._parts.apart())

    def logprobs(self, rows: Sequence[PackedRow], temperature: float | None = None) -> list[torch.Tensor]:
        """See `Backend.logprobs`."""
        with together("computing log-probs"), torch.no_grad():
            padded, _ = self._even(self._context.first(rows))
            return [self._score(row, temperature or self._temperature)[0].cpu() for row in padded][: len(rows)]

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

    def save(self, directory: Path, state: checkpoint.CheckpointState) -> Future[None]:
        """See `Backend.save`."""
        with together(f"saving {directory}"):
            return self._saver.save(directory, self._model, self._optimizer, state)

    def load(self, directory: Path) -> checkpoint.CheckpointState:
        """See `Backend.load`."""
        with together(f"loading {directory}"):
            return checkpoint.load(directory, self._model, self._optimizer, of=self._source)

    def export(self, directory: Path) -> None:
        """See `Backend.export`."""
        with together(f"exporting {directory}"):
            checkpoint.export(directory, self._model, self._gathered(self._as_stored), self._source)

    def close(self) -> None:
        """See `Backend.close`. Sharded tensors must be gone before the process group is, or the exit aborts now and then."""
        self._saver.close()
        del self._model, self._optimizer, self._parameters
        gc.collect()
        self._parts.leave()

    def _as_stored(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """transformers fuses experts in memory; checkpoints and engines know them one by one. Adapters are merged."""
        return revert_weight_conversion(self._model, lora.merged(tensors))

    def _gathered(
        self, form: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective. One unit after the other, whole and brought into `form`."""
        modules: list[tuple[str, torch.nn.Module]] = list(self._model.named_modules())
        for prefix, module in modules:
            if not isinstance(module, FSDPModule):
                continue
            with together("gathering weights"):
                module.unshard()
            try:
                # Units below this one are still sharded; they come in their turn.
                unit = {
                    f"{prefix}.{name}" if prefix else name: parameter.detach()
                    for name, parameter in module.named_parameters()
                    if not isinstance(parameter, DTensor)
                }
                for name, tensor in form(unit).items():
                    # A copy, because the gathered storage is freed on `reshard`.
                    yield name, tensor.clone(memory_format=torch.contiguous_format)
            finally:
                module.reshard()

    def _shard(self, dtype: torch.dtype, offload: bool) -> None:
        mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("ranks",))
        precision = MixedPrecisionPolicy()
        if dtype is not torch.float32:
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        place = CPUOffloadPolicy() if offload else OffloadPolicy()
        for layer in self._layers():
            fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=place)
        fully_shard(self._model, mesh=mesh, mp_policy=precision, offload_policy=place)

    def _layers(self) -> list[torch.nn.Module]:
        kinds = self._model._no_split_modules or ()
        return [module for module in self._model.modules() if type(module).__name__ in kinds]

    def _score(self, row: PackedRow, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies, float32[N] each on the device, 0 where not trained."""
        tree = prefixes.tree(row) if self.shares_prefixes else prefixes.whole(row)
        kept = row.token_ids[tree.kept], row.position_ids[tree.kept], tree.cu_seqlens
        token_ids, position_ids, cu_seqlens = self._context.fill(*kept)
        part = self._context.part(len(token_ids))
        targets = row.trained.nonzero().squeeze(1)
        predicting = tree.where[targets - 1]
        mine = (predicting >= part.start) & (predicting < part.stop)
        predicting, targets = (places[mine].to(self.device) for places in (predicting, targets))
        inputs = attention.forward_arguments(self._attention, cu_seqlens, self.device, self._context, tree.heads)
        inputs["input_ids"] = token_ids[None, part].to(self.device)
        inputs["position_ids"] = position_ids[None, part].to(self.device)
        wanted = row.token_ids.to(self.device)[targets]
        chosen, entropy = self._say(inputs, predicting - part.start, wanted, temperature)
        zeros = torch.zeros(len(row.token_ids), device=self.device)
        both = torch.stack([zeros.index_copy(0, targets, chosen), zeros.index_copy(0, targets, entropy)])
        logprobs, entropies = self._context.complete(both)
        return logprobs, entropies

    def _load_model(self, path: str) -> PreTrainedModel:
        return load_model(path, self._attention)

    def _say(
        self, inputs: dict[str, Any], places: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model, having read up to `places` int64[K], says of the tokens `targets` int64[K] that come next: log-probs and
        entropies, float32[K] each."""
        return token_logprobs(self._model(logits_to_keep=places, **inputs).logits[0], targets, temperature)

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

    def _even(self, rows: Sequence[PackedRow]) -> tuple[list[PackedRow], int]:
        """This rank's rows, filled up to the largest number on any rank and to at least one; trained tokens on all ranks."""
        check_rows(rows)
        counts = self._parts.gather(torch.tensor([[len(rows), sum(int(row.trained.sum()) for row in rows)]]))
        missing = max(1, int(counts[:, 0].max())) - len(rows)
        return [*rows, *[scoring_row([[0]])] * missing], int(counts[:, 1].sum())


def _recompute(model: PreTrainedModel) -> None:
    """Keep only what enters a layer, and compute the rest again on the way back."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()  # which only reentrant checkpoints need
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # what transformers asks for; the layer's parts stay as they are, without dropout
