"""Log-probs and entropies of given tokens from logits, in float32, one chunk of rows at a time.

Plain autograd would keep a float32 copy of [K, V] for log-softmax and another for the entropy. Here the logits are kept once, in
the model's own dtype, and float32 exists for `CHUNK_ELEMENTS` numbers at a time, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 24
"""Float32 numbers in flight: 64 MiB, several rows even of the largest vocabularies, and large enough to keep a GPU busy."""


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of `targets` and entropy, in nats, under softmax(logits / temperature). Both can be differentiated.

    Args:
        logits: [K, V], any float dtype.
        targets: int64[K].

    Returns:
        float32[K], float32[K].
    """
    return _TokenLogprobs.apply(logits, targets, temperature)  # pyright: ignore[reportReturnType]


class _TokenLogprobs(torch.autograd.Function):
    """With z = logits / T, p = softmax(z), H = -sum p log p:

    d log p_y / dz = onehot(y) - p        dH / dz = -p (log p + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = logits.new_empty(len(logits), dtype=torch.float32)
        entropy, normalizer = torch.empty_like(chosen), torch.empty_like(chosen)
        for part in _chunks(logits):
            z = logits[part].float() / temperature
            normalizer[part] = torch.logsumexp(z, -1)
            chosen[part] = z.gather(-1, targets[part, None]).squeeze(-1) - normalizer[part]
            logp = z - normalizer[part, None]
            # exp(-inf) * -inf is NaN where a model forbids a token; its share of the entropy is 0.
            entropy[part] = -(logp.exp() * logp.clamp(min=torch.finfo(torch.float32).min)).sum(-1)
        ctx.save_for_backward(logits, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:
        grad_chosen, grad_entropy = grads
        logits, targets, normalizer, entropy = ctx.saved_tensors
        grad_logits = torch.zeros_like(logits)
        for part in _chunks(logits):
            logp = logits[part].float() / ctx.temperature - normalizer[part, None]
            p = logp.exp()
            grad = torch.zeros_like(p)
            if grad_chosen is not None:
                grad -= p * grad_chosen[part, None]
                grad.scatter_add_(-1, targets[part, None], grad_chosen[part, None])
            if grad_entropy is not None:
                surprise = logp.clamp(min=torch.finfo(torch.float32).min) + entropy[part, None]
                grad -= p * surprise * grad_entropy[part, None]
            grad_logits[part] = (grad / ctx.temperature).to(logits.dtype)
        return grad_logits, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]
