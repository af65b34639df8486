"""GSPO: ratio and clip belong to the sequence, as the reward does.

Zheng et al. 2025, "Group sequence policy optimization", arXiv:2507.18071. With T trained tokens y of a sequence, proximal policy q
and current policy p,

    s = (p(y) / q(y))^(1 / T) = exp(mean_t log p_t / q_t)
    loss_t = - min(s_t A_t, clip(s_t, 1 - low, 1 + high) A_t),    s_t = sg[s] p_t / sg[p_t]

This is the paper's GSPO-token: equal to GSPO in value and gradient where all tokens of a sequence have one advantage, and right
where they have not, as with credit by turn. The paper's mean over sequences is `aggregation: sequence_mean`.

The paper's old policy is the proximal one here: the clip is ten-thousandths wide, less than staleness or another kernel makes of s.
"""

from __future__ import annotations

from ...configs.algorithm import Gspo
from .ppo import clipped_surrogate
from .tokens import Surrogate, SurrogateLoss, Tokens


def surrogate(config: Gspo) -> SurrogateLoss:
    """The loss that `config` asks for, per token."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high

    def loss(tokens: Tokens) -> Surrogate:
        log_s = tokens.sequence_mean((tokens.current - tokens.proximal).detach())
        # The value is s, the derivative by the token's own log-prob is s too.
        log_ratio = log_s + (tokens.current - tokens.current.detach())
        return clipped_surrogate(log_ratio, tokens.advantages, low, high)

    return loss
