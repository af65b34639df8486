"""Whether announced weights fit the model of an engine: compared with the files that it was first loaded from.

Imported by vLLM's and SGLang's processes: nothing beyond what both have may be needed here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Set
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open

from ..errors import WeightSyncError
from .adapters import are_adapters, check_adapters
from .plan import TransferPlan

logger = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]
"""Hugging Face name -> shape."""

TIED = frozenset({"lm_head.weight"})
"""What a push may lack where embeddings are tied."""


def check_fit(plan: TransferPlan, known: Shapes | None, *, optional: Set[str]) -> None:
    """Compare what is announced with what the model was first loaded from; None leaves it unchecked.

    Raises:
        WeightSyncError: a name is unknown, missing (those in `optional`, tied to others, may be) or has another shape.
    """
    given = dict(zip(plan.names, plan.shapes, strict=True))
    if known is not None and are_adapters(given):
        return check_adapters(given, known)
    if known is None:
        return
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
    """Names and shapes in the safetensors of a folder or hub name; None where there are none on this machine."""
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
    """Where the model's files lie; for a hub name its place in the local cache, downloaded by the engine before."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return folder
