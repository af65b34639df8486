"""AdamW steps of a Megatron-core model: each copy is split over ranks, data ranks have copies, and one step serves all of them.

Invariants:
- Master weights, gradients and AdamW moments are float32; bfloat16 is for computing and serving only. With `offload` master weights
  and moments are in the host's memory (`offload.py`).
- Ranks of one data rank share one copy of the model and make the same passes over the same rows. Every data rank makes the same
  number of passes: those with fewer rows add passes without a trained token.
- Only the last stage of the pipeline has logits. It broadcasts its results to the other stages.
- A step depends neither on the layout nor on the packing: each loss sum is divided by the global count of
  trained tokens before its backward pass, and gradients are summed.
- The weights change only after the loss and the gradient norm are finite on every rank.
- The optimizer's state is sharded over data ranks always, also over one: a checkpoint is the same in every layout.
"""

from __future__ import annotations

import functools
import gc
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region

from ...configs.backends import REPLAY, Megatron
from ...configs.schema import Model, Optimizer
from ...weightsync.weight_check import merge
from .. import checkpoint as folders
from .. import lora
from ..backend import Backend, PolicyLoss, ShardedModel
from ..checkpoint_folder import CheckpointState
from ..distributed import all_ranks_agree, choose_device, join, new_gloo_group
from ..freed_memory import FreedMemory
from ..logprobs import token_logprobs
from ..model import make_model, read_routers
from ..packing import MicroBatch, microbatches_of_first
from ..weight_reader import WeightFiles
from . import checkpoint
from .family import MegatronPolicy, build, full_weights, shards_of
from .fit import check_family, check_layout
from .layout import form_groups, groups, layout_here
from .lora import switched_off
from .offload import master_of, move_to_host
from .replay import MegatronReplay
from .rows import LocalMicroBatch, local_row, padded_length

Output = tuple[torch.Tensor, dict[str, torch.Tensor]]  # the loss to backpropagate, and sums to report

RowLoss = Callable[[torch.Tensor, torch.Tensor, MicroBatch], Output]
"""(log-probs float32[N], entropy float32[N], row on the device) -> Output."""


