"""The learner on Megatron-core: one copy of the model split over ranks, copies side by side, one optimizer step for all.

Invariants:
- Master weights, gradients and AdamW moments are float32; bfloat16 is for computing and serving only.
- What a step does depends neither on the layout nor on how sequences are packed: each loss sum is divided by the global count of
  trained tokens before its backward pass, and gradients are summed.
- Ranks of one data rank hold one copy of the model among them and make the same passes over the same rows. Every data rank makes
  the same number of passes: those with fewer rows run some without a trained token.
- Only the last stage of the pipeline sees logits; what it finds is told to the others before anybody goes on.
- Nothing is written to the weights before the loss and the gradient norm are known to be finite on every rank.
- The optimizer's state is sharded over data ranks always, also over one: a checkpoint is the same in every layout.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from transformers.core_model_loading import revert_weight_conversion

from ...configs.backends import Megatron
from ...configs.schema import Model, Optimizer
from .. import checkpoint as folders
from ..attention import VARLEN_SDPA
from ..backend import PackedRow, PolicyLoss, StepResult, require_finite, require_trained
from ..batch import scoring_row
from ..model import load_model
from ..ranks import check_rows, choose_device, gather_rows, join, maximum_of, to_device, together
from . import checkpoint
from .family import Policy, build, full_weights, shards_of
from .fit import check_family, check_installed, check_layout
from .layout import form_groups, groups, layout_here
from .rows import LocalRow, local_row, padded_length
from .scores import split_logprobs

Output = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""What the last stage makes of a row: a number to go backward from, and what to report."""

Judge = Callable[[torch.Tensor, torch.Tensor, PackedRow], Output]
"""(log-probs float32[N], entropy float32[N], row on the device) -> Output."""


