"""Low-rank adapters of Megatron's linear layers: those of the Hugging Face layers that they are made of (`learner/lora.py`).

    split by rows     A is whole, B split as the layer's weight: A x of this rank's tokens, gathered over ranks, then B
    split by columns  A is split as the layer's weight, B whole: A x of this rank's columns, summed over ranks, then B
    whole             both are whole, and compute this rank's tokens

Invariants:
- Tensor ranks exchange A x, `rank` numbers for each token, and never a layer's input or output once more.
- A whole factor sees the tokens of one tensor rank: its gradient is summed over them, as a norm's is (`sequence_parallel`).
- Without adapters, within `switched_off`, a layer's output is the frozen layer's, bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional

from ..lora import ALPHA, DOWN, UP
from .latent import WholeLinear
from .layout import groups
from .mapping import ADAPTERS, WeightRule, fused, is_expert, rule_of

Factors = tuple[torch.Tensor, torch.Tensor]  # A [rank, in] and B [out, rank]


class LayerAdapters(torch.nn.Module):
    """The adapters of `layer`, whose weight is made by `rule` of as many as there are whole `factors`. Its own are still to be
    written."""

    def __init__(self, layer: Any, rule: WeightRule, factors: Sequence[Factors]) -> None:
        super().__init__()
        self._rule = rule
        self._rank = len(factors[0][0])
        self._key_value_heads = (layer.config.num_query_groups or 1) // groups().tensor.size()
        self.off = False
        rows, columns = (groups().tensor.size() if rule.split == dimension else 1 for dimension in (0, 1))
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.down = torch.nn.ParameterList(
            [torch.empty(self._rank, down.shape[1] // columns, **like) for down, _ in factors]
        )
        self.up = torch.nn.ParameterList([torch.empty(len(up) // rows, self._rank, **like) for _, up in factors])
        for factors_of, split in ((self.down, rule.split == 1), (self.up, rule.split == 0)):
            for factor in factors_of:
                factor.sequence_parallel = layer.config.sequence_parallel and not split
        layer.register_forward_hook(self._add)

    def _add(self, _: object, inputs: tuple[torch.Tensor], outputs: Factors) -> Factors | None:
        if self.off:
            return None
        output, bias = outputs
        low = torch.cat([functional.linear(inputs[0], down) for down in self.down], -1)
        if self._rule.split == 0:
            low = gather_from_sequence_parallel_region(low, group=groups().tensor)
        elif self._rule.split == 1:
            low = reduce_scatter_to_sequence_parallel_region(low, group=groups().tensor)
        parts = low.split(self._rank, -1)
        products = [functional.linear(part, up) for part, up in zip(parts, self.up, strict=True)]
        return output + ALPHA / self._rank * fused(self._rule, products, self._key_value_heads), bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """As Megatron's checkpoints want it of a layer."""
        split = dict[str, int]()
        if (dimension := self._rule.split) is not None:
            split = {f"{('up', 'down')[dimension]}.{i}": dimension for i in range(len(self.up))}
        state = self.state_dict(prefix="", keep_vars=True)
        return make_sharded_tensors_for_checkpoint(
            state, prefix, split, sharded_offsets, tp_group=groups().tensor, dp_cp_group=metadata["dp_cp_group"]
        )


def adapt(part: GPTModel, drawn: Mapping[str, torch.Tensor], global_name: Callable[[str], str]) -> None:
    """Freeze `part` and give it the adapters that are `drawn` by Hugging Face names, in place; they are still to be written.
    `global_name` is that of a parameter of `part`."""
    part.requires_grad_(False)
    for name, layer in list(part.named_modules()):
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear | WholeLinear) or is_expert(name):
            continue
        rule = rule_of(global_name(f"{name}.weight"))
        stems = [source.removesuffix(".weight") for source in rule.sources]
        if factors := [(drawn[stem + DOWN], drawn[stem + UP]) for stem in stems if stem + DOWN in drawn]:
            parent, _, own = name.rpartition(".")
            part.get_submodule(parent).add_module(own + ADAPTERS, LayerAdapters(layer, rule, factors))
    if part.pre_process and part.config.recompute_granularity == "full":
        # A recomputed layer has no gradient where its input wants none.
        part.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_())


@contextlib.contextmanager
def switched_off(parts: Sequence[GPTModel]) -> Iterator[None]:
    """Within the block the layers of `parts` compute without their adapters."""
    found = [module for part in parts for module in part.modules() if isinstance(module, LayerAdapters)]
    try:
        for adapters in found:
            adapters.off = True
        yield
    finally:
        for adapters in found:
            adapters.off = False
