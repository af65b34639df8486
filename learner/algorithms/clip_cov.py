"""Clip-Cov: some tokens whose covariance is high carry no gradient in a step, so that the entropy does not collapse.

Cui et al. 2025, arXiv:2505.22617. With the covariances of `covariance.py`,

    I = floor(share x N) tokens, drawn uniformly among those with LOW <= Cov <= HIGH
    loss = 0 for tokens in I, elsewhere - min(r A, clip(r, 1 - low, 1 + high) A),    r = p / q

PPO's clip is that of the authors' code, whose scripts open it wide (1 and 1). There, tokens that this clip holds already are not
drawn, and covariances follow the current policy within a batch; here a draw is settled before its step. The draw is a hash of each
token, so that it is the same on every rank and in every packing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...configs.algorithm import ClipCov
from ..backend import Gather, PackedRow
from .covariance import drawn
from .ppo import clipped_surrogate
from .tokens import Selection, Surrogate, SurrogateLoss, Tokens

LOW, HIGH = 1.0, 5.0
"""Covariances between which tokens are drawn, the authors': far above the mean, without the few that are off any scale."""


def selection(config: ClipCov, rows: Sequence[PackedRow], gather: Gather) -> Selection:
    """Collective. The tokens that carry no gradient in the step on `rows`."""
    return drawn(config.share, LOW, HIGH, rows, gather)


def surrogate(config: ClipCov) -> SurrogateLoss:
    """The loss that `config` asks for, per token; the selected count as clipped."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high

    def loss(tokens: Tokens) -> Surrogate:
        log_ratio = tokens.current - tokens.proximal
        plain = clipped_surrogate(log_ratio.masked_fill(tokens.selected, 0.0), tokens.advantages, low, high)
        # A log-prob that is not a number must not be dropped silently.
        nothing = torch.zeros_like(plain.loss).masked_fill(log_ratio.isnan(), math.nan)
        return Surrogate(
            loss=torch.where(tokens.selected, nothing, plain.loss),
            clipped=plain.clipped | tokens.selected,
        )

    return loss
