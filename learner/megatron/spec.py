"""Megatron's layer specs: TransformerEngine's modules on CUDA in bfloat16, elsewhere Megatron's own, with a norm and an attention
from here. TransformerEngine multiplies float32 matrices in TF32, and before 2.11 it has no float32 attention over packed rows. Its
layers norm their input themselves, which adapters beside them would do once more: adapted models have Megatron's own."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch.nn import functional

from .latent import LatentAttention, LatentNorm
from .layout import groups
from .rows import zigzag


class RMSNorm(torch.nn.RMSNorm):
    """torch's, marked for what sequence parallelism has to know: its gradient is a sum over the tensor ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class PackedAttention(MegatronModule):
    """One causal SDPA per packed sequence. With context parallelism queries stay, and keys and values come from all ranks."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config)
        self._context = groups().context
        self._scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels or 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Query, key and value are [L / C, heads, head_dim], key and value perhaps with fewer heads. Returns [L / C, D]."""
        assert packed_seq_params is not None, "rows are packed"
        cuts = tuple(packed_seq_params.cu_seqlens_q.tolist())
        size, rank = self._context.size(), self._context.rank()
        held = zigzag(cuts, size, rank)
        if size > 1:  # the gather's gradient is the reduce-scatter that is wanted here
            natural = torch.cat([zigzag(cuts, size, other) for other in range(size)]).argsort()
            key, value = (
                gather_from_sequence_parallel_region(part.contiguous(), group=self._context)[natural]
                for part in (key, value)
            )
        outputs = []
        for start, end in pairwise(cuts):
            local = slice(start // size, end // size)
            seen = (held[local, None] >= torch.arange(start, end)).to(query.device) if size > 1 else None
            outputs.append(
                functional.scaled_dot_product_attention(
                    query[local].transpose(0, 1)[None],
                    key[start:end].transpose(0, 1)[None],
                    value[start:end].transpose(0, 1)[None],
                    attn_mask=seen,
                    is_causal=seen is None,
                    scale=self._scale,
                    enable_gqa=query.shape[1] != key.shape[1],
                )[0].transpose(0, 1)
            )
        return torch.cat(outputs).flatten(1)


def block_spec(
    config: TransformerConfig, virtual_stage: int | None, *, adapted: bool
) -> TransformerBlockSubmodules | ModuleSpec:
    own = adapted or config.multi_latent_attention
    if torch.cuda.is_available() and config.params_dtype is torch.bfloat16 and not own:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=virtual_stage)
    count = get_num_layers_to_build(config, vp_stage=virtual_stage)
    first = get_transformer_layer_offset(config, vp_stage=virtual_stage)
    norm: Any = RMSNorm
    layers = [_local_layer(config, number) for number in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _local_layer(config: TransformerConfig, number: int) -> ModuleSpec:
    dense = isinstance(config.moe_layer_freq, list) and not config.moe_layer_freq[number]
    spec: Any = get_gpt_layer_local_spec(
        num_experts=None if dense else config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    layer.sharded_state_dict_keys_map = {}
    attention.core_attention = PackedAttention
    if config.multi_latent_attention:
        layer.self_attention.module = LatentAttention
        attention.q_layernorm = attention.kv_layernorm = LatentNorm
    elif config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec
