"""The critic: the policy's model with a head that says, before each token, what will be earned from there on.

Invariants:
- It begins with a head of zeros: it expects nothing, and says the same on every rank.
- It is held by FSDP2 over all of its ranks, whatever holds the policy, and each of them takes rows of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import LearnerError
from .backend import LossOutput, PackedRow
from .fsdp2.attention import PACKED
from .fsdp2.backend import Fsdp2Backend
from .model import load_critic


class Critic(Fsdp2Backend):
    """A backend that says values where others say log-probs: `logprobs` what is expected before each trained token, and `step`
    takes a loss on that; entropies are 0."""

    def _load_model(self, path: str) -> PreTrainedModel:
        model: Any = load_critic(path, PACKED)
        model.score.register_forward_hook(_of_its_own)
        return model

    def _say(
        self, inputs: dict[str, Any], places: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._model(**inputs).logits[0, places, 0].float()
        return values, torch.zeros_like(values)


def _of_its_own(_: torch.nn.Module, __: Any, values: torch.Tensor) -> torch.Tensor:
    """A linear layer with a bias gives a view of what it computed, and FSDP2 warns of a model that gives one away: its hook there
    would be lost to whoever writes to it in place."""
    return values.clone()


def value_loss(values: torch.Tensor, _: torch.Tensor, row: PackedRow) -> LossOutput:
    """Half the squared error against the returns, summed over trained tokens (Schulman et al. 2017, arXiv:1707.06347, equation 9).

    Reported sums: `error_square`, `return` and `return_square`; see `explained_variance`.
    """
    trained = values[row.trained]
    returns = torch.zeros_like(trained) if row.returns is None else row.returns[row.trained]
    if row.returns is None and len(trained):
        raise LearnerError("the critic has nothing to learn from: these rows lack returns")
    error = (trained - returns).square()
    sums = {"error_square": error.detach().sum(), "return": returns.sum(), "return_square": returns.square().sum()}
    return LossOutput(loss_sum=error.sum() / 2, sums=sums)


def explained_variance(means: dict[str, float]) -> float:
    """1 - mean square error / variance of the returns, from the reported means: 1 is perfect, 0 as good as saying their mean."""
    variance = means["return_square"] - means["return"] ** 2
    return 1.0 - means["error_square"] / variance if variance > 0 else 0.0
