"""Log-probs and entropies of given tokens from logits, in float32, one chunk of rows at a time.

Plain autograd would keep a float32 copy of [K, V] for log-softmax and another for the entropy. Here the logits are kept once, in
the model's own dtype, and float32 exists for a chunk at a time, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch

CPU_CHUNK, GPU_CHUNK = 1 << 18, 1 << 24
"""Float32 numbers in flight: 1 MiB, which stays in a core's cache, and 64 MiB, several rows even of the largest vocabularies, which
keep a GPU busy."""

LOWEST = torch.finfo(torch.float32).min
"""In place of the -inf of a token that a model forbids: exp(-inf) * -inf is NaN, its share of an entropy is 0."""


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
        for part in chunks(logits):
            z = (logits[part].float() / temperature).clamp_(min=LOWEST)
            largest = z.amax(-1)
            z -= largest[:, None]
            weights = z.exp()
            total = weights.sum(-1)
            log_total = total.log()
            entropy[part] = log_total - weights.mul_(z).sum(-1) / total
            normalizer[part] = largest + log_total
            chosen[part] = (
                logits[part].gather(-1, targets[part, None]).squeeze(-1).float() / temperature - normalizer[part]
            )
        ctx.save_for_backward(logits, targets, normalizer, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None]:
        grad_chosen, grad_entropy = grads
        logits, targets, normalizer, entropy = ctx.saved_tensors
        grad_logits = logits_gradient(logits, targets, normalizer, entropy, ctx.temperature, grad_chosen, grad_entropy)
        return grad_logits, None, None


def logits_gradient(
    logits: torch.Tensor,
    targets: torch.Tensor,
    normalizer: torch.Tensor,
    entropy: torch.Tensor,
    temperature: float,
    grad_chosen: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
) -> torch.Tensor:
    """[K, V], the gradient by logits from that by the log-prob of `targets` and that by the entropy, float32[K] each.

    Of a vocabulary that is split over ranks `logits` are one part; a target in another part has -1.

    Args:
        normalizer: float32[K], log of the sum of exp(logits / temperature) over the whole vocabulary.
        entropy: float32[K].
    """
    grad_logits = torch.empty_like(logits)
    owned = targets >= 0
    scale = torch.zeros_like(normalizer) if grad_chosen is None else grad_chosen
    for part in chunks(logits):
        logp = (logits[part].float() / temperature).sub_(normalizer[part, None])
        if grad_entropy is None:
            grad = logp.exp_().mul_(-scale[part, None])
        else:
            grad = logp.exp()
            surprise = logp.clamp_(min=LOWEST).add_(entropy[part, None])
            grad.mul_(surprise.mul_(-grad_entropy[part, None]).sub_(scale[part, None]))
        grad.scatter_add_(-1, targets[part, None].clamp(min=0), (scale * owned)[part, None])
        grad_logits[part] = grad.div_(temperature)
    return grad_logits


def chunks(logits: torch.Tensor) -> list[slice]:
    """Rows that are brought to float32 at a time."""
    elements = CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK
    rows = max(1, elements // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]
