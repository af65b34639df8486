"""The critic: the policy's model with a head that predicts, before each token, the return from there on. It begins with a head of
zeros. FSDP2 shards it over all of its ranks, whatever backend the policy has; each rank takes rows of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ...errors import LearnerError
from ..backend import LossOutput
from ..fsdp2.attention import PACKED
from ..fsdp2.backend import Fsdp2Backend
from ..model import make_critic
from ..packing import MicroBatch


class Critic(Fsdp2Backend):
    """A backend whose `logprobs` are the values before each trained token; `step` has a loss on those, and entropies are 0."""

    def _make_model(self, path: str) -> PreTrainedModel:
        model: Any = make_critic(path, PACKED)
        # A linear layer with a bias returns a view. FSDP2 warns of a model that returns one: an in-place write would lose its hook.
        model.score.register_forward_hook(lambda _, __, values: values.clone())
        return model

    def _not_stored(self) -> list[str]:
        return [name for name, _ in self._model.named_parameters() if name.startswith("score.")]

    def _outputs_at(
        self, inputs: dict[str, Any], positions: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = self._model(**inputs).logits[0, positions, 0].float()
        return values, torch.zeros_like(values)


def value_loss(values: torch.Tensor, _: torch.Tensor, row: MicroBatch, clip: float = 0.0) -> LossOutput:
    """Half the squared error against the returns, summed over trained tokens (Schulman et al. 2017, arXiv:1707.06347, equation
    9). With a `clip` above 0, and V' the value before the batch, the squared error of a token is

        max((V - R)^2, (V' + clip(V - V', -clip, clip) - R)^2)

    as in the authors' code (OpenAI Baselines, ppo2), which the paper does not mention."""
    trained = values[row.loss_mask]
    returns = torch.zeros_like(trained) if row.returns is None else row.returns[row.loss_mask]
    if row.returns is None and len(trained):
        raise LearnerError("the critic has nothing to learn from: these rows lack returns")
    error = (trained - returns).square()
    sums = {"error_square": error.detach().sum(), "return": returns.sum(), "return_square": returns.square().sum()}
    if clip and row.values is not None:
        before = row.values[row.loss_mask]
        error = torch.maximum(error, (before + (trained - before).clamp(-clip, clip) - returns).square())
    return LossOutput(loss_sum=error.sum() / 2, sums=sums)


def explained_variance(means: dict[str, float]) -> float:
    """1 - mean square error / variance of the returns, from the reported means: 1 is perfect, 0 as good as their mean."""
    variance = means["return_square"] - means["return"] ** 2
    return 1.0 - means["error_square"] / variance if variance > 0 else 0.0
