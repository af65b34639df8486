"""A model held by FSDP2: `fully_shard` over a transformers causal LM, one unit per layer and one for the rest.

Invariants:
- Weights are float32 and sharded over all ranks; bfloat16 is for computing, gathering and serving only.
- Every rank makes the same number of passes: those with fewer rows make one without a trained token.
- Recomputed activations, offload and shared rows change where and when something is computed, never what.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from ...configs.backends import Fsdp2
from ...configs.schema import Model
from ...errors import ConfigError
from .. import prefixes
from ..backend import PackedRow
from ..batch import scoring_row
from ..logprobs import token_logprobs
from ..model import load_model, read_config
from ..ranks import check_rows, choose_device, together
from . import attention, liger, lora
from .context_parallel import check_heads
from .parts import Parts


class Fsdp2Model:
    """Implements `Scorer`.

    Args:
        model: path and compute dtype.
        config: how it is held; `ranks` and `tokens_per_microbatch` are the caller's.
        temperature: log-probs and entropies are those of softmax(logits / temperature).
        timeout_s: longest that a rank waits for the others in any collective.

    Raises:
        ConfigError: the model cannot be loaded or held so, there is no such device, or the rendezvous variables are incomplete.
    """

    def __init__(self, model: Model, config: Fsdp2, *, temperature: float, timeout_s: float) -> None:
        self._temperature = temperature
        self.device = choose_device(config.device)
        if config.offload and self.device.type == "cpu":
            raise ConfigError(
                "learner.backend.offload=true keeps what a GPU does not need right now in the host's memory, and this learner "
                "runs on the CPU; allowed here is false"
            )
        if config.liger:
            family = read_config(model.path)
            liger.check(self.device, family)
            liger.apply(family.model_type)
        dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
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
        self.shares_prefixes = self._context.size == 1  # a rank's part of a row may end within a prompt
        self._shard(dtype, config.offload)

    def logprobs(self, rows: Sequence[PackedRow], temperature: float | None = None) -> list[torch.Tensor]:
        """See `Scorer.logprobs`."""
        with together("computing log-probs"), torch.no_grad():
            padded, _ = self._even(self._parts.first(rows))
            return [self._score(row, temperature or self._temperature)[0].cpu() for row in padded][: len(rows)]

    def close(self) -> None:
        """See `Scorer.close`. Sharded tensors must be gone before the process group is, or the exit aborts now and then."""
        del self._model
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
        inputs = attention.forward_arguments(cu_seqlens, self.device, self._context, tree.heads)
        inputs["input_ids"] = token_ids[None, part].to(self.device)
        inputs["position_ids"] = position_ids[None, part].to(self.device)
        wanted = row.token_ids.to(self.device)[targets]
        chosen, entropy = self._say(inputs, predicting - part.start, wanted, temperature)
        zeros = torch.zeros(len(row.token_ids), device=self.device)
        both = torch.stack([zeros.index_copy(0, targets, chosen), zeros.index_copy(0, targets, entropy)])
        logprobs, entropies = self._context.complete(both)
        return logprobs, entropies

    def _load_model(self, path: str) -> PreTrainedModel:
        return load_model(path, attention.PACKED)

    def _say(
        self, inputs: dict[str, Any], places: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the model, having read up to `places` int64[K], says of the tokens `targets` int64[K] that come next: log-probs and
        entropies, float32[K] each."""
        return token_logprobs(self._model(logits_to_keep=places, **inputs).logits[0], targets, temperature)

    def _even(self, rows: Sequence[PackedRow]) -> tuple[list[PackedRow], int]:
        """This rank's rows, filled up to the largest number on any rank and to at least one; trained tokens on all ranks."""
        check_rows(rows)
        counts = self._parts.gather(torch.tensor([[len(rows), sum(int(row.trained.sum()) for row in rows)]]))
        missing = max(1, int(counts[:, 0].max())) - len(rows)
        return [*rows, *[scoring_row([[0]])] * missing], int(counts[:, 1].sum())


class WithoutAdapters:
    """Implements `Scorer`: the model that `policy` adapts, as it is without its adapters. Holds nothing of its own."""

    def __init__(self, policy: Fsdp2Model) -> None:
        self._policy = policy

    def logprobs(self, rows: Sequence[PackedRow], temperature: float | None = None) -> list[torch.Tensor]:
        """See `Scorer.logprobs`."""
        with lora.off(self._policy._model):
            return self._policy.logprobs(rows, temperature)

    def close(self) -> None:
        """See `Scorer.close`. The policy stays."""


def _recompute(model: PreTrainedModel) -> None:
    """Keep only what enters a layer, and compute the rest again on the way back."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()  # which only reentrant checkpoints need
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # what transformers asks for; the layer's parts stay as they are, without dropout
