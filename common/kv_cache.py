"""The size of a decoder's KV cache."""

from __future__ import annotations

from typing import Any


def kv_bytes_per_token(config: Any, item_bytes: int, tensor_parallel: int = 1) -> int:
    """Bytes of one token's keys and values over all layers, in each tensor-parallel rank.

    Args:
        config: names as in a Hugging Face config of a decoder; `num_key_value_heads` and `head_dim` may be absent or None.
        item_bytes: bytes of one number.
        tensor_parallel: ranks; a rank holds at least one head, so fewer KV heads than ranks are replicated.
    """
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * max(kv_heads // tensor_parallel, 1) * head_dim * item_bytes
