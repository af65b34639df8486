"""The checkpoint that an engine's model was first loaded from: pushed names and shapes are checked against it, pushed adapters are
added to it.

    learner ── lora_A, scaled lora_B of each adapted layer ──> WeightStaging ── W + B A ──> loads a whole model, as after any push

Invariants:
- W + B A is computed in float32 and rounded once, to the dtype in which the factors came: that in which the model is served.
- Buffers, which no step changes, stay as they are, as in a push of all weights.
- Every version starts from the files again: errors do not accumulate over pushes, and a late receiver lacks nothing.
- A push holds adapters or all weights, never both.

Imported by vLLM's and SGLang's processes: only packages that both have may be imported here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open

from ..errors import WeightSyncError
from .fp8 import check_scales
from .plan import TransferPlan

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]  # Hugging Face name -> shape
TIED = frozenset({"lm_head.weight"})  # names that a push may lack where embeddings are tied

WEIGHT, DOWN, UP = ".weight", ".lora_A.weight", ".lora_B.weight"
"""What the names of a layer's weight [out, in], of A [rank, in] and of B [out, rank] end with. B holds the adapter's scale."""

BUFFERS = ("e_score_correction_bias", "layer_scalar")
"""What the names of buffers end with that checkpoints have: the biases by which routers balance experts, and Gemma 4's scales."""


def check_weights(plan: TransferPlan, known: Shapes | None, *, optional: Set[str]) -> None:
    """Compare a plan with the checkpoint that the model was first loaded from; None skips that. Raises WeightSyncError: a name is
    unknown, is missing and not in `optional`, or has another shape; a weight in fp8 and its scales are not both there."""
    dtypes = dict(zip(plan.names, plan.dtypes, strict=True))
    given = check_scales(dict(zip(plan.names, plan.shapes, strict=True)), dtypes)
    if known is None:
        return
    if are_adapters(given):
        return check_adapters(given, known)
    if unknown := sorted(given.keys() - known.keys()):
        raise WeightSyncError(
            f"version {plan.version}: the model has no tensor {unknown[0]!r} ({len(unknown)} unknown names)"
        )
    if missing := known.keys() - given.keys() - optional:
        raise WeightSyncError(f"version {plan.version} lacks {min(missing)!r} ({len(missing)} missing names)")
    for name, shape in given.items():
        if shape != known[name]:
            raise WeightSyncError(f"version {plan.version}: {name} is {shape}, the model has {known[name]}")


def checkpoint_shapes(model: str, revision: str | None = None) -> Shapes | None:
    """Names and shapes in the safetensors of a folder or hub name; None where this machine has none."""
    shapes: Shapes = {}
    for file in sorted(_folder(model, revision).glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    if not shapes:
        logger.warning("no safetensors of %s here: names and shapes of pushed weights are not checked", model)
    return shapes or None


def base_weights(model: str, revision: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a folder or hub name, as views of its mapped safetensors. Raises WeightSyncError: there are none here."""
    files = sorted(_folder(model, revision).glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"no safetensors of {model} here to add adapters to; push all weights, or give it some")
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def _folder(model: str, revision: str | None) -> Path:
    """The folder of the model's files; for a hub name the local cache, which the engine has filled."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return folder


def are_adapters(names: Iterable[str]) -> bool:
    return any(name.endswith((DOWN, UP)) for name in names)


def check_adapters(given: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[int, ...]]) -> None:
    """Compare shapes of adapters with those of the model. Raises WeightSyncError: a name is not an adapter of a known layer, lacks
    its other factor, or a shape does not match."""
    for name in given:
        stem = name.removesuffix(DOWN).removesuffix(UP)
        if stem == name or stem + WEIGHT not in known:
            raise WeightSyncError(f"{name!r} is among adapters, but the model has no such layer")
        down, up, weight = given.get(stem + DOWN), given.get(stem + UP), known[stem + WEIGHT]
        if down is None or up is None:
            raise WeightSyncError(f"{name!r} lacks its other factor")
        if len(down) != 2 or len(up) != 2 or (up[0], down[1]) != weight or up[1] != down[0]:
            raise WeightSyncError(f"adapters of {stem} are {up} by {down}, the model has {weight}")


def merge(
    adapters: Mapping[str, torch.Tensor], base: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """All of `base`, each adapted weight with its product added; in the dtype of the adapters, but for `BUFFERS`."""
    dtype = next(iter(adapters.values())).dtype
    for name, weight in base:
        stem = name.removesuffix(WEIGHT)
        if stem + DOWN in adapters:
            weight = add(weight, adapters[stem + DOWN], adapters[stem + UP])
        yield name, weight if name.endswith(BUFFERS) else weight.to(dtype)


def add(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """W + B A, in float32."""
    return weight.float() + up.float() @ down.float()
