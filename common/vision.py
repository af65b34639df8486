"""The vision tower of a transformers model, and the images of its next forward pass: for a server's passes and a learner's.

    pixels ──vision tower──> features ──> in the place of the embeddings of their placeholders, and added to the outputs of the
                                          first layers (DeepStack, Meng et al. 2024, arXiv:2406.04334)

Invariants:
- Which tokens are an image is what `load` says, not their ids: a sampled placeholder is a token like any other.
- Positions are those of the model's own `get_rope_index`: an image's tokens have one for time, rows and columns each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .images import PlacedImage

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # a worker makes no model

DECODER_ONLY: dict[str, str] = {"vision_config": "sdpa"}
"""Of a model's attention: what is not the decoder's. No image attends to another, and none has a cache."""


class PassImages(NamedTuple):
    """The images of one pass: float[P, D], the patches of all; int64[n, 3], how many each has in time, rows and columns; and of the
    K placeholders that are in the pass their positions there, ascending, and which of the features is at each: int64[K] both."""

    pixels: torch.Tensor
    grids: torch.Tensor
    at: torch.Tensor
    features: torch.Tensor


class VisionTower:
    """Of `model`, of one of `images.FAMILIES`. With `always` it computes in every pass, of a blank image where there is none: ranks
    that share its parameters make the same collective calls, and all parameters have a gradient."""

    def __init__(self, model: PreTrainedModel, *, always: bool = False) -> None:
        self._model: Any = model
        self._always = always
        self._loaded: PassImages | None = None
        self.merge = int(self._model.config.vision_config.spatial_merge_size)
        self._model.model.language_model.register_forward_pre_hook(self._insert, with_kwargs=True)

    def load(self, images: PassImages | None) -> None:
        """Of the next pass."""
        self._loaded = images

    def positions(self, token_ids: torch.Tensor, images: Sequence[PlacedImage]) -> torch.Tensor:
        """int64[3, T] on CPU: of the tokens int64[T] of one sequence, by time, row and column."""
        if not images:
            return torch.arange(len(token_ids)).expand(3, -1)
        seen = torch.zeros(1, len(token_ids), dtype=torch.int64)
        for image in images:
            seen[0, image.start : image.end] = 1
        grids = torch.tensor([[1, image.height, image.width] for image in images])
        found, _ = self._model.model.get_rope_index(token_ids[None].cpu(), seen, image_grid_thw=grids)
        return found[:, 0]

    def _insert(self, _: object, args: tuple[Any, ...], arguments: dict[str, Any]) -> Any:
        """Before the language model: the embeddings of its tokens, with the features of images in their places."""
        images, self._loaded = self._loaded, None
        if images is None and not self._always:
            return None
        embeddings: torch.Tensor = arguments["inputs_embeds"]
        features, *layers = self._features(images or self._blank(embeddings.device))
        if images is None:
            nothing = sum(one.sum() for one in (features, *layers)) * 0.0
            return args, {**arguments, "inputs_embeds": embeddings + nothing}
        seen = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
        seen[0, images.at] = True
        whole = embeddings[0].index_copy(0, images.at, features[images.features].to(embeddings.dtype))[None]
        more = {"visual_pos_masks": seen, "deepstack_visual_embeds": [layer[images.features] for layer in layers]}
        return args, {**arguments, "inputs_embeds": whole, **more}

    def _features(self, images: PassImages) -> list[torch.Tensor]:
        """[F, hidden] each: what takes the place of embeddings, and what is added after the first layers."""
        found = self._model.get_image_features(images.pixels, images.grids, return_dict=True)
        return [torch.cat(list(one)) for one in (found.pooler_output, *found.deepstack_features)]

    def _blank(self, device: torch.device) -> PassImages:
        config = self._model.config.vision_config
        size = config.in_channels * config.temporal_patch_size * config.patch_size**2
        grid = torch.tensor([[1, self.merge, self.merge]], device=device)
        none = torch.zeros(0, dtype=torch.int64, device=device)
        return PassImages(torch.zeros(self.merge**2, size, device=device), grid, none, none)


def attention_of(config: Any, attention: str) -> str | dict[str, str]:
    """`attn_implementation` for a model of `config` whose decoder attends by `attention`."""
    if config.get_text_config(decoder=True) is config:
        return attention
    return {"": attention, "text_config": attention, **DECODER_ONLY}
