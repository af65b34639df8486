"""A Hugging Face config as Megatron's. It has passed `fit.py`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn import functional
from transformers import PretrainedConfig

from ...configs.backends import Megatron
from .fit import has_latent_attention, routed_experts


def transformer_config(config: PretrainedConfig, layout: Megatron, dtype: torch.dtype) -> TransformerConfig:
    recomputed: dict[str, Any] = {}
    if "recompute" in layout.options:
        recomputed = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    piped, virtual = layout.pipeline_parallel > 1, layout.virtual_stages > 1
    kind = MLATransformerConfig if has_latent_attention(config) else TransformerConfig
    return kind(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_dim(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type.startswith("qwen3"),
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,  # all weights are read; see `_mark_split`
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        tensor_model_parallel_size=layout.tensor_parallel,
        sequence_parallel=layout.tensor_parallel > 1,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        virtual_pipeline_model_parallel_size=layout.virtual_stages if virtual else None,
        context_parallel_size=layout.context_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=1,
        # Any other pair leaves the gradients of virtual stages silently wrong over gloo.
        overlap_p2p_comm=virtual,
        batch_p2p_comm=piped and not virtual,
        # A loss is a sum, divided before it is returned: neither ranks nor micro-batches divide it again.
        calculate_per_token_loss=True,
        finalize_model_grads_func=_finalize,
        **_experts(config),
        **_latent(config),
        **recomputed,
    )


def head_dim(config: PretrainedConfig) -> int:
    """Numbers of a query of one head."""
    if has_latent_attention(config):
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _experts(config: PretrainedConfig) -> dict[str, Any]:
    if not (count := routed_experts(config)):
        return {}
    common = {
        "num_moe_experts": count,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "alltoall",
    }
    if config.model_type == "qwen3_moe":
        # Softmax over the chosen ones is what normalizing their probabilities comes to.
        return common | {"moe_router_pre_softmax": not config.norm_topk_prob}
    dense = config.first_k_dense_replace
    limited = (config.topk_group or 1) < (config.n_group or 1)
    return common | {
        "moe_layer_freq": [0] * dense + [1] * (config.num_hidden_layers - dense),
        "moe_shared_expert_intermediate_size": config.moe_intermediate_size * config.n_shared_experts,
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": config.routed_scaling_factor,
        "moe_router_num_groups": config.n_group if limited else None,
        "moe_router_group_topk": config.topk_group if limited else None,
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # a step leaves it as it is
    }


def _latent(config: PretrainedConfig) -> dict[str, Any]:
    if not has_latent_attention(config):
        return {}
    rope = config.rope_parameters or {}
    return {
        "q_lora_rank": config.q_lora_rank,
        "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim,
        "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
        "rope_type": "rope",  # frequencies are transformers' own; of YaRN there remains the scale of attention scores
        "rotary_scaling_factor": rope.get("factor", 1.0),
        "mscale_all_dim": rope.get("mscale_all_dim", 0.0),
    }


def _finalize(model: list[torch.nn.Module], tokens: torch.Tensor | None, **options: Any) -> None:
    """Sum gradients over ranks. `tokens` would divide them, and they are divided already."""
    finalize_model_grads(model, None, **options)
