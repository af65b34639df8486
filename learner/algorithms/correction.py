"""Off-policy correction: what the policies that sampled and the policy at the start of the batch disagree about.

Tokens were sampled by the behaviour policy b: older weights, and another implementation of them. A loss around the proximal
policy q compares the current policy with q alone and takes its tokens for q's own; the weight q / b of importance sampling makes
it right. With T trained tokens in the sequence, by `level`,

    token       w_t = q_t / b_t
    sequence    w = prod_t q_t / b_t               exact for whole sequences, and of enormous variance where they are long
    geometric   w = (prod_t q_t / b_t)^(1 / T)     biased, the same scale at any length

    truncated   the loss is multiplied by min(w, high)
    masked      by w where low <= w <= high; tokens outside carry no loss
    rejected    by w; a sequence with any w outside carries no loss

No weight carries a gradient. With other levels than `token` every w of a sequence is the same, and masked is rejected.

    decoupled_ppo, truncated, token     Hilton et al. 2021, arXiv:2110.00641, with the cap of IMPALA (Espeholt et al. 2018,
                                        arXiv:1802.01561); uncapped it is AReaL's (Fu et al. 2025, arXiv:2505.24298)
    any around q, truncated, token      TIS (Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
                                        training"), there between two implementations of the same weights
    any around q, masked, token         IcePop (Ling team 2025, arXiv:2510.18855)
    any around q, rejected, sequence    sequences masked by their weight (Liu et al. 2025, "When speed kills stability")

Losses around the behaviour policy (`SELF_CORRECTING`) hold the weight in their ratio p / b. `masked` and `rejected` drop there
what they drop elsewhere and weigh nothing; `truncated` would weigh twice and is refused in the config.

Dropped tokens still count in what the step's loss is divided by: dropping many makes a step smaller, not louder.
They are reported as `dropped`. A log-prob that is not a number drops nothing: it reaches the loss, and the step is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ...configs.algorithm import SELF_CORRECTING, Algorithm, AutoCorrection, Masked, NoCorrection, Rejected, Truncated
from .tokens import Tokens

Correction = Callable[[Tokens], tuple[torch.Tensor, torch.Tensor]]
"""Weight of each token, float[K], and bool[K], whether it carries loss at all."""


def correction_of(config: Algorithm) -> Correction:
    """What `config.correction` asks for; `auto` is `truncated` for losses around the proximal policy, else `none`."""
    own = isinstance(config.loss, SELF_CORRECTING)
    chosen = config.correction
    if isinstance(chosen, AutoCorrection):
        chosen = NoCorrection() if own else Truncated()
    if isinstance(chosen, NoCorrection):
        return lambda tokens: (torch.ones_like(tokens.proximal), torch.ones_like(tokens.selected))

    def correct(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
        log_w = _log_weight(chosen, tokens)
        if isinstance(chosen, Truncated):
            return log_w.clamp(max=math.log(chosen.high)).exp(), torch.ones_like(tokens.selected)
        low, high = math.log(chosen.low), math.log(chosen.high)
        # Not `low <= w <= high`, which is false for NaN: that must not be dropped silently.
        outside = (log_w < low) | (log_w > high)
        if isinstance(chosen, Rejected):
            outside = tokens.sequence_sum(outside.to(log_w.dtype)) > 0
        # Clamped, because what is dropped may be infinite.
        weight = log_w.clamp(low, high).exp()
        return torch.ones_like(weight) if own else weight, ~outside

    return correct


def _log_weight(config: Truncated | Masked | Rejected, tokens: Tokens) -> torch.Tensor:
    ratio = tokens.proximal - tokens.behavior
    match config.level:
        case "token":
            return ratio
        case "sequence":
            return tokens.sequence_sum(ratio)
        case "geometric":
            return tokens.sequence_mean(ratio)
