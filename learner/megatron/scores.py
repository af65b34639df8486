"""Log-probs and entropies of given tokens from logits whose vocabulary is split over ranks: `learner/logprobs.py` with three sums.

Megatron's own `vocab_parallel_cross_entropy` gives no entropy and overwrites its logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..logprobs import LOWEST, chunks, logits_gradient, token_logprobs


def split_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Collective over `group`. Log-prob of `targets` and entropy, in nats, under softmax(logits / temperature), on every rank.

    Args:
        logits: [K, V / R], rank r's part of the vocabulary, any float dtype.
        targets: int64[K], ids in the whole vocabulary.

    Returns:
        float32[K], float32[K]; both can be differentiated, each rank by its own logits.
    """
    if group.size() == 1:
        return token_logprobs(logits, targets, temperature)
    return _SplitLogprobs.apply(logits, targets, temperature, group)  # pyright: ignore[reportReturnType]


class _SplitLogprobs(torch.autograd.Function):
    """The gradients are those of `learner/logprobs.py`: given normalizer and entropy, each needs a rank's own logits only."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, temperature: float, group: dist.ProcessGroup
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = logits.shape[-1]
        local = targets - group.rank() * width
        owned = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        chosen = logits.new_empty(len(logits), dtype=torch.float32)
        entropy, normalizer = torch.empty_like(chosen), torch.empty_like(chosen)
        for part in chunks(logits):
            z = logits[part].float() / temperature
            largest = z.amax(-1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            z -= largest[:, None]
            weight = z.exp()
            mean = (weight * z.clamp(min=LOWEST)).sum(-1)
            target = z.gather(-1, local[part, None]).squeeze(-1).where(owned[part], 0.0)
            sums = torch.stack([weight.sum(-1), mean, target])
            dist.all_reduce(sums, group=group)
            total = sums[0].log()
            normalizer[part] = largest + total
            chosen[part] = sums[2] - total
            entropy[part] = total - sums[1] / sums[0]
        ctx.save_for_backward(logits, local, owned, normalizer, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, None, None, None]:
        grad_chosen, grad_entropy = grads
        logits, local, owned, normalizer, entropy = ctx.saved_tensors
        targets = torch.where(owned, local, -1)
        grad_logits = logits_gradient(logits, targets, normalizer, entropy, ctx.temperature, grad_chosen, grad_entropy)
        return grad_logits, None, None, None
