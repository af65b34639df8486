"""Which sequences go together: pure, deterministic functions on lengths and costs.

Invariants:
- Every index appears exactly once in the answer; the same input gives the same answer on every rank.
- A micro-batch stays within the token budget, unless it is a single sequence that alone is longer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

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


def share(lengths: Sequence[int], parts: int, budget: int) -> list[list[list[int]]]:
    """For each of `parts` ranks its micro-batches of at most `budget` tokens, as indices into `lengths`; all cost much the same."""
    shares = split([cost(length) for length in lengths], parts)
    return [
        [[part[i] for i in row] for row in pack([lengths[i] for i in part], budget)] for part in map(sorted, shares)
    ]


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
