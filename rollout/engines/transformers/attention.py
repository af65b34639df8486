"""Attention over transformers' paged KV cache, without padding queries and without a mask over the whole batch.

transformers' own continuous batching gives `sdpa` one dense mask over all queries and all keys of the batch: 64 decoding sequences
cost 64 times the work. Here sequences that decode one token share one call per length class, and every prompt has its own call.

Invariants:
- A token attends to itself and to earlier tokens of its own sequence, within the layer's window if it has one.
- What a model needs and this file does not support (biases, own masks) is an error, never ignored.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.masking_utils import AttentionMaskInterface

from ....common.eager_attention import eager_attention
from ....errors import EngineError

PAGED = "slipstream_paged"


class Layout(msgspec.Struct, frozen=True):
    """Cache rows of one batch, for the layers of one kind. Queries: decode groups first, then prompts. A group is n sequences with
    one query each, whose keys are padded to `width`; its mask is true for real keys."""

    read: torch.Tensor  # int64[k]: of all keys in the order of the queries; empty when no key comes from the cache
    write: torch.Tensor  # int64[q]: of the queries' own keys
    decodes: tuple[torch.Tensor, ...]  # bool[n, 1, 1, width]
    prompts: tuple[tuple[int, int], ...]  # queries and keys of every other sequence


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cache: PagedAttentionCache | None = None,
    layouts: dict[str, Layout] | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Without `cache` one sequence; with it the batch that `layouts` (by layer kind) describes. `query` is [1, heads, q, head_dim];
    `key` and `value` may have fewer heads (grouped-query attention). Returns [1, q, heads, head_dim] and no attention weights."""
    arguments = {"a position bias": position_bias, "a mask of its own": attention_mask}
    if unsupported := [name for name, value in arguments.items() if value is not None]:
        raise EngineError(f"{type(module).__name__} asks for {', '.join(unsupported)}, which paged attention cannot do")
    grouped = query.shape[1] != key.shape[1]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if softcap is not None or s_aux is not None:
            return eager_attention(q, k, v, mask, scaling, softcap, s_aux)
        causal = mask is None and q.shape[2] > 1
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
        )

    if cache is None or layouts is None:
        mask = _causal(query.shape[2], key.shape[2], sliding_window, query.device)
        return attend(query, key, value, mask).transpose(1, 2).contiguous(), None
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    allocator = cache.layer_to_allocator[layer]
    layout = layouts[allocator.layer_type]
    keys, values = allocator.update(key[0].transpose(0, 1), value[0].transpose(0, 1), layer, layout.read, layout.write)
    outputs = []  # each [q, heads, head_dim]
    row = at = 0
    for mask in layout.decodes:
        n, width = mask.shape[0], mask.shape[-1]
        k, v = (t[at : at + n * width].view(n, width, *t.shape[1:]).transpose(1, 2) for t in (keys, values))
        q = query[0, :, row : row + n].transpose(0, 1).unsqueeze(2)
        outputs.append(attend(q, k, v, mask).squeeze(2))
        row, at = row + n, at + n * width
    for queries, length in layout.prompts:
        k, v = (t[at : at + length].transpose(0, 1).unsqueeze(0) for t in (keys, values))
        mask = _causal(queries, length, sliding_window, query.device)
        outputs.append(attend(query[:, :, row : row + queries], k, v, mask)[0].transpose(0, 1))
        row, at = row + queries, at + length
    return torch.cat(outputs).unsqueeze(0), None


def _causal(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """bool[queries, keys]: the queries are the last of the keys. None where SDPA's own causal mask is the same."""
    if queries == keys and (window is None or keys <= window):
        return None
    back = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    return (back >= 0) & (back < (window or keys + 1))


AttentionInterface.register(PAGED, paged_attention)
AttentionMaskInterface.register(PAGED, lambda *_, **__: None)  # layouts replace the mask
