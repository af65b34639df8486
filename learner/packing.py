"""Which sequences go together: pure, deterministic functions on lengths and costs.

Invariants:
- Every index appears exactly once in the answer; the same input gives the same answer on every rank.
- A micro-batch stays within the token budget, unless it is a single sequence that alone is longer.
- Where sequences that begin alike are computed together (`prefixes.py`), they go together, and what they share counts once.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from itertools import chain

ATTENTION_EVEN_LENGTH = 24_576
"""Tokens at which attention costs as much as the matrices: about 12 x hidden size, here for a hidden size of 2048."""


def cost(length: int) -> float:
    """Work of one sequence in tokens: linear in the matrices, quadratic in attention."""
    return length * (1.0 + length / ATTENTION_EVEN_LENGTH)


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches of at most `budget` tokens by first-fit decreasing (at most 11/9 of the optimum, Johnson 1973).

    Returns:
        Lists of indices into `lengths`.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = next((r for r, free in enumerate(room) if free >= lengths[index]), None)
        if fits is None:
            rows.append([index])
            room.append(budget - lengths[index])
        else:
            rows[fits].append(index)
            room[fits] -= lengths[index]
    return rows


BUNDLES = 4
"""Bundles per rank that there are at least, of several ranks: with fewer, some would have much more to do than others."""

Head = tuple[Hashable, int]
"""What a sequence begins with, and how many tokens that is; sequences with equal heads share them."""


def share(
    lengths: Sequence[int], parts: int, budget: int, heads: Sequence[Head] | None = None
) -> list[list[list[int]]]:
    """For each of `parts` ranks its micro-batches of at most `budget` tokens, as indices into `lengths`; all cost much the same.

    Args:
        heads: of each sequence, where equal ones are computed once in a micro-batch.
    """
    heads = heads or [(i, 0) for i in range(len(lengths))]
    bundles = bundle(lengths, heads, budget if parts == 1 else min(budget, sum(lengths) // (BUNDLES * parts)))
    sizes = [sum(lengths[i] for i in one) - heads[one[0]][1] * (len(one) - 1) for one in bundles]
    shares = split([cost(size) for size in sizes], parts)
    return [
        [list(chain.from_iterable(bundles[part[i]] for i in row)) for row in pack([sizes[i] for i in part], budget)]
        for part in map(sorted, shares)
    ]


def bundle(lengths: Sequence[int], heads: Sequence[Head], limit: int) -> list[list[int]]:
    """Indices of sequences with equal heads together, in bundles of at most `limit` tokens with each head counted once, or of a
    single sequence."""
    bundles: list[list[int]] = []
    open_ones: dict[Head, tuple[list[int], int]] = {}
    for index, (length, head) in enumerate(zip(lengths, heads, strict=True)):
        one, size = open_ones.get(head, ([], 0))
        own = length - head[1] if one else length
        if one and size + own > limit:
            one, size, own = [], 0, length
        if not one:
            bundles.append(one)
        one.append(index)
        open_ones[head] = (one, size + own)
    return bundles


def split(costs: Sequence[float], parts: int) -> list[list[int]]:
    """`parts` lists of indices with nearly equal total cost: longest first to the least loaded (Graham 1969).

    No list costs more than 4/3 of the best possible maximum; lists are empty where there are fewer items than parts.
    """
    answer: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0.0, part) for part in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(loads)
        answer[part].append(index)
        heapq.heappush(loads, (load + costs[index], part))
    return answer
