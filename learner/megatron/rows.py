"""Megatron's packed rows as one rank sees them.

Context parallelism cuts every sequence into 2 x C chunks, of which rank r has chunks r and 2 C - 1 - r: causal attention is then as
much work for one as for another ("zigzag", the order that TransformerEngine expects).

Invariants:
- A sequence is padded at its end only, where causal attention does not see it, to a multiple of 2 x C.
- What is missing to the wanted length of the row are filler sequences of at most `FILLER` tokens.
- Every trained token is scored by exactly one context rank: the one that holds the token before it.
"""

from __future__ import annotations

from itertools import pairwise

import msgspec
import torch

from ..packing import MicroBatch

FILLER = 512  # tokens of a filler sequence: attention among them costs little, and there are few of them


class LocalMicroBatch(msgspec.Struct, frozen=True):
    """This context rank's part of a row of L padded tokens."""

    token_ids: torch.Tensor  # int64[1, L / C]
    position_ids: torch.Tensor  # int64[1, L / C]
    cu_seqlens: tuple[int, ...]  # offsets of the padded sequences in the whole row, from 0 to L
    sources: torch.Tensor  # int64[K], positions in `token_ids` whose logits predict a trained token
    targets: torch.Tensor  # int64[K], the trained tokens
    positions: torch.Tensor  # int64[K], where they stand in the row without padding
    experts: torch.Tensor | None = None  # [L / C, layers, top_k], zeros where there is no record


def padded_length(row: MicroBatch, unit: int, context: int) -> int:
    """L: a multiple of `unit`, which is one of 2 x `context` where that is above 1."""
    total = sum(_round_up(end - start, _chunks(context)) for start, end in pairwise(row.cu_seqlens))
    return _round_up(total, unit)


def local_row(row: MicroBatch, length: int, context: int, rank: int) -> LocalMicroBatch:
    cuts, origin = [0], []
    for start, end in pairwise(row.cu_seqlens):
        padding = _round_up(end - start, _chunks(context)) - (end - start)
        origin += [*range(start, end), *[-1] * padding]
        cuts.append(len(origin))
    filler = _round_up(FILLER, _chunks(context))
    cuts += [*range(cuts[-1] + filler, length, filler), length] if cuts[-1] < length else []
    origin += [-1] * (length - len(origin))
    here = torch.tensor(origin)[zigzag(tuple(cuts), context, rank)]
    real = here >= 0
    successor = here + 1
    ends = torch.zeros(len(row.token_ids) + 1, dtype=torch.bool)
    ends[list(row.cu_seqlens)] = True
    scored = real & ~ends[successor.clamp(max=len(row.token_ids))]
    scored &= row.loss_mask[successor.clamp(max=len(row.token_ids) - 1)]
    positions = successor[scored]
    known = here.clamp(min=0)
    return LocalMicroBatch(
        token_ids=torch.where(real, row.token_ids[known], 0)[None],
        position_ids=torch.where(real, row.position_ids[known], 0)[None],
        cu_seqlens=tuple(cuts),
        sources=scored.nonzero().squeeze(1),
        targets=row.token_ids[positions],
        positions=positions,
        experts=None if row.experts is None else row.experts[known] * real[:, None, None],
    )


def zigzag(cu_seqlens: tuple[int, ...], context: int, rank: int) -> torch.Tensor:
    """int64[L / C]: which tokens of the padded row context rank `rank` holds, in its order."""
    if context == 1:
        return torch.arange(cu_seqlens[-1])
    parts = []
    for start, end in pairwise(cu_seqlens):
        chunks = torch.arange(start, end).chunk(2 * context)
        parts += [chunks[rank], chunks[2 * context - 1 - rank]]
    return torch.cat(parts)


def _chunks(context: int) -> int:
    return 2 * context if context > 1 else 1


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
