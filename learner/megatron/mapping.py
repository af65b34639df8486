"""Which Hugging Face weights make up a Megatron parameter, and how they are split over tensor ranks: pure functions on tensors.

Names on the Megatron side carry *global* layer and expert numbers, so that they are the same in every layout. All families share
one table.

Invariants:
- `hugging` of what `megatron` made for every index gives the tensors back, bit for bit, for any number of parts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch

from ..lora import DOWN, UP

Fusion = Literal["none", "qkv", "gate_up"]


class WeightRule(msgspec.Struct, frozen=True):
    """One Megatron parameter."""

    sources: tuple[str, ...]  # Hugging Face names of its weights
    split: int | None = None  # dimension that is split over tensor ranks, None where each has all of it
    fusion: Fusion = "none"  # `qkv`: by groups of query heads; `gate_up`: each split separately, concatenated


WHOLE = {
    "embedding.word_embeddings.weight": WeightRule(("model.embed_tokens.weight",), 0),
    "decoder.final_layernorm.weight": WeightRule(("model.norm.weight",)),
    "output_layer.weight": WeightRule(("lm_head.weight",), 0),
}

NORM, POST_NORM = WeightRule(("input_layernorm.weight",)), WeightRule(("post_attention_layernorm.weight",))

BALANCE = "expert_bias"  # of routers, by which their experts are balanced: no parameter, and pushed all the same

LAYER = {
    "input_layernorm.weight": NORM,
    "self_attention.linear_qkv.layer_norm_weight": NORM,  # TransformerEngine fuses norms into what follows them
    "pre_mlp_layernorm.weight": POST_NORM,
    "mlp.linear_fc1.layer_norm_weight": POST_NORM,
    "self_attention.q_layernorm.weight": WeightRule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": WeightRule(("self_attn.k_norm.weight",)),
    "self_attention.linear_qkv.weight": WeightRule(tuple(f"self_attn.{x}_proj.weight" for x in "qkv"), 0, "qkv"),
    "self_attention.linear_proj.weight": WeightRule(("self_attn.o_proj.weight",), 1),
    "mlp.linear_fc1.weight": WeightRule(("mlp.gate_proj.weight", "mlp.up_proj.weight"), 0, "gate_up"),
    "mlp.linear_fc2.weight": WeightRule(("mlp.down_proj.weight",), 1),
    "mlp.router.weight": WeightRule(("mlp.gate.weight",)),
    f"mlp.router.{BALANCE}": WeightRule(("mlp.gate.e_score_correction_bias",)),
    "mlp.shared_experts.linear_fc1.weight": WeightRule(
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"), 0, "gate_up"
    ),
    "mlp.shared_experts.linear_fc2.weight": WeightRule(("mlp.shared_experts.down_proj.weight",), 1),
    "self_attention.linear_q_proj.weight": WeightRule(("self_attn.q_proj.weight",), 0),
    "self_attention.linear_q_down_proj.weight": WeightRule(("self_attn.q_a_proj.weight",)),
    "self_attention.q_layernorm.norm.weight": WeightRule(("self_attn.q_a_layernorm.weight",)),
    "self_attention.linear_q_up_proj.weight": WeightRule(("self_attn.q_b_proj.weight",), 0),
    "self_attention.linear_kv_down_proj.weight": WeightRule(("self_attn.kv_a_proj_with_mqa.weight",)),
    "self_attention.kv_layernorm.norm.weight": WeightRule(("self_attn.kv_a_layernorm.weight",)),
    "self_attention.linear_kv_up_proj.weight": WeightRule(("self_attn.kv_b_proj.weight",), 0),
}

EXPERT = {
    "linear_fc1.weight": WeightRule(("gate_proj.weight", "up_proj.weight"), 0, "gate_up"),
    "linear_fc2.weight": WeightRule(("down_proj.weight",), 1),
}

ADAPTERS = "_lora"  # behind the name of a layer, that of its adapters
_ADAPTER = re.compile(rf"(.+){ADAPTERS}\.(down|up)\.(\d+)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


def rule_of(name: str) -> WeightRule:
    """The rule of a Megatron parameter by its global name. Raises KeyError where there is none."""
    if (adapter := _ADAPTER.fullmatch(name)) is not None:
        return _rule_of_adapter(rule_of(f"{adapter[1]}.weight"), adapter[2], int(adapter[3]))
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return WHOLE[name]
    prefix = f"model.layers.{layer[1]}."
    expert = _EXPERT.fullmatch(layer[2])
    rule = LAYER[layer[2]] if expert is None else EXPERT[expert[2]]
    if expert is not None:
        prefix += f"mlp.experts.{expert[1]}."
    return msgspec.structs.replace(rule, sources=tuple(prefix + source for source in rule.sources))


def _rule_of_adapter(layer: WeightRule, factor: str, index: int) -> WeightRule:
    """A is split with a weight that is split by columns, B with one that is split by rows."""
    stem = layer.sources[index].removesuffix(".weight")
    name, split_with = (DOWN, 1) if factor == "down" else (UP, 0)
    return WeightRule((stem + name,), split_with if layer.split == split_with else None)


def is_adapter(name: str) -> bool:
    return _ADAPTER.fullmatch(name) is not None


def global_name(name: str, first_layer: int, first_expert: int) -> str:
    """`name` of a parameter in a part of the model whose layers and experts begin at these numbers."""

    def shifted(match: re.Match[str], first: int) -> str:
        return f"{match[1]}{int(match[2]) + first}."

    name = re.sub(r"^(decoder\.layers\.)(\d+)\.", lambda match: shifted(match, first_layer), name)
    return re.sub(r"(\.local_experts\.)(\d+)\.", lambda match: shifted(match, first_expert), name)


def is_expert(name: str) -> bool:
    return ".local_experts." in name


def megatron(rule: WeightRule, tensors: Sequence[torch.Tensor], groups: int, parts: int, index: int) -> torch.Tensor:
    """Tensor rank `index` of `parts`: its shard of the parameter made of `tensors`, one for each of `rule.sources`, where `groups`
    key-value heads have a group of query heads each."""
    if rule.fusion == "gate_up":
        return torch.cat([tensor.chunk(parts)[index] for tensor in tensors])
    if rule.fusion == "qkv":
        grouped = [tensor.unflatten(0, (groups, -1)) for tensor in tensors]
        return torch.cat(grouped, 1).flatten(0, 1).chunk(parts)[index]
    (tensor,) = tensors
    return tensor if rule.split is None else tensor.chunk(parts, rule.split)[index]


def fused(rule: WeightRule, products: Sequence[torch.Tensor], groups: int) -> torch.Tensor:
    """[..., rows]: what a layer gives whose weight `megatron` makes, of what its `sources` give, each [..., rows]."""
    if rule.fusion == "qkv":
        return torch.cat([product.unflatten(-1, (groups, -1)) for product in products], -1).flatten(-2)
    return torch.cat(list(products), -1)


def hugging(rule: WeightRule, shards: Sequence[torch.Tensor], groups: int, head_dim: int) -> list[torch.Tensor]:
    """The Hugging Face tensors of `rule.sources`, from the shards of all tensor ranks in their order."""
    if rule.fusion == "gate_up":
        return [torch.cat(halves) for halves in zip(*(shard.chunk(2) for shard in shards), strict=True)]
    if rule.split is None:
        return [shards[0]]
    whole = torch.cat(list(shards), rule.split)
    if rule.fusion == "none":
        return [whole]
    grouped = whole.unflatten(0, (groups, -1))
    sizes = [grouped.shape[1] - 2 * head_dim, head_dim, head_dim]
    return [part.flatten(0, 1) for part in grouped.split(sizes, 1)]
