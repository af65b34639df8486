"""What a kind of server is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from aiohttp.typedefs import Middleware

from ...weightsync.plan import TransferPlan
from .protocol import Limits
from .stepper import Stepper


class Weights(Protocol):
    """The door through which pushed tensors reach the model."""

    def check(self, plan: TransferPlan) -> None:
        """Raises WeightSyncError when the plan's tensors are not those of the model. Called in `Staging`'s thread."""
        ...

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Replace the model's parameters, in place. Called in the engine thread, between two steps."""
        ...


@dataclass(frozen=True)
class Served:
    """One kind's parts.

    Attributes:
        stepper: what computes tokens.
        weights: how pushed tensors reach its model.
        limits: what requests must fit.
        middlewares: aiohttp middlewares that see every request before the app does.
    """

    stepper: Stepper
    weights: Weights
    limits: Limits
    middlewares: tuple[Middleware, ...] = ()
