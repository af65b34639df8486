"""Deltas of weights: the values of one version that differ from another's, and nothing else.

A delta is a safetensors file. For each tensor `NAME` of the plan that changed it holds either

    NAME:indices   int32 or int64 [k], ascending positions in the flattened tensor
    NAME:values    int8/16/32/64 [k], the new bits of those elements

or `NAME:whole`, the new tensor itself, where that is not larger. Values are compared and sent as bits: a NaN keeps its payload,
-0.0 is not 0.0. The base is not written to: what did not change is shared between the versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from ..errors import WeightSyncError
from .plan import TransferPlan
from .snapshot import as_bytes, dtype_of

_BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}  # element size in bytes -> an integer of that size


def differences(
    names: Sequence[str], base: Sequence[torch.Tensor], new: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What to write so that a receiver of `base` gets `new`; both are in host memory, alike in dtypes and shapes."""
    parts: dict[str, torch.Tensor] = {}
    for name, old, now in zip(names, base, new, strict=True):
        if now.element_size() not in _BITS:
            parts[f"{name}:whole"] = now
            continue
        before, after = _bits(old), _bits(now)
        (changed,) = np.nonzero(before != after)
        if not changed.size:
            continue
        if after.size <= np.iinfo(np.int32).max:
            changed = changed.astype(np.int32)
        if changed.nbytes + changed.size * after.itemsize < after.nbytes:
            parts[f"{name}:indices"] = torch.from_numpy(changed)
            parts[f"{name}:values"] = torch.from_numpy(after[changed])
        else:
            parts[f"{name}:whole"] = now
    return parts


def apply(path: str | Path, plan: TransferPlan, base: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of each entry of `plan`, from the delta at `path` and the tensors it is relative to; in one thread, because
    an engine computes in the same process. Raises WeightSyncError: the base lacks a tensor that the delta changes."""
    with safe_open(path, framework="pt") as file:
        keys = set(file.keys())
        for name, dtype_name, shape in zip(plan.names, plan.dtypes, plan.shapes, strict=True):
            dtype = dtype_of(dtype_name)
            if f"{name}:whole" in keys:
                yield name, copy(file.get_tensor(f"{name}:whole"))
                continue
            old = base.get(name)
            if old is None or old.dtype != dtype or tuple(old.shape) != shape:
                raise WeightSyncError(
                    f"version {plan.version}: the base of the delta has no {name} like the one announced"
                )
            if f"{name}:indices" not in keys:
                yield name, old
                continue
            bits = _bits(old).copy()
            bits[file.get_tensor(f"{name}:indices").numpy()] = file.get_tensor(f"{name}:values").numpy()
            yield name, torch.from_numpy(bits).view(dtype).view(shape)


def copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, made by this thread only (torch would use all its threads)."""
    if not tensor.numel():
        return torch.empty_like(tensor)  # numpy gives it a stride that torch will not view
    return torch.from_numpy(as_bytes(tensor).numpy().copy()).view(tensor.dtype).view(tensor.shape)


def _bits(tensor: torch.Tensor) -> np.ndarray:
    """Flat integers of the elements' size, sharing memory."""
    return as_bytes(tensor).numpy().view(_BITS[tensor.element_size()])
