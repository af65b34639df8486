"""Router replay in Megatron's models, through `RouterReplay` of megatron-core, which its routers accept. The weights stay those
that a router computes, here as where it chooses itself.

Invariants:
- Where activations are recomputed, a layer runs without a gradient first, and once more in the backward pass, when later passes
  have begun. Both take the same choices: backward passes come in the order of forward passes, in every schedule of a pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..router_replay import Loaded, ReplayedChoices

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _LayerReplay:
    """In the place of megatron-core's `RouterReplay`, of the `layer`th router of the whole model."""

    def __init__(self, layer: int, choices: ReplayedChoices) -> None:
        self._layer, self._choices = layer, choices
        self.recomputed: deque[Loaded | None] | None = None  # of passes to come back to; None while none does

    def _loaded(self) -> Loaded | None:
        if self.recomputed is None:
            return self._choices.loaded
        if torch.is_grad_enabled():
            return self.recomputed.popleft()
        self.recomputed.append(self._choices.loaded)
        return self._choices.loaded

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert default_compute_topk is not None
        chosen, own = default_compute_topk(scores, topk, num_groups, group_topk)
        experts = self._choices.choose(self._layer, own, self._loaded())
        return (chosen, own) if experts is own else (scores.gather(1, experts), experts)


class MegatronReplay(ReplayedChoices):
    """Has the routers of this rank's `parts` of a model take over the choices that are loaded here. Layers without a router
    come first."""

    def __init__(self, parts: Sequence[Any]) -> None:
        super().__init__()
        self._layers: list[_LayerReplay] = []
        kinds = parts[0].config.moe_layer_freq
        dense = kinds.count(0) if isinstance(kinds, list) else 0
        for layer in (layer for part in parts for layer in part.decoder.layers if layer.layer_number > dense):
            self._layers.append(_LayerReplay(layer.layer_number - 1 - dense, self))
            layer.mlp.router.router_replay = self._layers[-1]

    def begin(self, *, recomputes: bool) -> None:
        """Passes begin; with `recomputes` each layer of them runs twice."""
        for layer in self._layers:
            layer.recomputed = deque() if recomputes else None
