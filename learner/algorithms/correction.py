"""The importance weight between the policies that sampled and the policy at the start of the batch: what
`learner.algorithm.correction` asks for. `auto` is `truncated` for losses around the proximal policy, else `none`; a comparison of
two episodes needs none.

A loss around the proximal policy q assumes that q sampled its tokens; the importance weight q / b corrects that. With T trained
tokens in the sequence, by `level`,

    token       w_t = q_t / b_t
    sequence    w = prod_t q_t / b_t               exact for whole sequences, and of enormous variance where they are long
    geometric   w = (prod_t q_t / b_t)^(1 / T)     biased, the same scale at any length

    truncated   the loss is multiplied by w, held between low and high
    masked      by w where low <= w <= high; tokens outside carry no loss
    rejected    by w, or by another truncated weight; a sequence with any w outside carries no loss

Sources:

    decoupled_ppo, truncated, token     Hilton et al. 2021, arXiv:2110.00641, with the cap of IMPALA (Espeholt et al. 2018,
                                        arXiv:1802.01561); uncapped it is AReaL's (Fu et al. 2025, arXiv:2505.24298)
    any around q, truncated, token      TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
                                        training"), there between two implementations of the same weights
    any around q, masked, token         IcePop (Ling team 2025, arXiv:2510.18855)
    any around q, rejected, sequence    sequences masked by their weight (Liu et al. 2025, "When speed kills stability")

Invariants:
- No weight carries a gradient, and none is infinite.
- Losses around the behavior policy (`SELF_CORRECTING`) hold the weight in their ratio p / b: there `masked` and `rejected` only
  drop.
- Dropped tokens still count in what the step's loss is divided by.
- A NaN log-prob is not dropped: the step is refused.
"""

from __future__ import annotations

import math

import torch

from ...configs.algorithm import (
    SELF_CORRECTING,
    Algorithm,
    AutoCorrection,
    Dpo,
    Level,
    NoCorrection,
    Rejected,
    Truncated,
)
from .policy_loss import Correction, Tokens


def correction_of(config: Algorithm) -> Correction:
    """The weight of each token, and whether it carries loss."""
    own = isinstance(config.loss, SELF_CORRECTING)
    chosen = config.correction
    if isinstance(chosen, AutoCorrection):
        chosen = NoCorrection() if own or isinstance(config.loss, Dpo) else Truncated()
    if isinstance(chosen, NoCorrection):
        return lambda tokens: (torch.ones_like(tokens.proximal), torch.ones_like(tokens.selected))

    def correct(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        log_w = _log_weight(chosen.level, tokens)
        # Also where the weight does not count: what is dropped may be infinite.
        weight = _clamped_weight(log_w, chosen.bounds)
        if isinstance(chosen, Truncated):
            return weight, torch.ones_like(tokens.selected)
        low, high = map(_log, chosen.bounds)
        # Not `low <= w <= high`, which is false for NaN: that must not be dropped silently.
        outside = (log_w < low) | (log_w > high)
        if isinstance(chosen, Rejected):
            outside = tokens.sequence_sum(outside.to(log_w.dtype)) > 0
            if chosen.weights is not None:
                weight = _clamped_weight(_log_weight(chosen.weights.level, tokens), chosen.weights.bounds)
        return torch.ones_like(weight) if own else weight, ~outside

    return correct


def _log_weight(level: Level, tokens: Tokens) -> torch.Tensor:
    ratio = tokens.proximal - tokens.behavior
    match level:
        case "token":
            return ratio
        case "sequence":
            return tokens.sequence_sum(ratio)
        case "geometric":
            return tokens.sequence_mean(ratio)


def _clamped_weight(log_w: torch.Tensor, bounds: tuple[float, float]) -> torch.Tensor:
    low, high = map(_log, bounds)
    return log_w.clamp(low, high).exp()


def _log(bound: float) -> float:
    return math.log(bound) if bound else -math.inf