class MegatronBackend:
    """Implements `Backend`.

    Args:
        model: path and compute dtype of the policy.
        optimizer: AdamW; its learning rate and warm-up are read by the caller, who gives each step its rate.
        layout: how the model is split. Without a launcher's environment this one rank holds all of it.
        temperature: log-probs and entropies are those of softmax(logits / temperature).
        timeout_s: longest that a rank waits for the others in any collective.

    Raises:
        ConfigError: the model cannot be loaded, mapped or split so, there is no such device, or the rendezvous variables are
            incomplete.
    """

    def __init__(
        self, model: Model, optimizer: Optimizer, layout: Megatron, *, temperature: float, timeout_s: float
    ) -> None:
        check_installed(layout)
        self.device = choose_device(layout.device)
        self._temperature = temperature
        self._path = model.path
        self._layout = layout_here(layout)
        dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        source = load_model(model.path, VARLEN_SDPA)
        check_family(source.config)
        check_layout(self._layout, source.config)
        self.shares_prefixes = False
        self._joined = join(self.device, timeout_s)
        form_groups(self._layout, timeout_s)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._among = groups()
        self.data_rank, self.data_size = self._among.data.rank(), self._among.data.size()
        self._parts = build(source, self._layout, dtype, self.device)
        self._wrapped, self._optimizer = _distribute(self._parts, optimizer, dtype)
        self._read(revert_weight_conversion(source, dict(source.state_dict())))
        self._source = source
        torch.nn.Module.to(source, "meta")  # its config is wanted for exports, its weights are not
        checkpoint.begin_states(self._optimizer)

    def logprobs(self, rows: Sequence[PackedRow], temperature: float | None = None) -> list[torch.Tensor]:
        """See `Backend.logprobs`."""
        with together("computing log-probs"), torch.no_grad():
            shared = self._shared(rows)
            padded, _ = self._even(shared)

            def keep(logprobs: torch.Tensor, _: torch.Tensor, row: PackedRow) -> Output:
                return logprobs.sum(), {"logprobs": logprobs}

            found = self._passes(padded, keep, temperature or self._temperature, forward_only=True)
            lengths = [len(row.token_ids) for row in shared]
            flat = torch.zeros(sum(lengths), device=self.device)
            if found:
                flat = torch.cat([one["logprobs"] for one in found[: len(shared)]] or [flat])
            stages = self._among.stages
            dist.broadcast(flat, group_src=stages.size() - 1, group=stages)
            return list(flat.cpu().split(lengths))[: len(rows)]

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

    def save(self, directory: Path, state: folders.CheckpointState) -> Future[None]:
        """See `Backend.save`. Training waits meanwhile."""
        written = Future[None]()
        with together(f"saving {directory}"):
            checkpoint.save(directory, self._parts, self._optimizer, state)
        written.set_result(None)
        return written

    def load(self, directory: Path) -> folders.CheckpointState:
        """See `Backend.load`."""
        with together(f"loading {directory}"):
            return checkpoint.load(directory, self._wrapped, self._optimizer)

    def export(self, directory: Path) -> None:
        """See `Backend.export`."""
        with together(f"exporting {directory}"):
            folders.export(directory, self._source, self.named_weights(), self._path)

    def close(self) -> None:
        """See `Backend.close`."""
        del self._parts, self._wrapped, self._optimizer
        gc.collect()
        if self._joined:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    @torch.no_grad()
    def _read(self, weights: dict[str, torch.Tensor]) -> None:
        """Write full float32 tensors into this rank's parameters, and unrounded into the optimizer's master weights."""
        parameter: Any
        for parameter, shard in shards_of(self._parts, weights):
            parameter.copy_(shard)
            for one in self._optimizer.chained_optimizers:
                if parameter in one.model_param_group_index_map and parameter.dtype is not torch.float32:
                    held = one._get_model_param_range_map(parameter)["param"]
                    parameter.main_param.copy_(shard.reshape(-1)[held.start : held.end])

    def _passes(
        self, rows: Sequence[PackedRow], judge: Judge, temperature: float, *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        """Forward, and backward unless `forward_only`, through every row. On the last stage what `judge` reported of each."""
        layout, context = self._layout, self._among.context.rank()
        unit = layout.tensor_parallel * (2 * layout.context_parallel if layout.context_parallel > 1 else 1)
        lengths = [padded_length(row, unit, layout.context_parallel) for row in rows]
        if layout.pipeline_parallel > 1:  # stages agree on one shape beforehand
            lengths = [max(lengths)] * len(lengths)
        work = [
            (to_device(row, self.device), local_row(row, length, layout.context_parallel, context))
            for row, length in zip(rows, lengths, strict=True)
        ]

        def forward(iterator: Iterator[tuple[PackedRow, LocalRow]], part: torch.nn.Module) -> tuple[Any, Any]:
            row, local = next(iterator)
            output = part(
                local.token_ids.to(self.device),
                local.position_ids.to(self.device),
                None,
                labels=local.sources.to(self.device),
                packed_seq_params=_packing(local, self.device),
            )
            return output, functools.partial(self._judged, row, local, judge, temperature)

        iterators = [iter(work) for _ in self._wrapped]
        several = len(self._wrapped) > 1
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if several else iterators[0],
            model=self._wrapped if several else self._wrapped[0],
            num_microbatches=len(work),
            seq_length=max(lengths),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _judged(
        self, row: PackedRow, local: LocalRow, judge: Judge, temperature: float, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """The last stage's `loss_func`: scores of the whole row, put together over context ranks, judged."""
        scored = split_logprobs(logits, local.targets.to(self.device), temperature, self._among.tensor)
        zeros, places = torch.zeros(len(row.token_ids), device=self.device), local.places.to(self.device)
        # Every context rank has the whole row's loss, and goes backward through its own tokens only.
        logprobs, entropy = (
            reduce_from_tensor_model_parallel_region(zeros.index_copy(0, places, one), group=self._among.context)
            for one in scored
        )
        backward_from, report = judge(logprobs, entropy, row)
        count = torch.zeros([], dtype=torch.int, device=self.device)
        return backward_from, count, {name: value.detach() for name, value in report.items()}

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

    def _shared(self, rows: Sequence[PackedRow]) -> Sequence[PackedRow]:
        """The rows of the first rank that has this data rank, on all that have it."""
        told: list[Any] = [rows]
        for group in (self._among.copy, self._among.stages):
            if group.size() > 1:
                dist.broadcast_object_list(told, group_src=0, group=group)
        return told[0]

    def _even(self, rows: Sequence[PackedRow]) -> tuple[list[PackedRow], int]:
        """These rows, filled up to as many as any data rank has, at least one and as many as stages take; trained tokens in all."""
        check_rows(rows)
        trained = sum(int(row.trained.sum()) for row in rows)
        mine = torch.tensor([[len(rows), trained]], dtype=torch.float64)
        counts = gather_rows(mine, self.device, self._among.data)
        count = max(1, int(counts[:, 0].max()))
        if self._layout.virtual_stages > 1:
            count = -(-count // self._layout.pipeline_parallel) * self._layout.pipeline_parallel
        return [*rows, *[scoring_row([[0]])] * (count - len(rows))], int(counts[:, 1].sum())

    def _forget_gradients(self) -> None:
        for part in self._wrapped:
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


def _packing(local: LocalRow, device: torch.device) -> PackedSeqParams:
    cuts = torch.tensor(local.cu_seqlens, dtype=torch.int32, device=device)
    longest = max(end - start for start, end in pairwise(local.cu_seqlens))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cuts,
        cu_seqlens_kv=cuts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
