"""The dashboard's growing columns of numbers, and names as numbers: what a million trajectories take in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

GROWTH = 1.5  # of the space for rows, where it is full


class GrowingColumns:
    """Rows of numbers by column; `types` has the type of each."""

    def __init__(self, types: Mapping[str, DTypeLike]) -> None:
        self.size = 0
        self._arrays: dict[str, NDArray[Any]] = {name: np.empty(1024, dtype) for name, dtype in types.items()}

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The rows so far; valid until the next `extend`."""
        return self._arrays[name][: self.size]

    def extend(self, rows: Sequence[Sequence[float]]) -> None:
        """Values in the order of the columns."""
        end = self.size + len(rows)
        for (name, array), values in zip(self._arrays.items(), zip(*rows, strict=True), strict=False):
            if end > len(array):
                grown = np.empty(int(GROWTH * end), array.dtype)
                grown[: self.size] = array[: self.size]
                self._arrays[name] = array = grown
            array[self.size : end] = values
        self.size = end

    def row(self, at: int) -> dict[str, float | int]:
        return {name: array[at].item() for name, array in self._arrays.items()}


class Names(dict[str, int]):
    """Texts and their numbers, in the order in which they were first asked for; asking for a new one numbers it."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self.texts)
        self.texts.append(text)
        return number

    def containing(self, part: str) -> NDArray[np.bool_]:
        """bool[texts]: which have `part`, in whatever case."""
        part = part.lower()
        return np.array([part in text.lower() for text in self.texts], dtype=np.bool_)
