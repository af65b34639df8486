"""Router replay in Megatron's models, through the place that its routers have for one (`RouterReplay` of megatron-core). The
weights stay those that a router computes, here as where it chooses itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..router_replay import ReplayedChoices

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class _LayerReplay:
    """In the place of megatron-core's `RouterReplay`, of the router of layer number `layer` of the whole model."""

    def __init__(self, layer: int, choices: ReplayedChoices) -> None:
        self._layer, self._choices = layer, choices

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
        experts = self._choices.choose(self._layer, own)
        return (chosen, own) if experts is own else (scores.gather(1, experts), experts)


def replay_in(parts: Sequence[Any]) -> ReplayedChoices:
    """Have the routers of this rank's parts of a model take over the choices that are loaded into the result. All layers have a
    router."""
    choices = ReplayedChoices()
    for part in parts:
        for layer in part.decoder.layers:
            layer.mlp.router.router_replay = _LayerReplay(layer.layer_number - 1, choices)
    return choices
