"""SPPO: a sequence becomes as much more likely as it wins more often.

Wu et al. 2024, "Self-Play Preference Optimization for Language Model Alignment", arXiv:2405.00675, equation 4.4: the square of
log(p(y) / q(y)) - eta (P(y wins) - 1/2) for a sequence y, current policy p and the policy q that the round began with, here the
proximal one. With A = P - 1/2 (`win_rate`) and T trained tokens of the sequence,

    loss_t = (sum_t log(p_t / q_t) - eta A_t)^2 / (2 eta T)

Divided by 2 eta its gradient begins as that of the policy gradient, - A sum_t grad log p_t, and fades as the log-ratio comes to
eta A. Nothing is clipped: the square draws back what went too far.
"""

from __future__ import annotations

import torch

from ...configs.algorithm import Sppo
from .tokens import Surrogate, SurrogateLoss, Tokens


def surrogate(config: Sppo) -> SurrogateLoss:
    """The loss that `config` asks for, per token."""

    def loss(tokens: Tokens) -> Surrogate:
        log_ratio = tokens.sequence_sum(tokens.current - tokens.proximal)
        lengths = tokens.lengths[tokens.sequence]
        per_token = (log_ratio - config.eta * tokens.advantages).square() / (2 * config.eta * lengths)
        return Surrogate(per_token, torch.zeros_like(tokens.current, dtype=torch.bool))

    return loss
