"""Sampling in Slipstream's own server: one token per sequence from a batch of logits.

Invariants:
- A log-prob is that of the distribution from which the token was sampled: after temperature, top-k and top-p, as vLLM's
  `processed_logprobs`. Greedy sampling (temperature 0) reports the model's own distribution, at temperature 1.
- The token of a sequence depends on its own uniform number and logits only: equal seeds give equal tokens in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..base import SamplingParams


def draw(
    logits: torch.Tensor, samplings: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token per row of `logits` (float32[n, vocabulary]), by inversion of its distribution function at one of n `uniforms` in
    [0, 1); the n tokens and their log-probs in nats."""
    greedy = [s.temperature == 0.0 for s in samplings]
    temperatures = [s.temperature or 1.0 for s in samplings]
    if any(t != 1.0 for t in temperatures):
        logits = logits / logits.new_tensor(temperatures)[:, None]
    if any(not g and (s.top_k > 0 or s.top_p < 1.0) for g, s in zip(greedy, samplings, strict=True)):
        logits = _truncate(logits, samplings, greedy)
    logprobs = logits.log_softmax(-1)
    if all(greedy):
        tokens = logprobs.argmax(-1)
    else:
        mass = logprobs.double().exp().cumsum(-1)
        total = mass[:, -1]
        at = torch.tensor(uniforms, dtype=torch.float64, device=logits.device) * total
        # Rounded up, it would exceed the last index.
        at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))
        # Without finite weights nothing is found; the client then rejects the log-prob.
        tokens = torch.searchsorted(mass, at[:, None], right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=logits.device), logprobs.argmax(-1), tokens)
    return tokens.tolist(), logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()


def _truncate(logits: torch.Tensor, samplings: Sequence[SamplingParams], greedy: Sequence[bool]) -> torch.Tensor:
    """Minus infinity for tokens outside the `top_k` most likely, and outside the smallest set of those that holds `top_p` of their
    mass. Top-k keeps all of several equally likely tokens at the edge."""
    size = logits.shape[1]
    ks = [size if g or s.top_k < 1 else min(s.top_k, size) for g, s in zip(greedy, samplings, strict=True)]
    ps = [1.0 if g else s.top_p for g, s in zip(greedy, samplings, strict=True)]
    values, order = logits.sort(-1)  # ascending: the least likely first
    least = values.gather(1, size - torch.tensor(ks, device=logits.device)[:, None])
    values = values.masked_fill(values < least, -torch.inf)
    below = values.softmax(-1).cumsum(-1)
    outside = below <= 1.0 - torch.tensor(ps, dtype=below.dtype, device=logits.device)[:, None]
    outside[:, -1] = False
    values = values.masked_fill(outside, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, values)


@torch.inference_mode()
def score(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """Log-probs in nats of `token_ids[1:]` at temperature 1, from a forward pass without a cache."""
    tokens = torch.tensor([token_ids], device=model.device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    chosen = logits.gather(1, tokens[0, 1:, None]).squeeze(1)
    return (chosen - logits.logsumexp(-1)).tolist()
