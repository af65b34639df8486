"""Surrogate losses per token, before correction and aggregation (`policy_loss.py`).

With behavior policy b (sampled the token, maybe several versions ago), proximal policy q (the weights at the start of this batch),
current policy p and T trained tokens in the sequence, for each trained token

    ppo             - min(r A, clip(r, 1 - low, 1 + high) A),                       r = p / b
    dual_clip_ppo   - max(min(r A, clip(r, 1 - low, 1 + high) A), c A)              r = p / b, where A < 0; else as ppo
    decoupled_ppo   - min(r A, clip(r, 1 - low, 1 + high) A),                       r = p / q
    dual_clip_decoupled_ppo     as dual_clip_ppo,                                   r = p / q
    gspo            - min(s_t A, clip(s_t, 1 - low, 1 + high) A),                   s_t = sg[s] p_t / sg[p_t],
                                                                                    s = (prod_t p_t / q_t)^(1 / T)
    cispo           - sg[clip(p / b, 1 - low, 1 + high)] A log p
    sapo            - f(r) A,   f(r) = sigmoid(tau (r - 1)) 4 / tau,                r = p / q
    sppo            (sum_t log(p_t / q_t) - eta A)^2 / (2 eta T)

`clip_cov` and `kl_cov` are in `covariance.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ...configs.algorithm import (
    Cispo,
    DecoupledPpo,
    DualClipDecoupledPpo,
    DualClipPpo,
    Gspo,
    Ppo,
    Sapo,
    Sppo,
)
from .divergence import LOG_RATIO_LIMIT
from .policy_loss import Surrogate, Tokens


class _SaturatingExp(torch.autograd.Function):
    """See `saturating_exp`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clamp(max=LOG_RATIO_LIMIT).exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradients[0] * y


def saturating_exp(log_ratio: torch.Tensor) -> torch.Tensor:
    """float[K]: e^x, and e^20 beyond x = 20, where the derivative is e^20, too: a policy that made a bad token far too likely keeps
    a gradient. Neither is ever infinite, so that what a mask or an advantage of 0 takes away leaves no NaN."""
    result = _SaturatingExp.apply(log_ratio)
    assert isinstance(result, torch.Tensor)
    return result


def clipped_surrogate(log_ratio: torch.Tensor, advantages: torch.Tensor, clip: tuple[float, float]) -> Surrogate:
    """- min(r A, clip(r, 1 - low, 1 + high) A) of each token, and where the clip took the gradient away."""
    ratio = saturating_exp(log_ratio)
    plain, bounded = ratio * advantages, ratio.clamp(1.0 - clip[0], 1.0 + clip[1]) * advantages
    return Surrogate(loss=-torch.minimum(plain, bounded), clipped=bounded < plain)


def dual_clipped_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, clip: tuple[float, float, float]
) -> Surrogate:
    """The same, at most - c A where A < 0: a token that became much likelier since it was sampled does not dominate. There the
    single clip's loss is |A| max(r, 1 - low): the bound is one on r."""
    *single, c = clip
    over = (advantages < 0) & (log_ratio > math.log(c))
    plain = clipped_surrogate(log_ratio.masked_fill(over, 0.0), advantages, (single[0], single[1]))
    return Surrogate(loss=torch.where(over, -c * advantages, plain.loss), clipped=plain.clipped | over)


def ppo(config: Ppo, tokens: Tokens) -> Surrogate:
    """PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7). The ratio covers the whole way from the policy that sampled to the
    one that steps."""
    return clipped_surrogate(tokens.current - tokens.behavior, tokens.advantages, config.clip)


def dual_clip_ppo(config: DualClipPpo, tokens: Tokens) -> Surrogate:
    """Dual-clip PPO (Ye et al. 2020, arXiv:1912.09729), with the ratio of `ppo`."""
    return dual_clipped_surrogate(tokens.current - tokens.behavior, tokens.advantages, config.clip)


def decoupled_ppo(config: DecoupledPpo, tokens: Tokens) -> Surrogate:
    """Decoupled PPO (Hilton, Cobbe & Schulman 2021, arXiv:2110.00641) without its weight q / b, which is the correction's.
    Separate bounds of the clip are those of DAPO (Yu et al. 2025, arXiv:2503.14476)."""
    return clipped_surrogate(tokens.current - tokens.proximal, tokens.advantages, config.clip)


def dual_clip_decoupled_ppo(config: DualClipDecoupledPpo, tokens: Tokens) -> Surrogate:
    """Dual-clip PPO with the ratio of `decoupled_ppo`."""
    return dual_clipped_surrogate(tokens.current - tokens.proximal, tokens.advantages, config.clip)


def gspo(config: Gspo, tokens: Tokens) -> Surrogate:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): ratio and clip belong to the sequence, as the reward does.

    This is the paper's GSPO-token, which equals GSPO where all tokens of a sequence have one advantage. Its old policy is here the
    proximal one: the clip is less wide than what staleness makes of s.
    """
    log_s = tokens.sequence_mean((tokens.current - tokens.proximal).detach())
    # The value is s, the derivative by the token's own log-prob is s too.
    log_ratio = log_s + (tokens.current - tokens.current.detach())
    return clipped_surrogate(log_ratio, tokens.advantages, config.clip)


def cispo(config: Cispo, tokens: Tokens) -> Surrogate:
    """CISPO (MiniMax 2025, arXiv:2506.13585, equations 4 and 5): the weight is clipped, where `clipped` is true, and never the
    update. The weight corrects for staleness in itself."""
    low, high = config.clip
    log_low, log_high = math.log1p(-low) if low < 1.0 else -math.inf, math.log1p(high)
    log_ratio = (tokens.current - tokens.behavior).detach()
    weight = log_ratio.clamp(log_low, log_high).exp()
    loss = -weight * tokens.advantages * tokens.current
    return Surrogate(loss, clipped=(log_ratio < log_low) | (log_ratio > log_high))


def sapo(config: Sapo, tokens: Tokens) -> Surrogate:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a smooth gate where PPO has a hard clip. Its slope f'(r) = 4 s (1 - s), with s the
    sigmoid, is 1 at r = 1, the plain policy gradient, and vanishes on both sides."""
    ratio = saturating_exp(tokens.current - tokens.proximal)
    positive, other = config.tau
    tau = torch.full_like(ratio, other).masked_fill(tokens.advantages > 0, positive)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return Surrogate(loss=-gate * tokens.advantages, clipped=torch.zeros_like(tokens.selected))


def sppo(config: Sppo, tokens: Tokens) -> Surrogate:
    """SPPO (Wu et al. 2024, arXiv:2405.00675, equation 4.4): the log-ratio of a sequence is regressed on its win rate.

    The paper's square of log(p(y) / q(y)) - eta (P(y wins) - 1/2), with A = P - 1/2 (`estimators.win_rate`), divided by 2 eta: its
    gradient begins as the policy gradient's, - A sum_t grad log p_t, fades as the log-ratio comes to eta A, and changes sign
    beyond. A sequence has it in T equal parts, whose sum over the sequence is the paper's loss: `aggregation: sequence_sum`.
    """
    log_ratio = tokens.sequence_sum(tokens.current - tokens.proximal)
    lengths = tokens.lengths[tokens.sequence]
    per_token = (log_ratio - config.eta * tokens.advantages).square() / (2 * config.eta * lengths)
    return Surrogate(per_token, torch.zeros_like(tokens.current, dtype=torch.bool))
