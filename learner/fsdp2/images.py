"""The images of an FSDP2 row: what the vision tower sees of them, and at which positions the row's tokens are.

Invariants:
- An image that a row has several times is computed once; its gradient is that of all its places.
- Where sequences share a prefix, its images are those of the tokens that are computed.
- Positions begin anew with each sequence.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from transformers import PreTrainedModel

from ...common.image_processor import ImageProcessor, Pixels
from ...common.images import PlacedImage, moved_images
from ...common.vision import PassImages, VisionTower
from ...errors import LearnerError
from ..packing import MicroBatch


class RowImages:
    """Of `model`, which the ranks of a learner share; its image processor is that of `path`."""

    def __init__(self, model: PreTrainedModel, path: str) -> None:
        self._tower = VisionTower(model, always=True)
        self._processor = ImageProcessor(path)

    def load(self, row: MicroBatch, kept: torch.Tensor, device: torch.device) -> torch.Tensor:
        """int64[3, 1, M] on `device`: the positions of the tokens of `row` at `kept`, int64[M] and ascending, which the next pass
        computes. Make ready their images. Raises LearnerError: an image has other tokens than the trajectory says."""
        self._tower.load(self._pass_images(row, kept, device))
        positions = [
            self._tower.positions(
                row.token_ids[start:end],
                moved_images((image for image in row.images if start <= image.start < end), -start),
            )
            for start, end in pairwise(row.cu_seqlens)
        ]
        return torch.cat(positions, 1)[:, None, kept].to(device)

    def _read(self, image: PlacedImage, data: bytes) -> Pixels:
        try:
            return self._processor.pixels(data)
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises whatever a broken file makes its decoders raise; some are OSErrors
            raise LearnerError(f"the image {image.name} cannot be read: {error}") from error

    def _pass_images(self, row: MicroBatch, kept: torch.Tensor, device: torch.device) -> PassImages | None:
        """The images at the tokens `kept`; None where there is none."""
        pixels, grids, firsts, read = list[torch.Tensor](), list[list[int]](), dict[str, int](), 0
        at, features = list[torch.Tensor](), list[torch.Tensor]()
        for image in row.images:
            tokens = torch.arange(image.start, image.end)
            where = torch.searchsorted(kept, tokens)
            if where[-1] >= len(kept) or not torch.equal(kept[where], tokens):
                continue  # it is in a prefix that another sequence computes
            if image.digest not in firsts:
                found = self._read(image, row.image_files[image.digest])
                if (found.height, found.width) != (image.height, image.width):
                    raise LearnerError(
                        f"the image {image.name} has {found.height} x {found.width} patches, its trajectory says "
                        f"{image.height} x {image.width}; is model.path another model than before?"
                    )
                firsts[image.digest] = read
                read += self._processor.tokens(found)
                pixels.append(torch.from_numpy(found.values))
                grids.append([1, found.height, found.width])
            at.append(where)
            features.append(firsts[image.digest] + torch.arange(len(tokens)))
        if not pixels:
            return None
        return PassImages(
            torch.cat(pixels).to(device),
            torch.tensor(grids, device=device),
            *(torch.cat(one).to(device) for one in (at, features)),
        )
