"""Log-probs and entropies of given tokens from logits, in float32, one chunk of rows at a time: plain autograd would keep two
float32 copies of [K, V]. Here the logits are kept once, in the model's own dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

CPU_CHUNK, GPU_CHUNK = 1 << 18, 1 << 24  # float32 numbers: 1 MiB stays in a core's cache; 64 MiB are many rows

LOWEST = torch.finfo(torch.float32).min
"""In place of the -inf of a token that a model forbids: exp(-inf) * -inf is NaN, its share of an entropy is 0."""


def token_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of `targets`, float32 in their shape, and entropy, float32[K], in nats, under softmax(logits / temperature). Both
    can be differentiated.

    Args:
        logits: [K, V], any float dtype; [K, V / R] where the vocabulary is split over the R ranks of `group`, in their order.
        targets: int64[K], ids in the whole vocabulary; int64[K, M] for M tokens after each position.
        group: makes the call collective: every rank gets the results, and differentiates them by its own logits.
    """
    split = group if group is not None and group.size() > 1 else None
    return _TokenLogprobs.apply(logits, targets, temperature, split)  # pyright: ignore[reportReturnType]


class _TokenLogprobs(torch.autograd.Function):
    """With z = logits / T, p = softmax(z), H = -sum p log p, a rank of a split vocabulary needs its own logits only:

    d log p_y / dz = onehot(y) - p        dH / dz = -p (log p + H)

    Of M targets the gradients add up, so that no [K, V] is kept for each.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = logits.shape[-1]
        local = targets if targets.ndim == 2 else targets[:, None]
        if group is not None:  # -1 where another rank has the target
            local = local - group.rank() * width
            local = local.where((local >= 0) & (local < width), -1)
        chosen = logits.new_empty(targets.shape, dtype=torch.float32)
        by_target = chosen.view(local.shape)
        entropy = logits.new_empty(len(logits), dtype=torch.float32)
        normalizer = torch.empty_like(entropy)
        for part in _chunks(logits):
            z = (logits[part].float() / temperature).clamp_(min=LOWEST)
            target = logits[part].gather(-1, local[part].clamp(min=0)).float() / temperature
            target = target.where(local[part] >= 0, 0.0)
            largest = z.amax(-1)
            if group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            z -= largest[:, None]
            weights = z.exp()
            sums = torch.stack([weights.sum(-1), weights.mul_(z).sum(-1), *target.unbind(-1)])
            if group is not None:
                dist.all_reduce(sums, group=group)
            total, weighted, *target = sums
            log_total = total.log()
            entropy[part] = log_total - weighted / total
            normalizer[part] = largest + log_total
            by_target[part] = torch.stack(target, -1) - normalizer[part, None]
        ctx.save_for_backward(logits, local, normalizer, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None, None]:
        """`targets`, int64[K, M], are -1 where they are in another rank's part of the vocabulary."""
        grad_chosen, grad_entropy = grads
        logits, targets, normalizer, entropy = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        by_target = torch.zeros_like(targets, dtype=torch.float32)
        if grad_chosen is not None:
            by_target = grad_chosen.reshape(targets.shape)
        scale, owned = by_target.sum(-1), by_target * (targets >= 0)
        for part in _chunks(logits):
            logp = (logits[part].float() / ctx.temperature).sub_(normalizer[part, None])
            if grad_entropy is None:
                grad = logp.exp_().mul_(-scale[part, None])
            else:
                grad = logp.exp()
                surprise = logp.clamp_(min=LOWEST).add_(entropy[part, None])
                grad.mul_(surprise.mul_(-grad_entropy[part, None]).sub_(scale[part, None]))
            grad.scatter_add_(-1, targets[part].clamp(min=0), owned[part])
            grad_logits[part] = grad.div_(ctx.temperature)
        return grad_logits, None, None, None


def _chunks(logits: torch.Tensor) -> list[slice]:
    elements = CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK
    rows = max(1, elements // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]
