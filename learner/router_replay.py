"""The choices that a learner's routers take over from the engine's (router replay, Ma et al. 2025, arXiv:2510.11370).

Each router computes its own weights, and with them the gradient that reaches it; which experts a token goes to is the engine's.

Invariants:
- A token without a record keeps its router's own choice.
- What is counted are the choices of forward passes with a gradient, those that are computed again included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from .distributed import device_of_sums


class Loaded(NamedTuple):
    """The recorded experts of M tokens, int64[M, layers, top_k], and which of the tokens have any, bool[M]."""

    experts: torch.Tensor
    known: torch.Tensor


class ReplayedChoices:
    """What was recorded of the forward pass that comes next, and how many choices differed so far."""

    def __init__(self) -> None:
        self.loaded: Loaded | None = None  # None where no token has a record
        self._counts = torch.zeros(2, dtype=torch.float64)

    def load(self, experts: torch.Tensor | None, device: torch.device) -> None:
        """`experts` are [M, layers, top_k] of any integer type, zeros where there is no record; None: no token has one."""
        self.loaded = None
        if experts is not None:
            experts = experts.to(device, torch.int64)
            self.loaded = Loaded(experts, experts[:, 0, 0] != experts[:, 0, 1])

    def choose(self, layer: int, own: torch.Tensor, loaded: Loaded | None) -> torch.Tensor:
        """int64[M, top_k]: the experts of the tokens of a pass in the `layer`th router, whose `own` choice is int64[M, top_k]."""
        if loaded is None:
            return own
        recorded, known = loaded.experts[:, layer], loaded.known
        if torch.is_grad_enabled():
            same = (recorded[:, :, None] == own[:, None, :]).any(-1)[known]
            differing = torch.stack([(~same).sum(), torch.tensor(same.numel(), device=same.device)])
            self._counts = self._counts.to(same.device) + differing
        return torch.where(known[:, None], recorded, own)

    def disagreement(self, device: torch.device) -> float | None:
        """Collective over all ranks. The share of choices since the last call that were not the router's own; None where there were
        no recorded ones."""
        counts, self._counts = self._counts.to(device_of_sums(device)), torch.zeros(2, dtype=torch.float64)
        dist.all_reduce(counts)
        differing, compared = counts.tolist()
        return differing / compared if compared else None
