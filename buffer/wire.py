"""How messages cross a process boundary: a msgspec header and the raw bytes of every array behind it.

Invariants:
- Frame 0 is one format byte and the msgpack of a message; frame 1 + i is array i, in the order in which the header names them.
- No pickle. An array's dtype comes from the receiver's own annotation, its length from its frame; a frame that does not fit
  is a WireError, never a crash.
- Decoded arrays are read-only views of the frames: nothing is copied.
- A request to the buffer has no frame above `FRAME_LIMIT`; the service cuts off who sends one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np

from ..errors import WireError
from .trajectory import LENGTH_LIMIT

FORMAT = b"\x02"
"""First byte of every message. Raise it when a struct on the wire changes meaning."""

FRAME_LIMIT = 4 * LENGTH_LIMIT
"""Bytes of one frame of a request: the token ids of the longest trajectory."""

Frame = bytes | memoryview
M = TypeVar("M")


def encode(message: Any) -> list[Frame]:
    """Frames of a message; its arrays are not copied."""
    arrays: list[Frame] = []

    def by_index(value: Any) -> int:
        if not isinstance(value, np.ndarray):
            raise NotImplementedError(f"cannot encode {type(value)}")
        arrays.append(np.ascontiguousarray(value).view(np.uint8).data)
        return len(arrays) - 1

    header = FORMAT + msgspec.msgpack.encode(message, enc_hook=by_index)
    return [header, *arrays]


def decode(kind: type[M], frames: Sequence[Frame]) -> M:
    """The message in `frames`.

    Raises:
        WireError: the frames are not a message of this kind and format.
    """
    if not frames or bytes(frames[0][:1]) != FORMAT:
        found = bytes(frames[0][:1]).hex() if frames else "no frame"
        raise WireError(f"unknown wire format {found!r}; this side speaks {FORMAT.hex()}")
    used: set[int] = set()

    def from_frame(annotation: Any, index: Any) -> np.ndarray:
        dtype = _dtype(annotation)
        if not isinstance(index, int) or not 0 <= index < len(frames) - 1 or index in used:
            raise ValueError(f"bad array index {index!r}")
        used.add(index)
        array = np.frombuffer(frames[index + 1], dtype=dtype)
        if dtype == np.bool_ and array.size and array.view(np.uint8).max() > 1:
            raise ValueError("a bool is neither 0 nor 1")
        return array

    try:
        message = msgspec.msgpack.decode(frames[0][1:], type=kind, dec_hook=from_frame)
    except (msgspec.MsgspecError, ValueError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a {getattr(kind, '__name__', kind)}: {error}") from None
    if len(used) != len(frames) - 1:
        raise WireError(f"{len(frames) - 1} array frames came, {len(used)} are named in the header")
    return message


@functools.cache
def _dtype(annotation: Any) -> np.dtype:
    return np.dtype(get_args(get_args(annotation)[1])[0])
