"""Decoupled PPO: the policy that sampled and the policy that is held close are two different ones.

Hilton, Cobbe & Schulman 2021, "Batch size-invariance for policy optimization", arXiv:2110.00641, equation 3. For each trained
token, with behaviour policy b (sampled it, maybe several versions ago), proximal policy q (the weights at the start of this batch)
and current policy p:

    loss = - sg[min(q / b, c)] * min(r A, clip(r, 1 - low, 1 + high) A),    r = p / q

The importance weight q / b is truncated at c (Espeholt et al. 2018, arXiv:1802.01561) and carries no gradient. Separate bounds
are those of DAPO (Yu et al. 2025, arXiv:2503.14476).

Reported sums over trained tokens, with w = p / b: `importance` w, `importance_square` w^2, `kl` (w - 1) - log w, the k3 estimate of
KL(b || p) (Schulman 2020), `entropy`, and `clip_fraction`, 1 where the clip took the gradient away. See `effective_sample_size`.
"""

from __future__ import annotations

import math

import torch

from ...configs.schema import DecoupledPpo
from ..backend import LossOutput, PackedRow, PolicyLoss

LOG_RATIO_LIMIT = 20.0
"""Reported ratios saturate at e^20: their squares stay finite, so that one freak token cannot blank out a metric."""


def loss(config: DecoupledPpo) -> PolicyLoss:
    """The policy loss that `config` asks for."""
    low, high, log_cap = 1.0 - config.clip_low, 1.0 + config.clip_high, math.log(config.importance_cap)

    def policy_loss(logprobs: torch.Tensor, entropy: torch.Tensor, row: PackedRow) -> LossOutput:
        # Selecting first keeps untrained positions out of every exponential, and thereby out of every gradient.
        trained = row.trained
        current, proximal, behavior = logprobs[trained], row.proximal_logprobs[trained], row.behavior_logprobs[trained]
        advantages = row.advantages[trained]
        weight = (proximal - behavior).clamp(max=log_cap).exp()
        ratio = (current - proximal).exp()
        plain, clipped = ratio * advantages, ratio.clamp(low, high) * advantages
        loss_sum = -(weight * torch.minimum(plain, clipped)).sum()
        with torch.no_grad():
            log_w = (current - behavior).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            w = log_w.exp()
            sums = {
                "importance": w.sum(),
                "importance_square": w.square().sum(),
                "kl": (torch.expm1(log_w) - log_w).sum(),
                "entropy": entropy[trained].sum(),
                "clip_fraction": (clipped < plain).sum(),
            }
        return LossOutput(loss_sum=loss_sum, sums=sums)

    return policy_loss


def effective_sample_size(means: dict[str, float]) -> float:
    """(sum w)^2 / (n sum w^2) from the reported means, in (0, 1]: 1 on-policy, near 0 where few tokens weigh everything."""
    square = means["importance_square"]
    return means["importance"] ** 2 / square if square > 0 else 0.0
