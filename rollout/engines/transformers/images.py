"""The images of the sequences that a server decodes: what a forward pass sees of them, and at which positions its tokens are.

Invariants:
- The vision tower computes an image in the passes that read its tokens, with the weights of that pass; nothing of it is kept.
- A prompt may be read in pieces, and a piece may begin or end within an image.
- After a prompt with images every token's position is that of the one before it and 1, by time, row and column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ....common.image_processor import ImageProcessor, Pixels
from ....common.images import PlacedImage
from ....common.vision import PassImages, VisionTower
from ..image_parts import BadImage, read_image
from ..server import contract
from ..server.protocol import BadRequest


class _Prompt(NamedTuple):
    """The images of one sequence, where they are in it, and int64[3, T] its prompt's positions."""

    placed: Sequence[PlacedImage]
    pixels: Sequence[Pixels]
    positions: torch.Tensor


class SeenImages:
    """Of `model`, whose images `processor` reads."""

    def __init__(self, model: PreTrainedModel, processor: ImageProcessor) -> None:
        self._tower = VisionTower(model)
        self._processor = processor
        self._device = model.device
        self._prompts: dict[str, _Prompt] = {}

    def add(self, sequence: contract.Sequence) -> Sequence[PlacedImage]:
        """Read the images of a sequence, and say where they are. Raises BadRequest: one cannot be read, or has another number of
        tokens."""
        if not sequence.images:
            return ()
        try:
            read = [read_image(self._processor, image) for image in sequence.images]
        except BadImage as error:
            raise BadRequest(str(error)) from None
        placed = [one for one, _ in read]
        positions = self._tower.positions(torch.tensor(sequence.token_ids), placed)
        self._prompts[sequence.id] = _Prompt(placed, [pixels for _, pixels in read], positions)
        return placed

    def forget(self, id: str) -> None:
        self._prompts.pop(id, None)

    def load(self, pieces: Sequence[tuple[str, int, int]]) -> torch.Tensor | None:
        """Of the next pass, which reads of each sequence by id its tokens `[start, end)`, one after the other: make ready what it
        sees. int64[3, 1, N], the positions of its tokens; None where none of them is of a sequence with images."""
        if not any(id in self._prompts for id, _, _ in pieces):
            self._tower.load(None)
            return None
        pixels, grids, at, features = list[torch.Tensor](), list[list[int]](), list[int](), list[int]()
        positions, row, read = list[torch.Tensor](), 0, 0
        for id, start, end in pieces:
            prompt = self._prompts.get(id)
            positions.append(_positions(prompt, start, end))
            for image, seen in () if prompt is None else zip(prompt.placed, prompt.pixels, strict=True):
                first, last = max(start, image.start), min(end, image.end)
                if first < last:
                    pixels.append(torch.from_numpy(seen.values))
                    grids.append([1, seen.height, seen.width])
                    at += range(row + first - start, row + last - start)
                    features += range(read + first - image.start, read + last - image.start)
                    read += image.end - image.start
            row += end - start
        self._tower.load(
            PassImages(
                torch.cat(pixels).to(self._device),
                torch.tensor(grids, device=self._device),
                torch.tensor(at, device=self._device),
                torch.tensor(features, device=self._device),
            )
            if pixels
            else None
        )
        return torch.cat(positions, 1)[:, None].to(self._device)


def _positions(prompt: _Prompt | None, start: int, end: int) -> torch.Tensor:
    """int64[3, end - start]: of the tokens `[start, end)` of a sequence."""
    after = torch.arange(start, end).expand(3, -1)
    if prompt is None:
        return after
    known = prompt.positions
    shift = int(known.max()) + 1 - known.shape[1]
    return torch.cat([known[:, start:end], after[:, max(0, known.shape[1] - start) :] + shift], 1)
