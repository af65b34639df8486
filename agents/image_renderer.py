"""The chat format of Qwen3-VL, for sessions that render in several threads.

Invariants:
- Of an image it keeps how many patches it has, and not their values: engine and learner compute those from the file.
"""

from __future__ import annotations

import threading
from typing import Any

from renderers.qwen3_vl import Qwen3VLRenderer


class ImageRenderer(Qwen3VLRenderer):
    """As `Qwen3VLRenderer`, whose cache of images is for one thread."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._processing = threading.Lock()

    def _process_image(self, part: dict[str, Any]) -> Any:
        """As the base class: (the image, what the processor made of it, its tokens, its hash)."""
        with self._processing:
            image, made, tokens, digest = super()._process_image(part)
            counted = {"image_grid_thw": made["image_grid_thw"], "pixel_values": None}
            self._image_cache[digest] = counted, tokens
            return image, counted, tokens, digest
