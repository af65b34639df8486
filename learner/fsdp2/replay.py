"""Router replay in transformers' models: a router's choice is replaced after its forward pass, and its weights are computed anew
for the experts that take part.

Invariants:
- For a router's own choice the weights are those that it gave itself, bit by bit.
- The weights depend on the router's logits as they do without replay: by a softmax, or in families that balance by a bias
  (`e_score_correction_bias`) by a sigmoid.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ...common.routed_experts import routers_of
from ..router_replay import ReplayedChoices

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits [M, experts], weights and experts [M, top_k]


def replay_in(model: PreTrainedModel) -> ReplayedChoices:
    """Have the routers of `model` take over the choices that are loaded into the result."""
    choices = ReplayedChoices()
    for layer, router in enumerate(routers_of(model).values()):
        router.register_forward_hook(_hook(layer, choices))
    return choices


def _hook(layer: int, choices: ReplayedChoices) -> Any:
    def replace(router: Any, _: object, routed: Routed) -> Routed:
        logits, weights, own = routed
        experts = choices.choose(layer, own, choices.loaded)
        if experts is own:
            return routed
        return logits, weights_of(router, logits, experts).to(weights.dtype), experts

    return replace


def weights_of(router: Any, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """float32[M, top_k]: the weights that `router` gives `experts`, by the formula of its family."""
    if hasattr(router, "e_score_correction_bias"):
        weights = logits.sigmoid().gather(1, experts)
        if router.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * router.routed_scaling_factor
    weights = logits.softmax(-1, dtype=torch.float32).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights
