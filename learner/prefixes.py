"""Sequences of a row that begin alike: what they have in common is computed once.

    the row         P P P P a a a   P P P P b b   P P P P c c c     what everybody else sees: three sequences with one prompt
    computed        P P P P a a a   b b           c c c             b and c look at the prompt before a

Invariants:
- Only what comes before the first trained token of either is shared: trained tokens are never merged.
- Every token attends to what it would attend to in its own sequence, at the same positions: its hidden state is the same, and what
  several sequences make of a shared one adds up in its gradient.
- What is computed is at most what `packing.share` counts: the sequences, with every beginning that is worth sharing counted once.
- A row in which nothing is shared is computed as it is.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
import torch

from .backend import PackedRow

LEAST = 16
"""Tokens in common that a copy of their keys and values pays for."""

LEAST_SHARE = 4
"""What is shared is at least one in so many tokens of a sequence. Behind a shared beginning attention computes the whole square of
the rest, not half of it: of a rest much longer than the beginning that costs more than the beginning."""


class Tree(msgspec.Struct, frozen=True):
    """M tokens to compute for the N of a row.

    Attributes:
        kept: int64[M], their places in the row, in its order.
        where: int64[N], of each token of the row: its place among those.
        cu_seqlens: offsets of the row's sequences among those.
        heads: of each sequence, from where to where among those it is continued; an empty range where it is whole. None at all
            where all are.
    """

    kept: torch.Tensor
    where: torch.Tensor
    cu_seqlens: tuple[int, ...]
    heads: tuple[tuple[int, int], ...] = ()


def pays(size: int, length: int) -> bool:
    """Whether a sequence of `length` tokens had better share the first `size` of them."""
    return size >= LEAST and size * LEAST_SHARE >= length


def whole(row: PackedRow) -> Tree:
    """Nothing shared."""
    places = torch.arange(len(row.token_ids))
    return Tree(places, places, row.cu_seqlens)


def tree(row: PackedRow) -> Tree:
    """What is left of `row` where sequences that begin alike share their beginnings.

    A sequence shares the whole of another one's tokens before the first trained one, or nothing: that is what members of a group
    have in common. Where one beginning begins with another, its members continue the shorter one, or keep the longer one once more:
    whichever saves more.
    """
    spans = list(pairwise(row.cu_seqlens))
    lengths = [end - start for start, end in spans]
    untrained = [_untrained(row.trained[start:end]) for start, end in spans]
    ids = row.token_ids.numpy()
    own = [ids[start : start + n].tobytes() for (start, _), n in zip(spans, untrained, strict=True)]
    members = Counter(head for head, n, length in zip(own, untrained, lengths, strict=True) if pays(n, length))
    firsts: dict[bytes, int] = {}
    sizes = list[int]()
    shares = [(0, 0)] * len(spans)
    # Those with the shortest beginnings come first: others may begin with the whole of these. Of those with the same one the
    # longest comes first: where it continues a shorter beginning, all do.
    for i in sorted(range(len(spans)), key=lambda i: (untrained[i], -lengths[i], i)):
        start, sharing = spans[i][0], members[own[i]]
        known = (n for n in reversed(sizes) if ids[start : start + n].tobytes() in firsts)
        size = next(known, 0)
        if pays(size, lengths[i]) and sharing * size >= (sharing - 1) * untrained[i]:
            shares[i] = (firsts[ids[start : start + size].tobytes()], size)
        elif untrained[i] >= LEAST and size < untrained[i]:
            firsts[own[i]] = i
            if untrained[i] not in sizes:
                sizes.append(untrained[i])
    if not any(size for _, size in shares):
        return whole(row)
    kept = [length - size for length, (_, size) in zip(lengths, shares, strict=True)]
    cuts = (0, *torch.tensor(kept).cumsum(0).tolist())
    places = [torch.arange(start + size, end) for (start, end), (_, size) in zip(spans, shares, strict=True)]
    heads = tuple((cuts[first], cuts[first] + size) if size else (0, 0) for first, size in shares)
    where = [
        torch.cat([torch.arange(*head), torch.arange(*own)]) for head, own in zip(heads, pairwise(cuts), strict=True)
    ]
    return Tree(torch.cat(places), torch.cat(where), cuts, heads)


def _untrained(trained: torch.Tensor) -> int:
    """Tokens before the first trained one; of a sequence without any, all but its last, which it keeps for itself."""
    places = trained.nonzero()
    return int(places[0]) if len(places) else len(trained) - 1
