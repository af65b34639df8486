"""Mixtures of experts whose routing a test knows: what plain transformers chooses, and what it computes when it is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from slipstream.common.routed_experts import routers_of

Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

ROUNDING = 1e-4
"""By which two computations of the same logit of a router may differ."""


def chosen(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    """int64[T, layers, top_k]: the experts that `model` chooses, each token's in rising order."""
    found: list[torch.Tensor] = []
    hooks = [r.register_forward_hook(lambda _, __, routed: found.append(routed[2])) for r in routers_of(model).values()]
    with torch.no_grad():
        model(torch.tensor([list(token_ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, 1).sort(-1).values


@contextlib.contextmanager
def told(model: torch.nn.Module, experts: torch.Tensor) -> Iterator[None]:
    """`model`, of Qwen3-MoE, sends the T tokens that it reads to `experts` [T, layers, top_k], with the weights that its routers
    give these; tokens with zeros go where they would."""

    def hook(layer: int) -> Any:
        def replace(router: Any, _: object, routed: Routed) -> Routed:
            ids = experts[:, layer].long()
            ids = ids.where(ids[:, :1] != ids[:, 1:2], routed[2])
            weights = routed[0].float().exp().gather(1, ids)  # a softmax, without its sum
            total = weights.sum(1) if router.norm_topk_prob else routed[0].float().exp().sum(1)
            return routed[0], (weights / total[:, None]).to(routed[1].dtype), ids

        return replace

    hooks = [router.register_forward_hook(hook(layer)) for layer, router in enumerate(routers_of(model).values())]
    yield
    for one in hooks:
        one.remove()


def likeliest(model: torch.nn.Module, token_ids: Sequence[int], experts: torch.Tensor) -> bool:
    """Whether the T tokens, all but the last, go to the experts [T, layers, top_k] that `model`, a Qwen3-MoE, gives most. Of two
    that are equal within `ROUNDING` either may be chosen; what comes after it is judged by what was."""
    found: list[torch.Tensor] = []
    hooks = [r.register_forward_hook(lambda _, __, routed: found.append(routed[0])) for r in routers_of(model).values()]
    with torch.no_grad(), told(model, experts):
        model(torch.tensor([list(token_ids)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    logits, ids = torch.stack(found, 1)[:-1], experts[:-1].long()
    least, other = logits.gather(-1, ids).amin(-1), logits.scatter(-1, ids, -torch.inf).amax(-1)
    return bool((least >= other - ROUNDING).all())


def other_experts(tokens: int, layers: int, top_k: int, experts: int, seed: int = 0) -> torch.Tensor:
    """uint8[tokens, layers, top_k]: experts by lot, each token's different."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, layers, experts, generator=generator).argsort(-1)[..., :top_k].to(torch.uint8)
