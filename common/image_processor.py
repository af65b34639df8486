"""The image processor that comes with a model: from an image's file to the numbers that its vision tower reads.

Invariants:
- Workers, servers and learners use the same implementation, over Pillow and NumPy: the same file gives the same numbers, bit by
  bit.
- What is decoded is within the limits of `images.opened_image`, wherever the file comes from.
- An image becomes height x width patches, and a token of the language model for each square of `merge_size` x `merge_size` of them.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from .images import digest_of, opened_image
from .modelscope import is_on_modelscope, local_folder

CACHE_BYTES = 256 << 20  # of numbers that are kept: the members of a group see the same images
MODEL_KEY = "model.path"


class Pixels(NamedTuple):
    """What the vision tower reads of one image: float32[height x width, D], and its patches."""

    values: NDArray[np.float32]
    height: int
    width: int


class ImageProcessor:
    """Of the model in the folder or hub name `path`, loaded when it is needed first. Raises ConfigError then, where it has none."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._kept: dict[str, Pixels] = {}  # by digest, the one that was asked for last is the last
        self._kept_bytes = 0

    @functools.cached_property
    def image_processor(self) -> Any:
        """transformers' own; `renderers` asks a processor for it by this name."""
        from transformers import AutoImageProcessor

        path = local_folder(self._path, MODEL_KEY, weights=False) if is_on_modelscope(self._path) else self._path
        try:
            return AutoImageProcessor.from_pretrained(path, backend="pil")
        except (OSError, ValueError, ImportError, KeyError) as error:
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{MODEL_KEY}: {self._path!r} has no usable image processor: {why}") from error

    @property
    def merge_size(self) -> int:
        return int(self.image_processor.merge_size)

    def tokens(self, pixels: Pixels) -> int:
        return pixels.height * pixels.width // self.merge_size**2

    def pixels(self, data: bytes) -> Pixels:
        """Of an image's file. Raises what `opened_image` raises, and what Pillow raises for a broken file."""
        with self._lock:
            digest = digest_of(data)
            if (found := self._kept.pop(digest, None)) is None:
                found = self._pixels(data)
                self._kept_bytes += found.values.nbytes
            self._kept[digest] = found
            while self._kept_bytes > CACHE_BYTES:
                self._kept_bytes -= self._kept.pop(next(iter(self._kept))).values.nbytes
            return found

    def _pixels(self, data: bytes) -> Pixels:
        with opened_image(data) as opened:
            made = self.image_processor(images=[opened.convert("RGB")], return_tensors="np")
        _, height, width = made["image_grid_thw"][0].tolist()
        return Pixels(np.ascontiguousarray(made["pixel_values"], dtype=np.float32), height, width)
