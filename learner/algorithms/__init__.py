"""What the step optimises: advantage estimators and policy losses, found by the type of their config section.

A new one is a config struct, a file here, and one line in the table below. A loss is made of several parts: see `policy_loss.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...configs.algorithm import (
    Algorithm,
    Cispo,
    ClipCov,
    DecoupledPpo,
    DualClipPpo,
    Gae,
    Grpo,
    Gspo,
    KlCov,
    Opo,
    Ppo,
    Prime,
    ReinforcePP,
    ReinforcePPBaseline,
    Remax,
    Rloo,
    Sapo,
    Sppo,
    TurnLevel,
    WinRate,
)
from ...configs.section import Section
from ..backend import BatchLoss, Gather, PackedRow, PolicyLoss
from . import (
    cispo,
    clip_cov,
    decoupled_ppo,
    gae,
    grpo,
    gspo,
    kl_cov,
    opo,
    ppo,
    prime,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    sapo,
    sppo,
    turn_level,
    win_rate,
)
from .aggregation import scale_of
from .correction import correction_of
from .episodes import Advantage, TokenAdvantage
from .imitation import imitation_of
from .policy_loss import BY_STALENESS, compose, effective_sample_size, stalest_of
from .tokens import Selection, SurrogateLoss

ADVANTAGES: dict[type[Section], Callable[[Any], Advantage | TokenAdvantage]] = {
    Grpo: grpo.advantage,
    Rloo: rloo.advantage,
    ReinforcePP: reinforce_pp.advantage,
    ReinforcePPBaseline: reinforce_pp_baseline.advantage,
    Opo: opo.advantage,
    Remax: remax.advantage,
    WinRate: win_rate.advantage,
    TurnLevel: turn_level.advantage,
    Gae: gae.advantage,
    Prime: prime.advantage,
}
LOSSES: dict[type[Section], Callable[[Any], SurrogateLoss]] = {
    DecoupledPpo: decoupled_ppo.surrogate,
    Ppo: ppo.surrogate,
    DualClipPpo: ppo.surrogate,
    Gspo: gspo.surrogate,
    Cispo: cispo.surrogate,
    Sapo: sapo.surrogate,
    Sppo: sppo.surrogate,
    ClipCov: clip_cov.surrogate,
    KlCov: kl_cov.surrogate,
}
SELECTIONS: dict[type[Section], Callable[[Any, Sequence[PackedRow], Gather], Selection]] = {
    ClipCov: clip_cov.selection,
    KlCov: kl_cov.selection,
}

__all__ = [
    "BY_STALENESS",
    "Advantage",
    "TokenAdvantage",
    "advantage_of",
    "chooses_tokens",
    "effective_sample_size",
    "loss_of",
]


def advantage_of(config: Algorithm) -> Advantage | TokenAdvantage:
    """The estimator of advantages: episodes of a batch to one number for each of their turns, or of their tokens."""
    return ADVANTAGES[type(config.advantage)](config.advantage)


def chooses_tokens(config: Algorithm) -> bool:
    """Whether the loss looks at the proximal log-probs of a whole step before its first gradient, and chooses tokens."""
    return type(config.loss) in SELECTIONS


def loss_of(config: Algorithm, longest: int) -> BatchLoss:
    """The policy loss: from the rows of one step to the loss on each of them.

    Args:
        longest: tokens of the longest possible episode, `agent.max_tokens`; what `fixed_length` divides by.
    """
    surrogate, correct = LOSSES[type(config.loss)](config.loss), correction_of(config)
    select = SELECTIONS.get(type(config.loss))

    def loss(rows: Sequence[PackedRow], gather: Gather) -> PolicyLoss:
        selection = None if select is None else select(config.loss, rows, gather)
        scale = scale_of(config.aggregation, longest, rows, gather)
        imitation = imitation_of(config.imitation, rows, gather)
        return compose(
            surrogate, selection, correct, config.entropy, config.kl, imitation, scale, stalest_of(rows, gather)
        )

    return loss
