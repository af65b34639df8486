"""Attention over packed rows, without padding and without a [N, N] mask.

Invariants:
- A token attends to itself and to earlier tokens of its own sequence only; sequences are cut by `cu_seqlens`, and may continue the
  beginning of another one, which they share (`prefixes.py`).
- Whatever a model asks for and this file does not do (soft caps, attention sinks, dropout) is an error, never ignored.
- Models are called with `use_cache=False`: with a cache transformers packs silently wrong.
"""

from __future__ import annotations

from itertools import pairwise, repeat
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils.import_utils import is_flash_attn_2_available

from ...errors import LearnerError
from .context_parallel import Context

VARLEN_SDPA = "slipstream_varlen_sdpa"
FLASH = "flash_attention_2"


def implementation(device: torch.device, dtype: torch.dtype, *, shared: bool) -> str:
    """The attention implementation for `attn_implementation`: flash-attn where it can run, else one SDPA per sequence, which alone
    knows what to do with rows that ranks share."""
    flash = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and is_flash_attn_2_available()
    return FLASH if flash and not shared else VARLEN_SDPA


Heads = tuple[tuple[int, int], ...]
"""Of each sequence of a row, from where to where in the row it is continued; an empty range where it is whole."""


class Packed:
    """Where the sequences of a row are cut and what they continue, and which rank of a shared row this is. An object and not its
    parts: a compiler looks into arguments, and would make another program for every packing."""

    def __init__(self, cu_seqlens: tuple[int, ...], context: Context | None = None, heads: Heads = ()) -> None:
        self.cu_seqlens = cu_seqlens
        self.heads = heads
        self.context = context if context is not None and context.size > 1 else None


def hide_from_compiler() -> None:
    """Have compiled layers call attention as it is, between two compiled parts."""
    AttentionInterface.register(VARLEN_SDPA, torch.compiler.disable(varlen_sdpa))


def forward_arguments(
    name: str,
    cu_seqlens: tuple[int, ...],
    device: torch.device,
    context: Context | None = None,
    heads: Heads = (),
) -> dict[str, Any]:
    """Keyword arguments of the model's `forward` that tell implementation `name` where the sequences are cut, and who has them.
    `heads` are for `VARLEN_SDPA` alone."""
    if name == VARLEN_SDPA:
        return {"use_cache": False, "packed": Packed(cu_seqlens, context, heads)}
    cuts = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
    longest = max(b - a for a, b in pairwise(cu_seqlens))
    return {
        "use_cache": False,
        "cu_seq_lens_q": cuts,
        "cu_seq_lens_k": cuts,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def varlen_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: Packed | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """One causal SDPA call per sequence: work grows with the sum of squared lengths.

    Args:
        query: [1, heads, N, head_dim]; `key` and `value` may have fewer heads (grouped-query attention).
        packed: how the whole row is cut, of which these N tokens are a rank's.

    Returns:
        [1, N, heads, head_dim] and None (no attention weights).
    """
    asked = {"softcap": softcap, "attention sinks": s_aux, "position bias": position_bias, "dropout": dropout or None}
    unsupported = [name for name, wish in asked.items() if wish is not None]
    if unsupported or packed is None or attention_mask is not None:
        what = ", ".join(unsupported) or "attention without cu_seqlens"
        raise LearnerError(
            f"{type(module).__name__} asks for {what}, which packed attention on {query.device} cannot do"
        )
    context = packed.context
    if context is not None:
        query, key, value = context.to_heads(query), context.to_heads(key), context.to_heads(value)
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    heads = packed.heads or repeat((0, 0))
    lengths = [end - start for start, end in pairwise(packed.cu_seqlens)]
    # Split and not sliced: on the way back every slice would be a whole row of zeros with one part filled.
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), lengths, heads, strict=False)
    for queries, keys, values, length, (head, stop) in parts:
        band = _band(length, sliding_window, query.device, before=stop - head)
        if stop > head:
            keys, values = torch.cat([key[:, :, head:stop], keys], 2), torch.cat([value[:, :, head:stop], values], 2)
        outputs.append(
            functional.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=band,
                is_causal=band is None,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    output = torch.cat(outputs, 2).transpose(1, 2).contiguous()
    return output if context is None else context.to_tokens(output), None


def _band(length: int, window: int | None, device: torch.device, before: int = 0) -> torch.Tensor | None:
    """bool[length, before + length], causal and at most `window` tokens back, of tokens that come after `before` others; None where
    plain causal says the same."""
    near = window is None or before + length <= window
    if near and not before:
        return None
    at = torch.arange(before + length, device=device)
    back = at[before:, None] - at[None, :]
    return (back >= 0) if window is None else (back >= 0) & (back < window)


def _no_mask(*_: Any, **__: Any) -> None:
    """`varlen_sdpa` cuts by offsets and needs no mask."""


AttentionInterface.register(VARLEN_SDPA, varlen_sdpa)
AttentionMaskInterface.register(VARLEN_SDPA, _no_mask)
