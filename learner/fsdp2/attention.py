"""Attention over packed rows, without padding and without a [N, N] mask.

    on CUDA, in half precision   one call of torch's FlashAttention (Dao 2023, arXiv:2307.08691) for all sequences
    elsewhere                    one call of torch's scaled dot-product attention for each

Invariants:
- A token attends to itself and to earlier tokens of its own sequence only; sequences are cut by `cu_seqlens`, and may continue the
  beginning of another one, which they share (`prefixes.py`).
- Whatever a model asks for and this file does not do (soft caps, attention sinks, dropout) is an error, never ignored.
- Models are called with `use_cache=False`: with a cache transformers packs silently wrong.
"""

from __future__ import annotations

from functools import cached_property
from inspect import signature
from itertools import pairwise, repeat
from typing import Any

import msgspec
import torch
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ...errors import LearnerError
from .context_parallel import Context

PACKED = "slipstream_packed"
"""What `attn_implementation` calls it."""

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEADS = 8, 256
"""What a head's size has to be a multiple of for FlashAttention, and the largest."""

AMPERE = 8, 0
"""Compute capability of the first GPUs that FlashAttention runs on."""

GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""That keys may have fewer heads than queries; torch 2.11 takes it for granted."""

Heads = tuple[tuple[int, int], ...]
"""Of each sequence of a row, from where to where in the row it is continued; an empty range where it is whole."""


class Cuts(msgspec.Struct, frozen=True):
    """Where the sequences of a row are cut, as FlashAttention wants to know it.

    Attributes:
        queries, keys: int32[S + 1] offsets.
        longest_query, longest_key: tokens of the longest sequence.
        kept: int64[K], which of the row's keys those are, one sequence after the other; None for all of them as they are.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_key: int
    kept: torch.Tensor | None


class Packed:
    """Where the sequences of a row are cut and what they continue, and which rank of a shared row this is. An object and not its
    parts: a compiler looks into arguments, and would make another program for every packing."""

    def __init__(
        self, cu_seqlens: tuple[int, ...], device: torch.device, context: Context | None = None, heads: Heads = ()
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.heads = heads
        self.context = context if context is not None and context.size > 1 else None
        self._device = device

    @cached_property
    def cuts(self) -> Cuts:
        """Once for all layers."""
        lengths = [end - start for start, end in pairwise(self.cu_seqlens)]
        queries = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=self._device)
        if not any(stop > head for head, stop in self.heads):
            return Cuts(queries, queries, max(lengths), max(lengths), None)
        spans = zip(self.heads, pairwise(self.cu_seqlens), strict=True)
        kept = [torch.cat([torch.arange(*head), torch.arange(*own)]) for head, own in spans]
        with_heads = torch.tensor([0, *map(len, kept)]).cumsum(0).to(self._device, torch.int32)
        return Cuts(queries, with_heads, max(lengths), max(map(len, kept)), torch.cat(kept).to(self._device))


def hide_from_compiler() -> None:
    """Have compiled layers call attention as it is, between two compiled parts."""
    AttentionInterface.register(PACKED, torch.compiler.disable(packed_attention))


def forward_arguments(
    cu_seqlens: tuple[int, ...], device: torch.device, context: Context | None = None, heads: Heads = ()
) -> dict[str, Any]:
    """Keyword arguments of the model's `forward` that tell attention where the sequences are cut, and who has them."""
    return {"use_cache": False, "packed": Packed(cu_seqlens, device, context, heads)}


def packed_attention(
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
    """Causal attention within each sequence: work grows with the sum of squared lengths.

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
    attend = _flash if _can_flash(query) else _sdpa
    output = attend(query, key, value, packed, scaling, sliding_window)
    return output if context is None else context.to_tokens(output), None


def _can_flash(query: torch.Tensor) -> bool:
    if not query.is_cuda or query.dtype not in FLASH_DTYPES:
        return False
    multiple, largest = FLASH_HEADS
    fits = query.shape[-1] % multiple == 0 and query.shape[-1] <= largest
    return fits and torch.cuda.get_device_capability(query.device) >= AMPERE


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: Packed,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    cuts = packed.cuts
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    if cuts.kept is not None:
        keys, values = keys[cuts.kept], values[cuts.kept]
    # A window counts from the last key of a sequence, so that one which continues another sees what it would see as a whole.
    back = -1 if window is None else window - 1
    output = varlen_attn(
        queries,
        keys,
        values,
        cuts.queries,
        cuts.keys,
        cuts.longest_query,
        cuts.longest_key,
        scale=scaling,
        window_size=(back, 0),
        **GROUPED,
    )
    assert isinstance(output, torch.Tensor)
    return output[None]


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: Packed,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    heads = packed.heads or repeat((0, 0))
    lengths = [end - start for start, end in pairwise(packed.cu_seqlens)]
    # Split and not sliced: on the way back every slice would be a whole row of zeros with one part filled.
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), lengths, heads, strict=False)
    for queries, keys, values, length, (head, stop) in parts:
        band = _band(length, window, query.device, before=stop - head)
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
    return torch.cat(outputs, 2).transpose(1, 2).contiguous()


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
    """`packed_attention` cuts by offsets and needs no mask."""


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, _no_mask)
