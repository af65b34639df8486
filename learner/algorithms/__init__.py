"""What the step optimizes: advantage estimators and policy losses, found by the type of their config section.

A new one is a config struct, a pure function in a file here, and one line in the table below. `policy_loss.py` composes the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...configs import algorithm as config
from ...configs.algorithm import Algorithm
from ...configs.section import Section
from ..backend import BatchLoss
from ..batch import TrainBatch
from . import covariance, estimators, own, preferences, surrogates, token_estimators
from .correction import correction_of
from .estimators import Advantage
from .policy_loss import BatchPairs, BatchSelection, Surrogate, Tokens, batch_loss
from .traces import sparing_traces, with_traces

ADVANTAGES: dict[type[Section], Callable[[Any, TrainBatch], NDArray[np.float64]]] = {
    config.Grpo: estimators.grpo,
    config.Rloo: estimators.rloo,
    config.ReinforcePP: estimators.reinforce_pp,
    config.ReinforcePPBaseline: estimators.reinforce_pp_baseline,
    config.Opo: estimators.opo,
    config.Remax: estimators.remax,
    config.WinRate: estimators.win_rate,
    config.TurnLevel: token_estimators.turn_level,
    config.Gae: token_estimators.gae,
    config.Prime: token_estimators.prime,
    config.NoAdvantage: estimators.no_advantage,
    config.PythonFunction: own.advantage,
}
LOSSES: dict[type[Section], Callable[[Any, Tokens], Surrogate]] = {
    config.DecoupledPpo: surrogates.decoupled_ppo,
    config.Ppo: surrogates.ppo,
    config.DualClipPpo: surrogates.dual_clip_ppo,
    config.DualClipDecoupledPpo: surrogates.dual_clip_decoupled_ppo,
    config.Gspo: surrogates.gspo,
    config.Cispo: surrogates.cispo,
    config.Sapo: surrogates.sapo,
    config.Sppo: surrogates.sppo,
    config.ClipCov: covariance.clip_cov,
    config.KlCov: covariance.kl_cov,
    config.Dpo: preferences.dpo,
    config.PythonFunction: own.loss,
}
SELECTIONS: dict[type[Section], Callable[..., Any]] = {
    config.ClipCov: covariance.clip_cov_selection,
    config.KlCov: covariance.kl_cov_selection,
}
PAIRS: dict[type[Section], BatchPairs] = {config.Dpo: preferences.pairs_of_step}


def advantage_of(algorithm: Algorithm) -> Advantage:
    """The estimator of advantages: a batch to one number for each of its tokens."""
    return partial(ADVANTAGES[type(algorithm.advantage)], algorithm.advantage)


def returns_of(algorithm: Algorithm) -> Advantage | None:
    """The estimator of the critic's targets; None where there is no critic."""
    return (
        partial(token_estimators.critic_targets, algorithm.advantage)
        if isinstance(algorithm.advantage, config.Gae)
        else None
    )


def scores_first(algorithm: Algorithm) -> bool:
    """Whether the loss needs the proximal log-probs of a whole step before its first gradient: it selects tokens, or compares
    episodes."""
    return type(algorithm.loss) in SELECTIONS or type(algorithm.loss) in PAIRS


def loss_of(algorithm: Algorithm, longest: int) -> BatchLoss:
    """The policy loss, see `batch_loss`. `longest` is `agent.max_tokens`."""
    loss = algorithm.loss
    kind = type(loss)
    select: BatchSelection | None = partial(SELECTIONS[kind], loss) if kind in SELECTIONS else None
    surrogate, correct = with_traces(partial(LOSSES[kind], loss)), sparing_traces(correction_of(algorithm))
    return batch_loss(algorithm, surrogate, correct, select, PAIRS.get(kind), longest)
