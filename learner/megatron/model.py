"""A model held by Megatron-core: one copy of it split over ranks, and copies side by side.

Invariants:
- bfloat16 is for computing and serving only.
- Ranks of one data rank hold one copy of the model among them and make the same passes over the same rows. Every data rank makes
  the same number of passes: those with fewer rows run some without a trained token.
- Only the last stage of the pipeline sees logits; what it finds is told to the others before anybody goes on.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from transformers.core_model_loading import revert_weight_conversion

from ...configs.backends import Megatron
from ...configs.schema import Model
from ..backend import PackedRow
from ..batch import scoring_row
from ..model import load_model
from ..ranks import check_rows, choose_device, gather_rows, join, to_device, together
from ..rows import rows_of_first
from .family import build, shards_of
from .fit import check_family, check_layout
from .layout import form_groups, groups, layout_here
from .rows import LocalRow, local_row, padded_length
from .scores import split_logprobs

Output = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""What the last stage makes of a row: a number to go backward from, and what to report."""

Judge = Callable[[torch.Tensor, torch.Tensor, PackedRow], Output]
"""(log-probs float32[N], entropy float32[N], row on the device) -> Output."""


class MegatronModel:
    """Implements `Scorer`.

    Args:
        model: path and compute dtype.
        layout: how the model is split. A rank that is `alone` holds all of it.
        temperature: log-probs and entropies are those of softmax(logits / temperature).
        timeout_s: longest that a rank waits for the others in any collective.

    Raises:
        ConfigError: the model cannot be loaded, mapped or split so, there is no such device, or the rendezvous variables are
            incomplete.
    """

    def __init__(self, model: Model, layout: Megatron, *, temperature: float, timeout_s: float) -> None:
        self.device = choose_device(layout.device)
        self._temperature = temperature
        self._layout = layout_here(layout)
        self._dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
        source = load_model(model.path, "eager")  # which only lends its weights
        check_family(source.config)
        check_layout(self._layout, source.config)
        self._joined = join(self.device, timeout_s)
        form_groups(self._layout, timeout_s)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self._among = groups()
        self.data_rank, self.data_size = self._among.data.rank(), self._among.data.size()
        self._parts = build(source, self._layout, self._dtype, self.device)
        self._passed = self._prepared()
        with torch.no_grad():
            for parameter, shard in shards_of(self._parts, revert_weight_conversion(source, dict(source.state_dict()))):
                self._write(parameter, shard)
        self._source = source
        torch.nn.Module.to(source, "meta")  # its config is wanted for exports, its weights are not

    def logprobs(self, rows: Sequence[PackedRow], temperature: float | None = None) -> list[torch.Tensor]:
        """See `Scorer.logprobs`."""
        with together("computing log-probs"), torch.no_grad():
            shared = rows
            for group in (self._among.copy, self._among.stages):
                shared = rows_of_first(shared, self.device, group)
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

    def close(self) -> None:
        """See `Scorer.close`."""
        del self._parts, self._passed
        gc.collect()
        if self._joined:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def _prepared(self) -> list[Any]:
        """What passes go through, one for each virtual stage: the parts as they are."""
        return list(self._parts)

    def _write(self, parameter: Any, shard: torch.Tensor) -> None:
        """Give a parameter of this rank its weights, float32."""
        parameter.copy_(shard)

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
