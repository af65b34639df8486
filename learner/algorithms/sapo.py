"""SAPO: a smooth gate where PPO has a hard clip.

Gao et al. 2025, "Soft adaptive policy optimization", arXiv:2511.20347. With proximal policy q and current policy p, for each
trained token

    loss = - f(r) A,    r = p / q,    f(r) = sigmoid(tau (r - 1)) 4 / tau

and tau the positive temperature where A > 0, the negative one elsewhere. The gate's slope f'(r) = 4 s (1 - s), with s the
sigmoid, is 1 at r = 1, the plain policy gradient, and dies away on both sides. Negative advantages raise many unsampled tokens at
once and are let go a little sooner.
"""

from __future__ import annotations

import torch

from ...configs.algorithm import Sapo
from .tokens import LOG_RATIO_LIMIT, Surrogate, SurrogateLoss, Tokens

POSITIVE, NEGATIVE = 1.0, 1.05
"""The paper's temperatures."""


def surrogate(config: Sapo) -> SurrogateLoss:
    """The loss per token; `clipped` is false everywhere."""

    def loss(tokens: Tokens) -> Surrogate:
        ratio = (tokens.current - tokens.proximal).clamp(max=LOG_RATIO_LIMIT).exp()
        tau = torch.full_like(ratio, NEGATIVE).masked_fill(tokens.advantages > 0, POSITIVE)
        gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
        return Surrogate(loss=-gate * tokens.advantages, clipped=torch.zeros_like(tokens.selected))

    return loss
