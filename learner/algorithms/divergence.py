"""The divergence of the policy from a reference policy: its estimate at a token, and what a nat of it costs.

    fixed       the coefficient of the config
    adaptive    Ziegler et al. 2019, arXiv:1909.08593, section 2.2: after each step, with the divergence d of an episode in nats,

                    e = clip(d / target - 1, -0.2, 0.2)        coefficient <- coefficient (1 + 0.1 e)

An adaptive coefficient is state of the algorithm: it is the same on all ranks, and checkpoints hold it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...configs.divergence import Estimator, Kl

LOG_RATIO_LIMIT = 20.0
"""Ratios saturate at e^20, far above any clip: where a mask, a clip, a gate or an advantage of 0 takes the gradient away the ratio
must not be infinite, for infinity times 0 is NaN; squares of reported ratios stay finite, so that one token blanks out no
metric."""

KL_COEFFICIENT = "kl_coefficient"  # its name in `CheckpointState.algorithm`
GAIN = 0.1  # K of the paper: how fast the coefficient follows
ERROR_LIMIT = 0.2  # of the relative error, so that one odd batch moves it little


def kl_estimate(kind: Estimator, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The divergence from a reference policy, KL(p || f), estimated at each token that p sampled, float[K], nats.

    `logprobs` are those of p, `reference` those of f, float[K] each.

    With log r = log f - log p, after Schulman 2020, "Approximating KL Divergence" (http://joschu.net/blog/kl-approx.html),

        k1 = -log r                 unbiased, of either sign
        k2 = (log r)^2 / 2          biased, low variance; its gradient is that of the divergence
        k3 = r - 1 - log r          unbiased, never negative

    In the loss (GRPO, Shao et al. 2024, arXiv:2402.03300, equation 4) the gradient passes through log p; that of k1 has mean 0 and
    does not hold the policy. In the reward (Ouyang et al. 2022, arXiv:2203.02155) k1 is the usual choice.
    """
    log_r = reference - logprobs
    match kind:
        case "k1":
            return -log_r
        case "k2":
            return log_r.square() / 2
        case "k3":
            log_r = log_r.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            return torch.expm1(log_r) - log_r


def coefficient_of(kl: Kl, carried: Mapping[str, float]) -> float:
    """What a nat costs now: where the coefficient is adaptive what the algorithm carries, at first what the config begins with."""
    if isinstance(kl.coefficient, dict):
        return carried.get(KL_COEFFICIENT, kl.coefficient["start"])
    return kl.coefficient


def next_coefficient(kl: Kl, coefficient: float, divergence: float) -> float:
    """The coefficient after a step in which an episode diverged by so many nats on average; see above."""
    if not isinstance(kl.coefficient, dict):
        return coefficient
    error = divergence / kl.coefficient["target"] - 1.0
    return coefficient * (1.0 + GAIN * max(-ERROR_LIMIT, min(ERROR_LIMIT, error)))
