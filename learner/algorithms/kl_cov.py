"""KL-Cov: tokens with the highest covariances are held near the proximal policy, so that the entropy does not collapse.

Cui et al. 2025, arXiv:2505.22617. With the covariances of `covariance.py`,

    I = the tokens with the floor(share x N) largest Cov, of these those with Cov > 0
    loss = - r A + BETA KL(q || p) for tokens in I, elsewhere - r A,    r = p / q

The divergence of one token is estimated by r - 1 - log r (k3, Schulman 2020), unbiased for tokens that q samples; the authors' code
takes |log r|. There is no clip. In the first optimizer step of a batch p is q: the penalty begins to hold with the second, so that
`minibatches` should be 2 or more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...configs.algorithm import KlCov
from ..backend import Gather, PackedRow
from .covariance import largest
from .tokens import Selection, Surrogate, SurrogateLoss, Tokens

BETA = 1.0
"""Weight of the divergence, as in the authors' scripts."""


def selection(config: KlCov, rows: Sequence[PackedRow], gather: Gather) -> Selection:
    """Collective. The tokens that are held in the step on `rows`."""
    return largest(config.share, rows, gather)


def surrogate(config: KlCov) -> SurrogateLoss:
    """The loss per token; `clipped` says where the divergence was added."""

    def loss(tokens: Tokens) -> Surrogate:
        log_ratio = tokens.current - tokens.proximal
        plain = -log_ratio.exp() * tokens.advantages
        held = plain + BETA * (torch.expm1(log_ratio) - log_ratio)
        return Surrogate(loss=torch.where(tokens.selected, held, plain), clipped=tokens.selected)

    return loss
