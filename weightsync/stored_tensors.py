"""Stored tensors of a snapshot, in a file without a name, which the kernel removes with the process: a version of the policy takes
no memory that another process could not have.

Imported by vLLM's and SGLang's processes: only packages that both have may be imported here.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, overload

import torch

HEADER_ALIGNMENT = 8  # bytes; of the data in a safetensors file
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
} | {
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""What safetensors calls them."""


class StoredTensors(Sequence[torch.Tensor]):
    """Tensors that were added one by one; each is read when it is asked for, from any thread. `folder` is where the file is, and
    needs the space.

    Attributes:
        layout: dtype and shape of each, on the device `meta`.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.layout: list[torch.Tensor] = []
        self._offsets: list[int] = []
        self._end = 0
        self._file: IO[bytes] = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - closed with the last reference

    def add(self, tensor: torch.Tensor) -> None:
        """Append a tensor in host memory. Raises OSError."""
        data = as_bytes(tensor).numpy().data
        self.layout.append(torch.empty_like(tensor, device="meta"))
        self._offsets.append(self._end)
        while data:
            written = os.pwrite(self._file.fileno(), data, self._end)
            data, self._end = data[written:], self._end + written

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        layout = self.layout[index]
        read = torch.empty(layout.nbytes, dtype=torch.uint8)
        at, left = self._offsets[index], read.numpy().data
        while left:
            count = os.preadv(self._file.fileno(), [left], at)
            if not count:
                raise OSError(f"a file of stored tensors ends before byte {at}")
            left, at = left[count:], at + count
        return read.view(layout.dtype).view(layout.shape)

    def __len__(self) -> int:
        return len(self.layout)


def layout_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Tensors of the same dtypes and shapes; nothing is read."""
    return tensors.layout if isinstance(tensors, StoredTensors) else tensors


def write_safetensors(
    path: Path, names: Sequence[str], tensors: Sequence[torch.Tensor], metadata: dict[str, str]
) -> None:
    """Write a safetensors file, one tensor after the other. Raises OSError."""
    layout = layout_of(tensors)
    # Large elements first: with a header of whole words every tensor lies at a multiple of its element's size.
    order = sorted(range(len(names)), key=lambda i: -layout[i].element_size())
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for i in order:
        start, end = end, end + layout[i].nbytes
        header[names[i]] = {
            "dtype": NAMES[layout[i].dtype],
            "shape": list(layout[i].shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for i in order:
            file.write(as_bytes(tensors[i]).numpy().data)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8[nbytes] view (or copy, where it is not contiguous) of a tensor."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # its strides may be such that torch refuses to view it
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
