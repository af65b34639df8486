"""FSDP2's attention over packed rows, without padding and without a [N, N] mask.

    on CUDA, in half precision   one call of torch's FlashAttention (Dao 2023, arXiv:2307.08691) for all sequences
    soft caps, attention sinks   the scores of each sequence at once (`common/eager_attention.py`)
    elsewhere                    one call of torch's scaled dot-product attention for each

Invariants:
- A token attends to itself and to earlier tokens of its own sequence only.
- An option that this file does not implement (a position bias, dropout) is an error, never ignored.
- Models are called with `use_cache=False`: with a cache, transformers silently packs wrongly.

Sequences of a row may share a prefix, which is computed once (`plan_sharing`):

    the row         P P P P a a a   P P P P b b   P P P P c c c     what losses see: three sequences with one prompt
    computed        P P P P a a a   b b           c c c             b and c attend to the prompt before a

Only tokens before the first trained one of either sequence are shared. Every token attends to the same tokens at the same positions
as in its own sequence, so that its hidden state is the same; gradients of several sequences add up at a shared token.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from inspect import signature
from itertools import pairwise, repeat
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ...common.eager_attention import eager_attention
from ...errors import LearnerError
from ..packing import LEAST, MicroBatch, sharing_pays
from .parallelism import ContextParallelGroup

PACKED = "slipstream_packed"  # its name for `attn_implementation`

FLASH_DTYPES = (torch.bfloat16, torch.float16)
FLASH_HEADS = 8, 256  # FlashAttention's head sizes: multiples of the first, up to the second
AMPERE = 8, 0  # compute capability of the first GPUs that FlashAttention runs on

GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""Allows keys with fewer heads than queries; torch 2.11 always does."""

Heads = tuple[tuple[int, int], ...]  # of each sequence the range of its prefix in the row; empty where it has its own


class SequenceBoundaries(NamedTuple):
    """Where the sequences of a row are cut, in FlashAttention's terms: int32[S + 1] offsets of queries and keys, the longest of
    each, and int64[K], the positions of those keys in the row, one sequence after the other; None where they are the row's own."""

    queries: torch.Tensor
    keys: torch.Tensor
    longest_query: int
    longest_key: int
    kept: torch.Tensor | None


class PackedMask:
    """Where the sequences of a row are cut, which prefixes they continue, and which rank of a shared row this is. Opaque, because
    a compiler would specialize on plain arguments and compile again for every packing; it sees `cuts`, which are there before it
    runs (`forward_arguments`)."""

    def __init__(
        self,
        cu_seqlens: tuple[int, ...],
        device: torch.device,
        context: ContextParallelGroup | None = None,
        heads: Heads = (),
    ) -> None:
        self.cu_seqlens = cu_seqlens
        self.heads = heads
        self.context = context
        self._device = device

    @cached_property
    def cuts(self) -> SequenceBoundaries:
        lengths = [end - start for start, end in pairwise(self.cu_seqlens)]
        queries = torch.tensor(self.cu_seqlens, dtype=torch.int32, device=self._device)
        if not any(stop > head for head, stop in self.heads):
            return SequenceBoundaries(queries, queries, max(lengths), max(lengths), None)
        spans = zip(self.heads, pairwise(self.cu_seqlens), strict=True)
        kept = [torch.cat([torch.arange(*head), torch.arange(*own)]) for head, own in spans]
        with_heads = torch.tensor([0, *map(len, kept)]).cumsum(0).to(self._device, torch.int32)
        return SequenceBoundaries(
            queries, with_heads, max(lengths), max(map(len, kept)), torch.cat(kept).to(self._device)
        )


def hide_from_compiler(flash: bool) -> None:
    """FlashAttention is one operation of a compiled layer's graph where `flash` allows it; other attention is called between two
    graphs, for it differs with each packing."""
    global _by_sequence
    _by_sequence = cast(Any, torch.compiler.disable(_by_sequence))
    AttentionInterface.register(PACKED, packed_attention if flash else torch.compiler.disable(packed_attention))


def forward_arguments(
    cu_seqlens: tuple[int, ...], device: torch.device, context: ContextParallelGroup | None = None, heads: Heads = ()
) -> dict[str, Any]:
    """Keyword arguments of the model's `forward` that give attention the cuts of the row."""
    packed = PackedMask(cu_seqlens, device, context, heads)
    if device.type == "cuda":
        _ = packed.cuts  # before a compiler looks
    return {"use_cache": False, "packed": packed}


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed: PackedMask | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sequence. `query` is [1, heads, N, head_dim]; `key` and `value` may have fewer heads. `packed`
    is how the whole row is cut, of which these N tokens are a rank's. Returns [1, N, heads, head_dim] and None (no weights)."""
    asked = {"position bias": position_bias, "dropout": dropout or None}
    unsupported = [name for name, value in asked.items() if value is not None]
    if unsupported or packed is None or attention_mask is not None:
        what = ", ".join(unsupported) or "attention without cu_seqlens"
        raise LearnerError(
            f"{type(module).__name__} asks for {what}, which packed attention on {query.device} cannot do"
        )
    context = packed.context
    if context is not None:
        query, key, value = context.to_heads(query), context.to_heads(key), context.to_heads(value)
        s_aux = None if s_aux is None else s_aux.view(context.size, -1)[context.rank]
    if softcap is None and s_aux is None and _can_flash(query):
        output = _flash(query, key, value, packed, scaling, sliding_window)
    else:
        output = _by_sequence(query, key, value, packed, scaling, sliding_window, softcap, s_aux)
    return output if context is None else context.to_tokens(output), None


