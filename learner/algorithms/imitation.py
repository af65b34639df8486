"""Imitation of what went well: a supervised loss on the episodes that earned something, beside the policy loss.

Yue et al. 2025, "VAPO: Efficient and Reliable Reinforcement Learning for Advanced Reasoning Tasks", arXiv:2504.05118, its
positive-example language-model loss. With P the trained tokens of episodes whose reward is above 0, in the whole step,

    coefficient x  - 1 / |P|  sum over t in P of log p_t

Where good answers are rare it makes more of each. It is a mean over its own tokens, whatever `aggregation` is, and no correction
weighs it: what was good remains worth imitating however old it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..backend import Gather, PackedRow
from .tokens import Tokens

Imitation = Callable[[Tokens], torch.Tensor]
"""What is added to the loss sum of a row."""


def imitation_of(coefficient: float, rows: Sequence[PackedRow], gather: Gather) -> Imitation | None:
    """Collective. The supervised part of the loss of the step on `rows`; None where there is none, or nothing to imitate."""
    if not coefficient:
        return None
    mine = [[float(row.trained.sum()), float((row.trained & row.earned).sum())] for row in rows]
    trained, good = gather(torch.tensor([[0.0, 0.0], *mine], dtype=torch.float64)).sum(0).tolist()
    if not good:
        return None
    factor = coefficient * trained / good  # the backend divides by all trained tokens
    return lambda tokens: -factor * tokens.current[tokens.earned].sum()