class MegatronModel(ShardedModel):
    """Arguments and errors are those of `Fsdp2Model`. A process that is no rank holds all of the model."""

    def __init__(self, model: Model, layout: Megatron, *, temperature: float, timeout_s: float) -> None:
        self.device = choose_device(layout.device)
        self._temperature = temperature
        self._layout = layout_here(layout)
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        source = make_model(model.path, "eager")  # for its config and its rotary frequencies
        check_family(source.config)
        check_layout(self._layout, source.config)
        weights = WeightFiles(model.path)
        self._joined = join(self.device, timeout_s)
        form_groups(self._layout, timeout_s)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._groups = groups()
        self._data = self._groups.data
        self._multiple = self._layout.pipeline_parallel if self._layout.virtual_stages > 1 else 1  # which stages take
        self.data_rank, self.data_size = self._groups.data.rank(), self._groups.data.size()
        stages = self._groups.stages
        self.leads_rows = self._groups.copy.rank() == 0 and stages.rank() == stages.size() - 1  # which has the logits
        adapters = dict[str, torch.Tensor]()
        if self._layout.lora_rank:
            lora.adapt(source, self._layout.lora_rank)
            adapters = {name: one.detach() for name, one in source.named_parameters() if lora.ADAPTERS in name}
        self._parts = build(source, self._layout, self._dtype, self.device, adapters)
        self._choices = self._replay = None if self.routers is None else MegatronReplay(self._parts)
        self._passed = self._prepared()
        with torch.no_grad(), FreedMemory() as freed:
            for parameter, shard in shards_of(self._parts, ChainMap(adapters, cast(Any, weights))):
                self._write(parameter, shard)
                freed.passed(shard.nbytes)
        weights.close()
        self._source = source

    def logprobs(self, rows: Sequence[MicroBatch], temperature: float | None = None) -> list[torch.Tensor]:
        with all_ranks_agree("computing log-probs"), torch.no_grad():
            shared = rows
            for group in (self._groups.copy, self._groups.stages):
                shared = microbatches_of_first(shared, self.device, group)
            padded, _ = self._pad_passes(shared)

            def keep(logprobs: torch.Tensor, _: torch.Tensor, row: MicroBatch) -> Output:
                return logprobs.sum(), {"logprobs": logprobs}

            if not padded:
                return []
            found = self._passes(padded, keep, temperature or self._temperature, forward_only=True)
            lengths = [len(row.token_ids) for row in shared]
            flat = torch.zeros(sum(lengths), device=self.device)
            if found:
                flat = torch.cat([one["logprobs"] for one in found[: len(shared)]] or [flat])
            stages = self._groups.stages
            dist.broadcast(flat, group_src=stages.size() - 1, group=stages)
            return list(flat.cpu().split(lengths))[: len(rows)]

    def close(self) -> None:
        del self._parts, self._passed
        gc.collect()
        if self._joined:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def _prepared(self) -> list[Any]:
        return list(self._parts)

    def _write(self, parameter: Any, shard: torch.Tensor) -> None:
        parameter.copy_(shard)

    def _passes(
        self, rows: Sequence[MicroBatch], row_loss: RowLoss, temperature: float, *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        """Forward, and backward unless `forward_only`, through every row. On the last stage the reported sums of each."""
        layout, context = self._layout, self._groups.context.rank()
        unit = layout.tensor_parallel * (2 * layout.context_parallel if layout.context_parallel > 1 else 1)
        lengths = [padded_length(row, unit, layout.context_parallel) for row in rows]
        if layout.pipeline_parallel > 1:  # stages agree on one shape beforehand
            lengths = [max(lengths)] * len(lengths)
        work = [
            (row.to(self.device), local_row(row, length, layout.context_parallel, context))
            for row, length in zip(rows, lengths, strict=True)
        ]

        if self._replay is not None:
            self._replay.begin(recomputes="recompute" in layout.options and not forward_only)

        def forward(iterator: Iterator[tuple[MicroBatch, LocalMicroBatch]], part: torch.nn.Module) -> tuple[Any, Any]:
            row, local = next(iterator)
            if self._replay is not None:
                self._replay.load(self._part_of_tensor_rank(local.experts), self.device)
            output = part(
                local.token_ids.to(self.device),
                local.position_ids.to(self.device),
                None,
                labels=local.sources.to(self.device),
                packed_seq_params=_packing(local, self.device),
            )
            return output, functools.partial(self._loss_of_row, row, local, row_loss, temperature)

        iterators = [iter(work) for _ in self._passed]
        several = len(self._passed) > 1
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if several else iterators[0],
            model=self._passed if several else self._passed[0],
            num_microbatches=len(work),
            seq_length=max(lengths),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _part_of_tensor_rank(self, rows: torch.Tensor | None) -> torch.Tensor | None:
        """Those of the tokens that this rank's routers read: tensor ranks split them (sequence parallel)."""
        return None if rows is None else rows.chunk(self._layout.tensor_parallel)[self._groups.tensor.rank()]

    def _loss_of_row(
        self, row: MicroBatch, local: LocalMicroBatch, row_loss: RowLoss, temperature: float, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The last stage's `loss_func`: the loss from the scores of the whole row, gathered over context ranks."""
        scored = token_logprobs(logits, local.targets.to(self.device), temperature, self._groups.tensor)
        zeros, positions = torch.zeros(len(row.token_ids), device=self.device), local.positions.to(self.device)
        # Every context rank has the whole row's loss, and backpropagates through its own tokens only.
        logprobs, entropy = (
            reduce_from_tensor_model_parallel_region(zeros.index_copy(0, positions, one), group=self._groups.context)
            for one in scored
        )
        backward_from, report = row_loss(logprobs, entropy, row)
        count = torch.zeros([], dtype=torch.int, device=self.device)
        return backward_from, count, {name: value.detach() for name, value in report.items()}


class MegatronBackend(Backend, MegatronModel):
    """Arguments are those of `Fsdp2Backend`."""

    shares_prefixes = False

    def __init__(
        self, model: Model, optimizer: Optimizer, layout: Megatron, *, temperature: float, timeout_s: float
    ) -> None:
        self._path = model.path
        self._rules = optimizer
        if REPLAY in layout.options:
            self.routers = read_routers(model.path)
        super().__init__(model, layout, temperature=temperature, timeout_s=timeout_s)
        checkpoint.begin_states(self._optimizer)
        self._saver = folders.Saver(new_gloo_group(timeout_s))

    def _backward(self, rows: Sequence[MicroBatch], loss: PolicyLoss, tokens: int) -> dict[str, float]:
        def row_loss(logprobs: torch.Tensor, entropy: torch.Tensor, row: MicroBatch) -> Output:
            output = loss(logprobs, entropy, row)
            return output.loss_sum / tokens, {**output.sums, "loss": output.loss_sum}

        return self._total(self._passes(rows, row_loss, self._temperature, forward_only=False))

    def _clip_gradients(self) -> float:
        self._optimizer.prepare_grads()
        return float(self._optimizer.get_grad_norm())

    def _zero_gradients(self) -> None:
        for part in self._passed:
            part.zero_grad_buffer()
        self._optimizer.zero_grad()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._layout.lora_rank:
            return self._gathered(full_weights(self._parts))
        adapters = self._gathered(full_weights(self._parts, adapters=True))
        return (lora.as_pushed(name, factor) for name, factor in adapters)

    def without_adapters(self) -> lora.WithoutAdapters | None:
        if not self._layout.lora_rank:
            return None
        return lora.WithoutAdapters(self, functools.partial(switched_off, self._parts))

    def _gathered(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            with all_ranks_agree("gathering weights"):
                named = next(weights, None)
            if named is None:
                return
            yield named

    def save(self, directory: Path, state: CheckpointState) -> Future[None]:
        with all_ranks_agree(f"saving {directory}"):
            return checkpoint.save(self._saver, directory, self._parts, self._optimizer, state)

    def load(self, directory: Path) -> CheckpointState:
        with all_ranks_agree(f"loading {directory}"):
            return checkpoint.load(directory, self._passed, self._optimizer, self._layout.lora_rank, of=self._path)

    def export(self, directory: Path) -> None:
        with all_ranks_agree(f"exporting {directory}"):
            adapters, base = {}, self._gathered(full_weights(self._parts))
            if self._layout.lora_rank:
                adapters = dict(self.named_weights())
            merged = merge(adapters, base) if adapters else base  # on rank 0; others have neither
            folders.export(directory, self._source, merged, self._path)

    def close(self) -> None:
        self._saver.close()
        del self._optimizer
        super().close()

    def _prepared(self) -> list[Any]:
        offloads = "offload" in self._layout.options
        wrapped, self._optimizer = _distribute(self._parts, self._rules, self._dtype, offloads=offloads)
        return wrapped

    def _write(self, parameter: Any, shard: torch.Tensor) -> None:
        """Write the optimizer's master weights too, unrounded."""
        super()._write(parameter, shard)
        for one in self._optimizer.chained_optimizers:
            if parameter in one.model_param_group_index_map and (master := master_of(one, parameter)) is not None:
                held = one._get_model_param_range_map(parameter)["param"]
                master.copy_(shard.reshape(-1)[held.start : held.end])

    def _total(self, found: Sequence[dict[str, torch.Tensor]]) -> dict[str, float]:
        stages = self._groups.stages
        sums: list[dict[str, float]] = [{}]
        if stages.rank() == stages.size() - 1:
            names = sorted(found[0])
            stacked = torch.stack([sum((one[name].double() for one in found), torch.zeros(())) for name in names])
            dist.all_reduce(stacked, group=self._groups.data)
            sums = [dict(zip(names, stacked.tolist(), strict=True))]
        if stages.size() > 1:
            dist.broadcast_object_list(sums, group_src=stages.size() - 1, group=stages)
        return sums[0]


def _distribute(
    parts: Sequence[MegatronPolicy], optimizer: Optimizer, dtype: torch.dtype, *, offloads: bool
) -> tuple[list[Any], Any]:
    """`parts` with gradients in float32 buffers that are summed over data ranks, and AdamW with its state sharded over them."""
    how = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    wrapped: list[Any] = [
        DistributedDataParallel(part.config, how, part, disable_bucketing=index > 0) for index, part in enumerate(parts)
    ]
    config = OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        clip_grad=optimizer.clip_norm,
        use_distributed_optimizer=True,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = offloads  # or it makes master weights on the device
    made = get_megatron_optimizer(config, wrapped)
    if offloads:
        move_to_host(cast(Any, made).chained_optimizers)
    for group in made.param_groups:  # which only Megatron's own scheduler would do; 0 for norms
        group["weight_decay"] = optimizer.weight_decay * group["wd_mult"]
    return wrapped, made


def _packing(local: LocalMicroBatch, device: torch.device) -> PackedSeqParams:
    cuts = torch.tensor(local.cu_seqlens, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in pairwise(local.cu_seqlens))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cuts,
        cu_seqlens_kv=cuts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
