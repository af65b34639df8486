"""AdamW steps of a model that FSDP2 shards: `fully_shard` over a transformers causal LM, layer by layer.

Invariants:
- Weights, gradients and AdamW moments are float32 and sharded over all ranks; bfloat16 is only for computing, gathering, serving.
- Every rank makes the same number of passes: ranks with fewer rows add passes without a trained token.
- Recomputed activations, offload, shared rows and divided experts change where and when values are computed, never the values.
- A step depends on neither the number of ranks nor the packing: FSDP averages gradients over all ranks, so each loss sum is scaled
  by world size / global trained tokens. Ranks that share a row have parts of its gradient.
- The weights change only after the loss and the gradient norm are finite on every rank.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_layers import GradientCheckpointingLayer

from ...configs.backends import FROZEN_VISION, REPLAY, Fsdp2
from ...configs.schema import Model, Optimizer
from ...errors import ConfigError
from .. import checkpoint as folders
from .. import lora
from ..backend import Backend, PolicyLoss, ShardedModel
from ..checkpoint_folder import CheckpointState
from ..distributed import all_ranks_agree, choose_device, device_of_sums, new_gloo_group
from ..freed_memory import FreedMemory
from ..logprobs import token_logprobs
from ..model import has_images, make_model, read_config, read_routers
from ..packing import MicroBatch, microbatches_of_first
from ..weight_reader import WeightReader
from . import attention, checkpoint, experts, gathering, liger
from .images import RowImages
from .parallelism import DataParallelGroups, check_experts, check_heads
from .replay import replay_in

TOGETHER, ON_CPU = 1 << 26, {"cpu": 0}
"""Parameters that FSDP gathers at once on an accelerator, at least: each call costs the host about a millisecond, in which a layer
of a small model is computed. Ranks on CPUs, which share the memory of a host, gather one layer at a time."""


class Fsdp2Model(ShardedModel):
    """Log-probs and entropies are those of softmax(logits / temperature). Raises ConfigError: the model cannot be loaded or
    sharded so, there is no such device, or the rendezvous variables are incomplete."""

    def __init__(self, model: Model, config: Fsdp2, *, temperature: float, timeout_s: float) -> None:
        self._temperature = temperature
        self.device = choose_device(config.device)
        if "offload" in config.options and self.device.type == "cpu":
            raise ConfigError(
                "learner.backend.options=[offload] keeps what a GPU does not need right now in the host's memory, and this learner "
                "runs on the CPU; leave it out"
            )
        if "liger" in config.options:
            family = read_config(model.path)
            liger.check(self.device, family)
            liger.apply(family.model_type)
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        self._model = self._make_model(model.path)
        kinds = self._model._no_split_modules or ()
        self._layers = [module for module in self._model.modules() if type(module).__name__ in kinds]
        weights = WeightReader(model.path, self._model, self._not_stored())
        places = _places(self._model)
        check_heads(self._model.config, config.context_parallel)
        check_experts(self._model.config, config.expert_parallel)
        self._choices = replay_in(self._model) if self.routers is not None else None
        self._images = RowImages(self._model, model.path) if has_images(model.path) else None
        if FROZEN_VISION in config.options:
            self._model.model.visual.requires_grad_(False)
        self._adapted = config.lora_rank > 0
        if self._adapted:
            lora.adapt(self._model, config.lora_rank)
        if "recompute" in config.options:
            _recompute(self._model)
        if "compile" in config.options:
            in_half = self.device.type == "cuda" and self._dtype in attention.FLASH_DTYPES
            attention.hide_from_compiler(flash=in_half and config.context_parallel == 1)
            experts.hide_from_compiler()
            for layer in self._layers:  # without the hooks that FSDP calls before and after it
                layer.forward = torch.compile(layer.forward, dynamic=True)
        self._groups = DataParallelGroups(self.device, config.context_parallel, config.expert_parallel, timeout_s)
        self.rank, self.world_size = self._groups.rank, self._groups.size
        self.data_rank, self.data_size = self._groups.data_rank, self._groups.data_size
        self._data, self._context = self._groups.data, self._groups.context
        self.leads_rows = self._context is None or self._context.rank == 0
        self.shares_prefixes = self._context is None  # a rank's part of a row may end within a prompt
        divided = self._groups.experts
        try:
            self._experts = None if divided is None else experts.DividedExperts(self._model, divided)
            self._shard(self._dtype, "offload" in config.options)
            self._read(weights, places)
        except ConfigError:
            self.close()
            raise

    def logprobs(self, rows: Sequence[MicroBatch], temperature: float | None = None) -> list[torch.Tensor]:
        used = temperature or self._temperature
        return self._computed(rows, lambda row: self._score(row, used)[:, 0].contiguous())

    def top_logprobs(self, rows: Sequence[MicroBatch], count: int) -> list[torch.Tensor]:
        def likeliest(row: MicroBatch) -> torch.Tensor:
            def outputs_at(inputs: dict[str, Any], positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                logits = self._model(logits_to_keep=positions, **inputs).logits[0]
                found = logits.topk(count).indices
                wanted = torch.cat([row.token_ids.to(self.device)[targets, None], found], 1)
                return torch.cat([token_logprobs(logits, wanted, self._temperature)[0], found.float()], 1)

            return self._by_token(row, outputs_at)

        return self._computed(rows, likeliest)

    def _computed(self, rows: Sequence[MicroBatch], of_row: Callable[[MicroBatch], torch.Tensor]) -> list[torch.Tensor]:
        """Collective. What `of_row` gives for each of `rows`, on CPU, without gradient."""
        with all_ranks_agree("computing log-probs"), torch.no_grad():
            context = self._context
            own = rows if context is None else microbatches_of_first(rows, self.device, context.group)
            padded, _ = self._pad_passes(own)
            found = [of_row(row).cpu() for row in padded][: len(rows)]
            self._reshard()  # no backward pass frees what is gathered
            return found

    def close(self) -> None:
        """See `Scorer.close`. Sharded tensors must be freed before the process group, or the exit aborts now and then."""
        del self._model
        gc.collect()
        self._groups.leave()

    def _as_stored(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Undo the fusion of experts that transformers makes in memory; merge adapters."""
        return revert_weight_conversion(self._model, lora.merged(tensors))

    def _gathered(
        self, form: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], *, only: str = ""
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Collective. On rank 0 the parameters whose names contain `only`, one layer after the other, converted by `form`."""
        self._reshard()
        with FreedMemory() as freed:
            for unit in self._units():
                whole: dict[str, torch.Tensor] = {}
                for name, parameter in unit.items():
                    if only in name:
                        with all_ranks_agree("gathering weights"):
                            whole[name] = gathering.to_first(parameter, self._dtype, self._parts(name))
                        freed.passed(parameter.nbytes)
                if self.rank == 0:
                    yield from _one_by_one(form(whole))
        if self.rank == 0 and not only:
            for name, buffer in form(self._stored_buffers()).items():
                yield name, buffer.clone()

    def _reshard(self) -> None:
        """Free what FSDP keeps gathered after a forward pass: the root, and on a single rank every layer."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _units(self) -> list[dict[str, torch.nn.Parameter]]:
        """What is gathered at the same time: a layer, whose parameters may be converted together, else a module or parameter."""
        layers = set(map(id, self._layers))
        units = [
            {f"{prefix}.{name}": parameter for name, parameter in layer.named_parameters()}
            for prefix, layer in self._model.named_modules()
            if prefix and id(layer) in layers
        ]
        within = {name for unit in units for name in unit}
        return [*lora.by_layer((n, p) for n, p in self._model.named_parameters() if n not in within), *units]

    def _stored_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that a checkpoint has; every rank holds them whole."""
        return {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, module in self._model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }

    def _shard(self, dtype: torch.dtype, offload: bool) -> None:
        mesh = init_device_mesh(self.device.type, (self.world_size,), mesh_dim_names=("ranks",))
        precision = MixedPrecisionPolicy()
        if dtype is not torch.float32:
            precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        policy = CPUOffloadPolicy() if offload else OffloadPolicy()
        if self._experts is not None:
            self._experts.shard(precision, policy)
        # A single rank gathers from no other: its layers keep what they compute with from the forward pass to the backward one.
        again = self.world_size > 1 or offload
        for layers in self._sharded_together():
            fully_shard(layers, mesh=mesh, mp_policy=precision, offload_policy=policy, reshard_after_forward=again)
        fully_shard(self._model, mesh=mesh, mp_policy=precision, offload_policy=policy)

    def _sharded_together(self) -> list[list[torch.nn.Module]]:
        """The layers, cut into lists of neighbors whose parameters FSDP gathers and reduces in one call."""
        least = ON_CPU.get(self.device.type, TOGETHER)
        within = {id(layer): prefix.rpartition(".")[0] for prefix, layer in self._model.named_modules()}
        lists: list[list[torch.nn.Module]] = []
        for layer in self._layers:
            before = lists[-1] if lists else []
            if before and within[id(before[0])] == within[id(layer)] and _size(before) < least:
                before.append(layer)
            else:
                lists.append([layer])
        return lists

    def _parts(self, name: str) -> int:
        """Into how many parts a parameter is divided before it is sharded (`gathering.py`)."""
        return self._experts.group.size if self._experts is not None and name in self._experts.names else 1

    def _score(self, row: MicroBatch, temperature: float, candidates: torch.Tensor | None = None) -> torch.Tensor:
        """float32[N, 2] on the device, 0 where not trained: the log-prob and the entropy of each token. With `candidates` int64[N,
        k] float32[N, 2 + k]: between the two the log-probs of these tokens in its place."""

        def outputs_at(inputs: dict[str, Any], positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            wanted = row.token_ids.to(self.device)[targets]
            if candidates is not None:
                wanted = torch.cat([wanted[:, None], candidates.to(self.device)[targets]], 1)
            chosen, entropy = self._outputs_at(inputs, positions, wanted, temperature)
            return torch.cat([chosen if chosen.ndim == 2 else chosen[:, None], entropy[:, None]], 1)

        return self._by_token(row, outputs_at)

    def _by_token(
        self, row: MicroBatch, outputs_at: Callable[[dict[str, Any], torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """float32[N, C] on the device, 0 where not trained: what `outputs_at` gives, float32[K, C], for the inputs of the model,
        the positions int64[K] before the trained tokens, and where in `row` these are, int64[K]."""
        tree = attention.plan_sharing(row) if self.shares_prefixes else attention.unshared(row)
        token_ids, position_ids, cu_seqlens = row.token_ids[tree.kept], row.position_ids[tree.kept], tree.cu_seqlens
        part = slice(0, len(token_ids))
        if self._context is not None:
            token_ids, position_ids, cu_seqlens = self._context.fill(token_ids, position_ids, cu_seqlens)
            part = self._context.part(len(token_ids))
        targets = row.loss_mask.nonzero().squeeze(1)
        predicting = tree.where[targets - 1]
        local = (predicting >= part.start) & (predicting < part.stop)
        predicting, targets = (positions[local].to(self.device) for positions in (predicting, targets))
        inputs = attention.forward_arguments(cu_seqlens, self.device, self._context, tree.heads)
        inputs["input_ids"] = token_ids[None, part].to(self.device)
        inputs["position_ids"] = position_ids[None, part].to(self.device)
        if self._images is not None:
            inputs["position_ids"] = self._images.load(row, tree.kept, self.device)
        if self._choices is not None:
            recorded = None if row.experts is None else row.experts[tree.kept]
            if recorded is not None and self._context is not None:
                recorded = self._context.fill_with_zeros(recorded)[part]
            self._choices.load(recorded, self.device)
        outputs = outputs_at(inputs, predicting - part.start, targets)
        whole = outputs.new_zeros(len(row.token_ids), outputs.shape[1]).index_copy(0, targets, outputs)
        return whole if self._context is None else self._context.complete(whole)

    def _make_model(self, path: str) -> PreTrainedModel:
        return make_model(path, attention.PACKED)

    def _not_stored(self) -> Collection[str]:
        """Parameters that the model's files need not have."""
        return ()

    @torch.no_grad()
    def _read(self, weights: WeightReader, places: Mapping[str, tuple[torch.nn.Module, str]]) -> None:
        """Write this rank's part of every parameter, and the buffers."""

        def held(name: str) -> torch.Tensor:
            module, attribute = places[name]
            return getattr(module, attribute)

        with FreedMemory() as freed:
            for name, tensor in weights.read(lambda name: gathering.rows_here(held(name), self._parts(name))):
                here = held(name)
                (here.to_local() if isinstance(here, DTensor) else here).copy_(tensor)
                freed.passed(tensor.nbytes)
        weights.close()

    def _outputs_at(
        self, inputs: dict[str, Any], positions: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the tokens `targets`, int64[K] or int64[K, M], after the positions `positions` int64[K], and entropies
        there, float32[K]."""
        return token_logprobs(self._model(logits_to_keep=positions, **inputs).logits[0], targets, temperature)


class Fsdp2Backend(Backend, Fsdp2Model):
    """The caller reads the learning rate and warm-up of `optimizer`, and gives each step its rate."""

    def __init__(
        self, model: Model, optimizer: Optimizer, config: Fsdp2, *, temperature: float, timeout_s: float
    ) -> None:
        if REPLAY in config.options:
            self.routers = read_routers(model.path)
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
            betas=optimizer.betas,
            fused=self.device.type == "cuda",  # CUDA's kernel, one for all tensors, and one call of FSDP's for them
        )
        self._saver = folders.Saver(new_gloo_group(timeout_s))

    def _backward(self, rows: Sequence[MicroBatch], loss: PolicyLoss, tokens: int) -> dict[str, float]:
        totals: dict[str, torch.Tensor] = {}
        scale, where = self.world_size / tokens, device_of_sums(self.device)
        for row in rows:
            scores, on_device = self._score(row, self._temperature, row.teacher_ids), row.to(self.device)
            if row.teacher_ids is not None:
                on_device = msgspec.structs.replace(on_device, candidate_logprobs=scores[:, 1:-1])
            output = loss(scores[:, 0], scores[:, -1], on_device)
            (output.loss_sum * scale).backward()
            for name, value in {**output.sums, "loss": output.loss_sum}.items():
                totals[name] = totals.get(name, 0.0) + value.detach().to(where).double()
        if self._experts is not None:
            self._experts.average_gradients()
        names = sorted(totals)
        stacked = torch.stack([totals[name] for name in names])
        dist.all_reduce(stacked, group=self._data)
        return dict(zip(names, stacked.tolist(), strict=True))

    @torch.no_grad()
    def _clip_gradients(self) -> float:
        # Every number of a gradient is on one rank, in DTensors of several meshes where experts are divided.
        local = [p.grad.to_local() for p in self._parameters if isinstance(p.grad, DTensor)]
        square = torch.nn.utils.get_total_norm(local).square()
        dist.all_reduce(square)
        factor = (self._clip_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(local, factor)  # pyright: ignore[reportPrivateImportUsage]
        return math.sqrt(float(square))

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._adapted:
            return self._gathered(lora.only_adapters, only=lora.ADAPTERS)
        return self._gathered(self._as_stored)

    def without_adapters(self) -> lora.WithoutAdapters | None:
        if not self._adapted:
            return None
        from peft.helpers import rescale_adapter_scale

        # peft's own switch would freeze and unfreeze parameters that FSDP2 has copied.
        return lora.WithoutAdapters(self, lambda: rescale_adapter_scale(self._model, 0))

    def save(self, directory: Path, state: CheckpointState) -> Future[None]:
        with all_ranks_agree(f"saving {directory}"):
            return checkpoint.save(self._saver, directory, self._model, self._optimizer, state, self._experts)

    def load(self, directory: Path) -> CheckpointState:
        with all_ranks_agree(f"loading {directory}"):
            return checkpoint.load(directory, self._model, self._optimizer, self._experts, of=self._source)

    def export(self, directory: Path) -> None:
        with all_ranks_agree(f"exporting {directory}"):
            folders.export(directory, self._model, self._gathered(self._as_stored), self._source)

    def close(self) -> None:
        self._saver.close()
        del self._optimizer, self._parameters
        super().close()


def _size(modules: Sequence[torch.nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _one_by_one(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each is freed once the caller asks for the next. Those that share memory, as the experts of a layer do, are copied."""
    for name in list(tensors):
        tensor = tensors.pop(name)
        yield name, tensor.clone() if tensor.untyped_storage().nbytes() >= 2 * tensor.nbytes else tensor


def _places(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Of each parameter and buffer by name the module that has it, and as what: adapters and sharding put others in its place."""
    return {
        f"{prefix}.{name}" if prefix else name: (module, name)
        for prefix, module in model.named_modules()
        for name in (*module._parameters, *module._buffers)
    }


def _recompute(model: PreTrainedModel) -> None:
    """Keep only the inputs of a layer and recompute its activations in the backward pass."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.disable_input_require_grads()  # which only reentrant checkpoints need
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # transformers requires it; the layer's modules stay in eval mode, without dropout
