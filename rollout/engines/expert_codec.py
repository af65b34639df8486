"""Choices of experts as vLLM's protocol has them: the base64 of a `.npy` file, [n, layers of the model, top_k], where layers
without a router have anything.

Invariants:
- What a replica sends is checked before it is used: its size against its header, its numbers against the model. No pickle.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...common.routed_experts import RoutedExperts, RouterShape
from .base import FalseReply


def encode(ids: NDArray[Any]) -> str:
    with io.BytesIO() as file:
        np.save(file, np.ascontiguousarray(ids), allow_pickle=False)
        return base64.b64encode(file.getbuffer()).decode()


def joined(texts: Sequence[str]) -> str | None:
    """Of several that this process encoded, one after the other; None for none."""
    if len(texts) < 2:
        return texts[0] if texts else None
    return encode(np.concatenate([np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False) for text in texts]))


def decode(name: str, text: str, routers: RouterShape) -> NDArray[Any]:
    """[n, layers, top_k]: what replica `name` sent of the layers that have a router. Raises FalseReply."""
    try:
        data = base64.b64decode(text, validate=True)
        file = io.BytesIO(data)
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError("another version of the format")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        body = memoryview(data)[file.tell() :]
        wanted = (shape[0] if shape else 0, routers.depth, routers.top_k)
        if fortran or dtype != routers.dtype or shape != wanted or len(body) != dtype.itemsize * int(np.prod(shape)):
            raise ValueError(f"{len(body)} bytes of shape {shape} and type {dtype}, not {wanted} and {routers.dtype}")
        ids = np.frombuffer(body, dtype=dtype).reshape(shape)[:, list(routers.layers)]
    except (ValueError, TypeError, binascii.Error, OverflowError) as error:
        raise FalseReply(f"{name}: its experts cannot be read: {str(error)[:300]}") from error
    if not routers.fits(ids):
        raise FalseReply(f"{name}: it chose expert {int(ids.max())}; the model has {routers.experts}")
    return ids


def record(name: str, chunks: Sequence[NDArray[Any]], start: int, tokens: int, *, whole: bool) -> RoutedExperts | None:
    """The choices for the tokens from position `start` on of a prompt and its completion, which have `tokens` together; no pass has
    read the last one. Those that arrived, unless the completion is `whole`. Raises FalseReply where some of a whole one are
    missing."""
    ids = np.concatenate(chunks) if chunks else None
    arrived, wanted = 0 if ids is None else len(ids), tokens - 1 - start
    if whole and arrived != wanted:
        raise FalseReply(f"{name}: it sent the experts of {arrived} tokens, {wanted} were read")
    return None if ids is None else RoutedExperts(start, ids[: max(0, wanted)])
