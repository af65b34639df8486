"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) through peft: W + alpha / rank B A, with W frozen.

Every linear layer but the output has one; routers and fused experts have none. B starts at 0 and A is drawn from a fixed seed: the
policy starts as the base, the same on any number of ranks and in every backend. Pushes and checkpoints have the adapters only; an
export is the merged model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import msgspec
import torch
from transformers import PreTrainedModel

from ..weightsync import weight_check as adapters
from .backend import Scorer, ShardedModel
from .packing import MicroBatch

ALPHA = 32  # with alpha / rank as scale the best learning rate hardly depends on the rank

SEED = 0
ADAPTERS = ".lora_"  # in the names of adapters, and in no other
BASE, DOWN, UP = ".base_layer.weight", ".lora_A.default.weight", ".lora_B.default.weight"
"""What peft calls the weights of an adapted layer, and its factors A [rank, in] and B [out, rank]."""


def adapt(model: PreTrainedModel, rank: int) -> None:
    """Freeze `model` and give it adapters of `rank`, in place."""
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds, and only adapters need it

    output = model.get_output_embeddings()
    routing = {name for name, module in model.named_modules() if "Router" in type(module).__name__}
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and module is not output
        and not routing & {name, name.rpartition(".")[0]}
    ]
    config = LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=linear)
    # Of a mixture whose family it knows peft would adapt routers and fused experts in the place of some of these.
    unknown = torch.nn.ModuleDict({"model": model})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        inject_adapter_in_model(config, unknown)


def merged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights of adapted layers under the names of the base, each with its adapter added in float32; others as they are.
    Each keeps its dtype."""
    merged_weights: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(BASE)
        if stem != name:
            up = as_pushed(stem + UP, tensors[stem + UP])[1]
            merged_weights[stem + adapters.WEIGHT] = adapters.add(tensor, tensors[stem + DOWN], up).to(tensor.dtype)
        elif ".lora_A." not in name and ".lora_B." not in name:
            merged_weights[name.replace(".base_layer.", ".")] = tensor  # biases
    return merged_weights


def by_layer(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> Iterable[dict[str, torch.nn.Parameter]]:
    """The parameters of each adapted layer together, as `merged` wants them, and every other one alone."""
    layers: dict[str, dict[str, torch.nn.Parameter]] = {}
    for name, parameter in parameters:
        layers.setdefault(re.split(r"\.base_layer\.|\.lora_", name)[0], {})[name] = parameter
    return layers.values()


def only_adapters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The adapters among `tensors`, as `weightsync/weight_check.py` has them travel."""
    return dict(as_pushed(name, tensor) for name, tensor in tensors.items() if name.endswith((DOWN, UP)))


def as_pushed(name: str, factor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Name and content in which a factor travels: B has its scale."""
    if name.endswith(DOWN):
        return name.removesuffix(DOWN) + adapters.DOWN, factor
    rank = factor.shape[1]
    return name.removesuffix(UP) + adapters.UP, (ALPHA / rank * factor.float()).to(factor.dtype)


def rank_of(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return next((shape[0] for name, shape in shapes.items() if name.endswith(DOWN)), 0)


def other_rank(saved: int, trained: int) -> str | None:
    """A message about why a checkpoint of adapters of rank `saved` does not fit those of rank `trained`, where 0 is all weights;
    None where it does."""
    if saved == trained:
        return None
    held, here = (f"adapters of rank {rank}" if rank else "all weights" for rank in (saved, trained))
    return f"it holds {held}, and {here} are trained here; set learner.backend.lora_rank={saved} to resume it"


class WithoutAdapters(Scorer):
    """The model of `policy` without its adapters, which `switched_off` takes out within a block. It has no tensors of its own."""

    def __init__(self, policy: ShardedModel, switched_off: Callable[[], AbstractContextManager[object]]) -> None:
        self._policy = policy
        self._switched_off = switched_off

    def logprobs(self, rows: Sequence[MicroBatch], temperature: float | None = None) -> list[torch.Tensor]:
        with self._switched_off():
            return self._policy.logprobs(_unrouted(rows), temperature)

    def top_logprobs(self, rows: Sequence[MicroBatch], count: int) -> list[torch.Tensor]:
        with self._switched_off():
            return self._policy.top_logprobs(_unrouted(rows), count)

    def close(self) -> None:
        """See `Scorer.close`. The policy stays."""


def _unrouted(rows: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Another policy than the one that recorded the experts routes by itself."""
    return [msgspec.structs.replace(row, experts=None) for row in rows]
