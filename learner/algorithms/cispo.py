"""CISPO: the importance weight is clipped, never the update, so that every token keeps its gradient.

MiniMax 2025, "MiniMax-M1: scaling test-time compute efficiently with lightning attention", arXiv:2506.13585, equations 4 and 5.
With behaviour policy b and current policy p, for each trained token

    loss = - sg[min(p / b, 1 + high)] A log p

The paper imposes no lower bound. The weight is that of the policy that steps over the one that sampled: a truncated importance
weight in itself, so that nothing is left to correct.
"""

from __future__ import annotations

import math

from ...configs.algorithm import Cispo
from .tokens import Surrogate, SurrogateLoss, Tokens


def surrogate(config: Cispo) -> SurrogateLoss:
    """The loss that `config` asks for, per token; `clipped` says where the weight was."""
    log_cap = math.log1p(config.clip_high)

    def loss(tokens: Tokens) -> Surrogate:
        log_ratio = (tokens.current - tokens.behavior).detach()
        weight = log_ratio.clamp(max=log_cap).exp()
        return Surrogate(loss=-weight * tokens.advantages * tokens.current, clipped=log_ratio > log_cap)

    return loss
