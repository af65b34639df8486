"""What the step optimises: advantage estimators and policy losses, found by the type of their config section.

A new one is a config struct, a file here, and one line in the table below.
"""

from __future__ import annotations

from ...configs.schema import Algorithm, DecoupledPpo, Grpo
from ..backend import PolicyLoss
from . import decoupled_ppo, grpo
from .decoupled_ppo import effective_sample_size
from .grpo import Advantage

ADVANTAGES = {Grpo: grpo.advantage}
LOSSES = {DecoupledPpo: decoupled_ppo.loss}

__all__ = ["Advantage", "advantage_of", "effective_sample_size", "loss_of"]


def advantage_of(config: Algorithm) -> Advantage:
    """Rewards of a group's episodes, float64[G], to their advantages, float64[G]."""
    return ADVANTAGES[type(config.advantage)](config.advantage)


def loss_of(config: Algorithm) -> PolicyLoss:
    """The policy loss on packed rows."""
    return LOSSES[type(config.loss)](config.loss)
