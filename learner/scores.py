"""What other models than the policy say of a batch's tokens."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

Scored = Mapping[str, NDArray[np.float32]]
"""Trajectory id -> float32[T], one number for each of its tokens, 0 where the policy did not sample it. Every branch of every
member of the batch is there, late ones and those without a trained token too: all of them count in credit."""


class Scores(msgspec.Struct, frozen=True):
    """The same on every rank.

    Attributes:
        reference: log-probs of the reference policy; None where there is none.
        penalties: what is taken off the reward of each token; None for nothing.
        told: what the model that an estimator by token goes with says, see `Chain.told`; None where there is no such model.
    """

    reference: Scored | None = None
    penalties: Scored | None = None
    told: Scored | None = None


NO_SCORES = Scores()
"""The policy is alone."""
