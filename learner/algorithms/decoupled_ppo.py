"""Decoupled PPO: the policy that sampled and the policy that is held close are two different ones.

Hilton, Cobbe & Schulman 2021, "Batch size-invariance for policy optimization", arXiv:2110.00641. For each trained token,
with behaviour policy b (sampled it, maybe several versions ago), proximal policy q (the weights at the start of this batch)
and current policy p:

    loss = - (q / b) min(r A, clip(r, 1 - low, 1 + high) A),    r = p / q

Here is the clipped part. The weight q / b carries no gradient and is the correction's (`correction.py`), which also bounds it.
Separate bounds of the clip are those of DAPO (Yu et al. 2025, arXiv:2503.14476).
"""

from __future__ import annotations

from ...configs.algorithm import DecoupledPpo
from .ppo import clipped_surrogate
from .tokens import Surrogate, SurrogateLoss, Tokens


def surrogate(config: DecoupledPpo) -> SurrogateLoss:
    """The loss that `config` asks for, per token."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high

    def loss(tokens: Tokens) -> Surrogate:
        return clipped_surrogate(tokens.current - tokens.proximal, tokens.advantages, low, high)

    return loss