def _can_flash(query: torch.Tensor) -> bool:
    if not query.is_cuda or query.dtype not in FLASH_DTYPES:
        return False
    multiple, largest = FLASH_HEADS
    fits = query.shape[-1] % multiple == 0 and query.shape[-1] <= largest
    device = torch.cuda.get_device_properties(query.device)  # a constant to a compiler
    return fits and (device.major, device.minor) >= AMPERE


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedMask,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    cuts = packed.cuts
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    if cuts.kept is not None:
        keys, values = keys[cuts.kept], values[cuts.kept]
    # A window counts from the last key of a sequence, so that a sequence with a shared prefix sees the same tokens as without.
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


def _by_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed: PackedMask,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    heads = packed.heads or repeat((0, 0))
    lengths = [end - start for start, end in pairwise(packed.cu_seqlens)]
    # Split and not sliced: the gradient of a slice would be a whole row of zeros with one part filled.
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), lengths, heads, strict=False)
    for queries, keys, values, length, (head, stop) in parts:
        band = _band(length, window, query.device, before=stop - head)
        if stop > head:
            keys, values = torch.cat([key[:, :, head:stop], keys], 2), torch.cat([value[:, :, head:stop], values], 2)
        if softcap is not None or sinks is not None:
            outputs.append(eager_attention(queries, keys, values, band, scaling, softcap, sinks))
            continue
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
    """bool[length, before + length], causal and at most `window` tokens back, after `before` others; None: plain causal."""
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


# --- prefixes that sequences of a row share


class SharedPrefixPlan(msgspec.Struct, frozen=True):
    """The M tokens to compute for the N of a row."""

    kept: torch.Tensor  # int64[M], their positions in the row, in its order
    where: torch.Tensor  # int64[N], for each token of the row its position among the kept ones
    cu_seqlens: tuple[int, ...]  # offsets of the row's sequences among the kept tokens
    heads: tuple[tuple[int, int], ...] = ()  # of each sequence the range of its prefix among the kept, if shared


def unshared(row: MicroBatch) -> SharedPrefixPlan:
    positions = torch.arange(len(row.token_ids))
    return SharedPrefixPlan(positions, positions, row.cu_seqlens)


def plan_sharing(row: MicroBatch) -> SharedPrefixPlan:
    """The plan of `row` where sequences share common prefixes.

    A sequence shares all of another one's tokens before its first trained one, or nothing: members of a group have these in
    common. Tokens with other recorded experts, or of other images, are other tokens. Where one prefix begins with another, its
    members continue the shorter one, or compute the longer one once more, whichever saves more.
    """
    spans = list(pairwise(row.cu_seqlens))
    lengths = [end - start for start, end in spans]
    untrained = [_untrained(row.loss_mask[start:end]) for start, end in spans]
    ids = _read_as(row)
    own = [ids[start : start + n].tobytes() for (start, _), n in zip(spans, untrained, strict=True)]
    members = Counter(head for head, n, length in zip(own, untrained, lengths, strict=True) if sharing_pays(n, length))
    firsts: dict[bytes, int] = {}
    sizes = list[int]()
    shares = [(0, 0)] * len(spans)
    # Shortest prefixes first: others may begin with the whole of these. Of equal prefixes the longest sequence first: where it
    # continues a shorter prefix, all do.
    for i in sorted(range(len(spans)), key=lambda i: (untrained[i], -lengths[i], i)):
        start, sharing = spans[i][0], members[own[i]]
        known = (n for n in reversed(sizes) if ids[start : start + n].tobytes() in firsts)
        size = next(known, 0)
        if sharing_pays(size, lengths[i]) and sharing * size >= (sharing - 1) * untrained[i]:
            shares[i] = (firsts[ids[start : start + size].tobytes()], size)
        elif untrained[i] >= LEAST and size < untrained[i]:
            firsts[own[i]] = i
            if untrained[i] not in sizes:
                sizes.append(untrained[i])
    if not any(size for _, size in shares):
        return unshared(row)
    kept = [length - size for length, (_, size) in zip(lengths, shares, strict=True)]
    cuts = (0, *torch.tensor(kept).cumsum(0).tolist())
    positions = [torch.arange(start + size, end) for (start, end), (_, size) in zip(spans, shares, strict=True)]
    heads = tuple((cuts[first], cuts[first] + size) if size else (0, 0) for first, size in shares)
    where = [
        torch.cat([torch.arange(*head), torch.arange(*own)]) for head, own in zip(heads, pairwise(cuts), strict=True)
    ]
    return SharedPrefixPlan(torch.cat(positions), torch.cat(where), cuts, heads)


def _read_as(row: MicroBatch) -> NDArray[Any]:
    """[N] or [N, B]: what a model reads of each token; a token of an image is a number for the image."""
    ids = row.token_ids.clone() if row.images else row.token_ids
    for image in row.images:
        ids[image.start : image.end] = image.number
    if row.experts is None:
        return ids.numpy()
    parts = (ids[:, None], row.experts.flatten(1))
    return np.concatenate([part.contiguous().view(torch.uint8).numpy() for part in parts], axis=1)


def _untrained(trained: torch.Tensor) -> int:
    """Tokens before the first trained one; of a sequence without any, all but its last, which is never shared."""
    positions = trained.nonzero()
    return int(positions[0]) if len(positions) else len(trained) - 1
