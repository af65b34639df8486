"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) through peft: W + alpha / rank B A, with W frozen.

Every linear layer but the output has one; fused experts and routers have none. B starts at 0 and A is drawn from a fixed seed: the
policy starts as the base, the same on any number of ranks. Pushes and checkpoints have the adapters only; an export is the merged
model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from ...weightsync import weight_check as adapters

ALPHA = 32  # with alpha / rank as scale the best learning rate hardly depends on the rank

SEED = 0
ADAPTERS = ".lora_"  # in the names of adapters, and in no other
BASE, DOWN, UP = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"
"""What peft calls the weights of an adapted layer, and its factors A [rank, in] and B [out, rank]."""


def adapt(model: PreTrainedModel, rank: int) -> None:
    """Freeze `model` and give it adapters of `rank`, in place."""
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds, and only adapters need it

    config = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules="all-linear")
    # Of a transformers model peft would adapt fused experts and routers, too, by the names that they had as linear layers.
    layers = torch.nn.ModuleDict({model.base_model_prefix: model.base_model})
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        inject_adapter_in_model(config, layers)


def merged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of adapted layers under the names of the base, each with its adapter added in float32; others as they are."""
    merged_weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(BASE)
        if stem != name:
            merged_weights[stem + adapters.WEIGHT] = adapters.add(tensor, *_factors(tensors, stem))
        elif ".lora_A." not in name and ".lora_B." not in name:
            merged_weights[name.replace(".base_layer.", ".")] = tensor  # biases
    return merged_weights


def only_adapters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapters among `tensors`, as `weightsync/weight_check.py` has them travel."""
    merged_weights: dict[str, torch.Tensor] = {}
    for stem in (name.removesuffix(DOWN) for name in tensors if name.endswith(DOWN)):
        merged_weights[stem + adapters.DOWN], merged_weights[stem + adapters.UP] = _factors(tensors, stem)
    return merged_weights


def _factors(tensors: dict[str, torch.Tensor], stem: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A, and B with its scale, of the layer `stem`."""
    down, up = tensors[stem + DOWN], tensors[stem + UP]
    return down, (ALPHA / len(down) * up.float()).to(up.dtype)


def rank_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return next((shape[0] for name, shape in shapes.items() if name.endswith(DOWN)), 0)
