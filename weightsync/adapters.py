"""Pushes of adapters alone: the learner sends low-rank factors, a receiver adds their product to the weights it was loaded from.

    learner ── lora_A, scaled lora_B of each adapted layer ──> Staging ── W + B A ──> loads a whole model, as after any push

Invariants:
- W + B A is computed in float32 and rounded once, to the dtype in which the factors came: that in which the model is served.
- Every version starts from the files again: nothing adds up over pushes, and a receiver that joins late lacks nothing.
- A push is of adapters or of all weights, never of both.

Imported by vLLM's and SGLang's processes: nothing beyond what both have may be needed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from ..errors import WeightSyncError

WEIGHT, DOWN, UP = ".weight", ".lora_A.weight", ".lora_B.weight"
"""What the names of a layer's weight [out, in], of A [rank, in] and of B [out, rank] end with. B holds the adapter's scale."""


def are_adapters(names: Iterable[str]) -> bool:
    """Whether a push of `names` is one of adapters."""
    return any(name.endswith((DOWN, UP)) for name in names)


def check_adapters(given: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[int, ...]]) -> None:
    """Compare shapes of adapters with those of the model.

    Raises:
        WeightSyncError: a name is no adapter's or of no layer, lacks its other half, or a shape does not fit.
    """
    for name in given:
        stem = name.removesuffix(DOWN).removesuffix(UP)
        if stem == name or stem + WEIGHT not in known:
            raise WeightSyncError(f"{name!r} came among adapters, and the model has no such layer")
        down, up, weight = given.get(stem + DOWN), given.get(stem + UP), known[stem + WEIGHT]
        if down is None or up is None:
            raise WeightSyncError(f"{name!r} came without its other half")
        if len(down) != 2 or len(up) != 2 or (up[0], down[1]) != weight or up[1] != down[0]:
            raise WeightSyncError(f"adapters of {stem} are {up} by {down}, the model has {weight}")


def merge(
    adapters: Mapping[str, torch.Tensor], base: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All of `base`, in the dtype of the adapters, each adapted weight with its product added."""
    dtype = next(iter(adapters.values())).dtype
    for name, weight in base:
        stem = name.removesuffix(WEIGHT)
        if stem + DOWN in adapters:
            weight = add(weight, adapters[stem + DOWN], adapters[stem + UP])
        yield name, weight.to(dtype)


def add(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """W + B A, in float32."""
    return weight.float() + up.float() @ down.float()
