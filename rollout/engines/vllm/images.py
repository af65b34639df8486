"""Qwen3-VL in a vLLM server: what takes the place of vLLM's own way of reading images, which needs a tokenizer and torchvision, and
looks for placeholders in the token ids, to write as many there as an image has.

    request ──files, names──> SeeingProcessor ──numbers, places──> engine process: vision tower ──features──> decoder

Invariants:
- Token ids stay as they are. Which of them are an image is what the request says (`image_parts`), not their ids.
- An image's features are those of one salt: a request uses none of other weights than a prefix with its salt would.
- Positions are those that transformers computes, whether or not the config says that they interleave.

vLLM imports this module where it serves this architecture, in each of a server's processes (`plugin.register`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from . import without_torchvision  # noqa: F401

# isort: split
import numpy as np
import torch
from transformers import BatchFeature
from vllm.config import VllmConfig
from vllm.inputs import MultiModalInput, mm_input
from vllm.model_executor.models.qwen3_vl import (
    Qwen3VLDummyInputsBuilder,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMultiModalProcessor,
    Qwen3VLProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import ProcessorInputs, TimingContext

from ....common.image_processor import ImageProcessor, Pixels
from ....common.images import PromptImage
from ..image_parts import ImageName, check_places, read_image

IMAGE = "image"  # vLLM's name of the modality


class _Read(NamedTuple):
    """An image: its key among features, the first of its tokens, and what the vision tower reads of it."""

    key: str
    start: int
    pixels: Pixels


class SeeingInfo(Qwen3VLProcessingInfo):
    """Images only, read by the learner's processor."""

    @cached_property
    def images(self) -> ImageProcessor:
        return ImageProcessor(self.model_id)

    @property
    def most_tokens(self) -> int:
        """Of one image."""
        processor = self.images.image_processor
        return int(processor.size["longest_edge"]) // (processor.patch_size * processor.merge_size) ** 2

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {IMAGE: None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {IMAGE: self.most_tokens}


class SeeingProcessor(Qwen3VLMultiModalProcessor):
    requires_tokenizer = False
    info: SeeingInfo

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """Read the images of a request. Raises BadImage, which vLLM answers with a 400."""
        files: Any = inputs.mm_data_items[IMAGE]
        names = [ImageName.of(uuid) for uuid in (inputs.mm_uuid_items or {}).get(IMAGE, [])]
        check_places(((name.start, name.end) for name in names), len(inputs.prompt))
        read = list[_Read]()
        for at, name in enumerate(names):
            image = PromptImage(name.start, name.end, files.get_item_for_hash(at).original_bytes)
            placed, pixels = read_image(self.info.images, image)
            read.append(_Read(f"{name.salt}-{placed.digest}", name.start, pixels))
        return self._input(list(inputs.prompt), read)

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: object) -> MultiModalInput:
        """Images as large as there are any; vLLM measures with them how much memory a pass takes."""
        most, merge = self.info.most_tokens, self.info.images.merge_size
        vision: Any = self.info.get_hf_config().vision_config
        rows = math.isqrt(most)
        height, width = rows * merge, most // rows * merge
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        blank = Pixels(np.zeros((height * width, size), np.float32), height, width)
        starts = [most * at for at in range(mm_counts.get(IMAGE, 0))]
        return self._input([0] * most * len(starts), [_Read(f"blank-{start}", start, blank) for start in starts])

    def _input(self, prompt: list[int], images: Sequence[_Read]) -> MultiModalInput:
        dtype: Any = self.info.ctx.model_config.dtype  # what the vision tower computes in
        values = [torch.from_numpy(image.pixels.values).to(dtype) for image in images]
        grids = [[1, image.pixels.height, image.pixels.width] for image in images]
        made = BatchFeature({"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)})
        tokens = [self.info.images.tokens(image.pixels) for image in images]
        return mm_input(
            prompt_token_ids=prompt,
            mm_kwargs=MultiModalKwargsItems.from_hf_inputs(made, self._get_mm_fields_config(made, {})),
            mm_hashes={IMAGE: [image.key for image in images]},
            mm_placeholders={
                IMAGE: [PlaceholderRange(image.start, size) for image, size in zip(images, tokens, strict=True)]
            },
        )


@MULTIMODAL_REGISTRY.register_processor(SeeingProcessor, info=SeeingInfo, dummy_inputs=Qwen3VLDummyInputsBuilder)
class SeeingQwen3VL(Qwen3VLForConditionalGeneration):
    """vLLM's own model, which is given normalized images."""

    supports_mm_device_do_normalize = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        vllm_config.model_config.hf_config.text_config.rope_parameters["mrope_interleaved"] = True
        super().__init__(vllm_config=vllm_config, prefix=prefix)
