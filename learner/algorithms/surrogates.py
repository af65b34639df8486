"""Surrogate losses per token, before correction and aggregation (`policy_loss.py`).

With behavior policy b (sampled the token, maybe several versions ago), proximal policy q (the weights at the start of this batch),
current policy p and T trained tokens in the sequence, for each trained token

    ppo             - min(r A, clip(r, 1 - low, 1 + high) A),                       r = p / b
    dual_clip_ppo   - max(min(r A, clip(r, 1 - low, 1 + high) A), c A)              r = p / b, where A < 0; else as ppo
    decoupled_ppo   - (q / b) min(r A, clip(r, 1 - low, 1 + high) A),               r = p / q
    gspo            - min(s_t A, clip(s_t, 1 - low, 1 + high) A),                   s_t = sg[s] p_t / sg[p_t],
                                                                                    s = (prod_t p_t / q_t)^(1 / T)
    cispo           - sg[min(p / b, 1 + high)] A log p
    sapo            - f(r) A,   f(r) = sigmoid(tau (r - 1)) 4 / tau,                r = p / q
    sppo            (sum_t log(p_t / q_t) - eta A)^2 / (2 eta T)

`clip_cov` and `kl_cov` are in `covariance.py`.
"""

from __future__ import annotations

import math

import torch

from ...configs.algorithm import Cispo, DecoupledPpo, DualClipPpo, Gspo, Ppo, Sapo, Sppo
from .policy_loss import LOG_RATIO_LIMIT, Surrogate, Tokens

DUAL_CLIP = 3.0  # c of dual-clip PPO, the paper's
POSITIVE, NEGATIVE = 1.0, 1.05  # SAPO's temperatures tau, where A > 0 and elsewhere; the paper's


def clipped_surrogate(log_ratio: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> Surrogate:
    """- min(r A, clip(r, low, high) A) of each token, and where the clip took the gradient away."""
    ratio = torch.where(advantages > 0, log_ratio.clamp(max=LOG_RATIO_LIMIT), log_ratio).exp()
    plain, bounded = ratio * advantages, ratio.clamp(low, high) * advantages
    return Surrogate(loss=-torch.minimum(plain, bounded), clipped=bounded < plain)


def ppo(config: Ppo | DualClipPpo, tokens: Tokens) -> Surrogate:
    """PPO (Schulman et al. 2017, arXiv:1707.06347, equation 7) and dual-clip PPO (Ye et al. 2020, arXiv:1912.09729). The ratio
    covers the whole way from the policy that sampled to the one that steps. The second bound keeps a token that became much
    likelier since it was sampled from dominating."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    log_ratio = tokens.current - tokens.behavior
    if not isinstance(config, DualClipPpo):
        return clipped_surrogate(log_ratio, tokens.advantages, low, high)
    # For A < 0 the single clip's loss is |A| max(r, low): its bound is one on r, taken before r can be infinite.
    over = (tokens.advantages < 0) & (log_ratio > math.log(DUAL_CLIP))
    single = clipped_surrogate(log_ratio.masked_fill(over, 0.0), tokens.advantages, low, high)
    return Surrogate(loss=torch.where(over, -DUAL_CLIP * tokens.advantages, single.loss), clipped=single.clipped | over)


def decoupled_ppo(config: DecoupledPpo, tokens: Tokens) -> Surrogate:
    """Decoupled PPO (Hilton, Cobbe & Schulman 2021, arXiv:2110.00641) without its weight q / b, which is the correction's.
    Separate bounds of the clip are those of DAPO (Yu et al. 2025, arXiv:2503.14476)."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    return clipped_surrogate(tokens.current - tokens.proximal, tokens.advantages, low, high)


def gspo(config: Gspo, tokens: Tokens) -> Surrogate:
    """GSPO (Zheng et al. 2025, arXiv:2507.18071): ratio and clip belong to the sequence, as the reward does.

    This is the paper's GSPO-token, which equals GSPO where all tokens of a sequence have one advantage. The paper's mean over
    sequences is `aggregation: sequence_mean`, its old policy here the proximal one: the clip is less wide than what staleness makes
    of s.
    """
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    log_s = tokens.sequence_mean((tokens.current - tokens.proximal).detach())
    # The value is s, the derivative by the token's own log-prob is s too.
    log_ratio = log_s + (tokens.current - tokens.current.detach())
    return clipped_surrogate(log_ratio, tokens.advantages, low, high)


def cispo(config: Cispo, tokens: Tokens) -> Surrogate:
    """CISPO (MiniMax 2025, arXiv:2506.13585, equations 4 and 5): the weight is clipped, where `clipped` is true, and never the
    update. The paper imposes no lower bound. The weight corrects for staleness in itself."""
    log_cap = math.log1p(config.clip_high)
    log_ratio = (tokens.current - tokens.behavior).detach()
    weight = log_ratio.clamp(max=log_cap).exp()
    return Surrogate(loss=-weight * tokens.advantages * tokens.current, clipped=log_ratio > log_cap)


def sapo(config: Sapo, tokens: Tokens) -> Surrogate:
    """SAPO (Gao et al. 2025, arXiv:2511.20347): a smooth gate where PPO has a hard clip. Its slope f'(r) = 4 s (1 - s), with s the
    sigmoid, is 1 at r = 1, the plain policy gradient, and vanishes on both sides."""
    ratio = (tokens.current - tokens.proximal).clamp(max=LOG_RATIO_LIMIT).exp()
    tau = torch.full_like(ratio, NEGATIVE).masked_fill(tokens.advantages > 0, POSITIVE)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau
    return Surrogate(loss=-gate * tokens.advantages, clipped=torch.zeros_like(tokens.selected))


def sppo(config: Sppo, tokens: Tokens) -> Surrogate:
    """SPPO (Wu et al. 2024, arXiv:2405.00675, equation 4.4): the log-ratio of a sequence is regressed on its win rate.

    The paper's square of log(p(y) / q(y)) - eta (P(y wins) - 1/2), with A = P - 1/2 (`estimators.win_rate`), divided by 2 eta: its
    gradient begins as the policy gradient's, - A sum_t grad log p_t, fades as the log-ratio comes to eta A, and changes sign
    beyond.
    """
    log_ratio = tokens.sequence_sum(tokens.current - tokens.proximal)
    lengths = tokens.lengths[tokens.sequence]
    per_token = (log_ratio - config.eta * tokens.advantages).square() / (2 * config.eta * lengths)
    return Surrogate(per_token, torch.zeros_like(tokens.current, dtype=torch.bool))
