"""From the loss of each token to the loss of a step. With N trained tokens in S sequences on all ranks, and T_s in sequence s,

    token_mean      1/N sum_s sum_t l            every token counts the same (DAPO, Yu et al. 2025, arXiv:2503.14476)
    sequence_mean   1/S sum_s 1/T_s sum_t l      every sequence counts the same (GRPO, Shao et al. 2024, arXiv:2402.03300)
    fixed_length    1/S sum_s 1/L sum_t l        as Dr. GRPO's (Liu et al. 2025, arXiv:2503.20783): no length is favoured

L is the longest that an episode may get, `agent.max_tokens`: a constant, as Dr. GRPO asks, that no batch changes.

Backends divide a loss's sum by N. The other means are the same sum with each token scaled, by N / (S T_s) and by N / (S L): exact
under gradient accumulation and over ranks, because sequences are never cut and N and S are gathered from all ranks before the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...configs.algorithm import Aggregation
from ..backend import Gather, PackedRow
from .tokens import Tokens, sequences_of

Scale = Callable[[Tokens], torch.Tensor]
"""What each token's loss is multiplied by, float[K]."""


def scale_of(kind: Aggregation, longest: int, rows: Sequence[PackedRow], gather: Gather) -> Scale | None:
    """Collective. The scale of tokens in the step on `rows`; None where it is 1.

    Args:
        longest: L, tokens.
    """
    if kind == "token_mean":
        return None
    lengths = [sequences_of(row)[1] for row in rows]
    mine = [[float(each.sum()), float((each > 0).sum())] for each in lengths]
    tokens, sequences = gather(torch.tensor([[0.0, 0.0], *mine], dtype=torch.float64)).sum(0).tolist()
    factor = tokens / max(1.0, sequences)
    if kind == "sequence_mean":
        return lambda t: factor / t.lengths[t.sequence].to(t.current.dtype)
    return lambda t: torch.full_like(t.proximal, factor / longest)
