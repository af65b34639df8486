"""PPO's clipped surrogate, around the policy that sampled, and the dual clip.

Schulman et al. 2017, "Proximal policy optimization algorithms", arXiv:1707.06347, equation 7. With behaviour policy b and current
policy p, for each trained token

    loss = - min(r A, clip(r, 1 - low, 1 + high) A),    r = p / b

`dual_clip_ppo` bounds the other side too (Ye et al. 2020, "Mastering complex control in MOBA games with deep reinforcement
learning", arXiv:1912.09729): where A < 0 the loss is at most - c A, so that a token that became much likelier since it was
sampled cannot dominate,

    loss = - max(min(r A, clip(r, 1 - low, 1 + high) A), c A)    where A < 0

The ratio holds the whole way from the policy that sampled to the one that steps: nothing is left to correct. What it costs is
that staleness alone uses up the clip range; `decoupled_ppo` is the answer to that.
"""

from __future__ import annotations

import math

import torch

from ...configs.algorithm import DualClipPpo, Ppo
from .tokens import LOG_RATIO_LIMIT, Surrogate, SurrogateLoss, Tokens

DUAL_CLIP = 3.0
"""The paper's c."""


def clipped_surrogate(log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> Surrogate:
    """- min(r A, clip(r, low, high) A) of each token, and where the clip took the gradient away."""
    ratio = torch.where(advantages > 0, log_ratio.clamp(max=LOG_RATIO_LIMIT), log_ratio).exp()
    plain, bounded = ratio * advantages, ratio.clamp(low, high) * advantages
    return Surrogate(loss=-torch.minimum(plain, bounded), clipped=bounded < plain)


def surrogate(config: Ppo | DualClipPpo) -> SurrogateLoss:
    """The loss that `config` asks for, per token."""
    low, high, dual = 1.0 - config.clip_low, 1.0 + config.clip_high, isinstance(config, DualClipPpo)

    def loss(tokens: Tokens) -> Surrogate:
        log_ratio = tokens.current - tokens.behavior
        if not dual:
            return clipped_surrogate(log_ratio, tokens.advantages, low, high)
        # For A < 0 the single clip's loss is |A| max(r, low): its bound is one on r, taken before r can be infinite.
        over = (tokens.advantages < 0) & (log_ratio > math.log(DUAL_CLIP))
        single = clipped_surrogate(log_ratio.masked_fill(over, 0.0), tokens.advantages, low, high)
        return Surrogate(
            loss=torch.where(over, -DUAL_CLIP * tokens.advantages, single.loss), clipped=single.clipped | over
        )

    return loss
