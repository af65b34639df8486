"""Megatron's multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), with own parts where Megatron's differ from
transformers'.

Invariants:
- Every tensor rank has the down projections whole, and computes them for its own tokens. Split by rows, as Megatron would have them
  without TransformerEngine, the gradient of the keys' rotated part would lack that of the other ranks' heads.
- The norms of the latents have transformers' epsilon, which is not the config's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

EPSILON = 1e-6


class LatentNorm(torch.nn.Module):
    """torch's RMSNorm of a latent. Its weight has a name of its own: Megatron calls the norm of whole queries alike."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **_: Any) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(hidden_size, eps=EPSILON, dtype=config.params_dtype)
        weight: Any = self.norm.weight
        weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden)


class WholeLinear(torch.nn.Module):
    """A linear layer without bias that every tensor rank has whole, for its own tokens; called as Megatron's are."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel  # its gradient is a sum over the tensor ranks

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        return functional.linear(hidden, self.weight), None


class LatentAttention(MLASelfAttention):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        config = self.config
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, config.q_lora_rank)
        width = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, width)
