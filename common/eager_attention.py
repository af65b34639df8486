"""Attention with what no fused kernel of torch computes: soft-capped scores (Gemma 2, arXiv:2408.00118), and attention sinks
(gpt-oss, arXiv:2508.10925). It holds the scores of all pairs of tokens at once, in memory quadratic in a sequence's length."""

from __future__ import annotations

import torch


def eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """float[B, heads, q, D] of `query` [B, heads, q, D], `key` and `value` [B, heads / n, k, D]; n heads of the query share one.

    Args:
        mask: bool, broadcast to [B, heads, q, k], true where a query attends; None: the causal one of q = k tokens.
        scaling: of the scores; None: 1 / sqrt(D).
        softcap: c in c tanh(score / c); None: scores stay.
        sinks: [heads], a score more for each head that takes a share of the weight and has no value; None: none.
    """
    times = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(times, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=wide).to(value.dtype)
    return weights[..., : key.shape[2]] @ value
