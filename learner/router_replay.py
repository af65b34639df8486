"""The choices that a learner's routers take over from the engine's (router replay, Ma et al. 2025, arXiv:2510.11370).

Each router computes its own weights, and with them the gradient that reaches it; which experts a token goes to is the engine's.

Invariants:
- A token without a record keeps its router's own choice.
- What is counted are the choices of forward passes with a gradient, those that are computed again included.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class ReplayedChoices:
    """The recorded experts of the M tokens of the forward pass that comes next, and how many choices differed so far."""

    def __init__(self) -> None:
        self._experts: torch.Tensor | None = None
        self._known: torch.Tensor | None = None
        self._counts = torch.zeros(2, dtype=torch.float64)

    def load(self, experts: torch.Tensor | None, device: torch.device) -> None:
        """`experts` are [M, layers, top_k] of any integer type, zeros where there is no record; None: no token has one."""
        self._experts = self._known = None
        if experts is not None:
            self._experts = experts.to(device, torch.int64)
            self._known = self._experts[:, 0, 0] != self._experts[:, 0, 1]

    def choose(self, layer: int, own: torch.Tensor) -> torch.Tensor:
        """int64[M, top_k]: the experts of the tokens in the `layer`th router, whose `own` choice is int64[M, top_k]."""
        if self._experts is None or self._known is None:
            return own
        recorded = self._experts[:, layer]
        if torch.is_grad_enabled():
            same = (recorded[:, :, None] == own[:, None, :]).any(-1)[self._known]
            differing = torch.stack([(~same).sum(), torch.tensor(same.numel(), device=same.device)])
            self._counts = self._counts.to(same.device) + differing
        return torch.where(self._known[:, None], recorded, own)

    def disagreement(self, device: torch.device) -> float | None:
        """Collective over all ranks. The share of choices since the last call that were not the router's own; None where there were
        no recorded ones."""
        counts, self._counts = self._counts.to(device), torch.zeros(2, dtype=torch.float64)
        dist.all_reduce(counts)
        differing, compared = counts.tolist()
        return differing / compared if compared else None
