"""The divergence from a reference policy, KL(p || f), estimated from tokens that p sampled.

With log r = log f - log p at a token, after Schulman 2020, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html),

    k1 = -log r                 unbiased, of either sign
    k2 = (log r)^2 / 2          biased, low variance; its gradient is that of the divergence
    k3 = r - 1 - log r          unbiased, never negative

In the loss (GRPO, Shao et al. 2024, arXiv:2402.03300, equation 4) the gradient passes through log p of each estimate. That of k1
has mean 0 over tokens that p sampled: it holds the policy nowhere. In the reward (Ouyang et al. 2022, arXiv:2203.02155) nothing
is differentiated, and k1 is the usual choice.
"""

from __future__ import annotations

import torch

from ...configs.algorithm import Estimator
from .tokens import LOG_RATIO_LIMIT


def estimate(kind: Estimator, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """float[K]: the estimate at each token, nats; `logprobs` are those of p, `reference` those of f, float[K] each."""
    log_r = reference - logprobs
    match kind:
        case "k1":
            return -log_r
        case "k2":
            return log_r.square() / 2
        case "k3":
            log_r = log_r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return torch.expm1(log_r) - log_r
