"""The vision tower and the image processor of the tiny random Qwen3-VL that `slipstream init-model` makes.

an image of 32 x 32 pixels ──8 x 8 pixels each──> 4 x 4 patches ──2 x 2 each──> 4 tokens of the decoder
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE, VIDEO, BEGIN, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
IMAGE_TOKENS = (BEGIN, END, IMAGE, VIDEO)  # of Qwen3-VL

PATCH, MERGE, FRAMES = 8, 2, 2  # pixels of a patch's side, patches of a token's side, times that an image is repeated
LEAST_PIXELS, MOST_PIXELS = 16 * 16, 256 * 256  # of an image; others are scaled
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "num_heads": 2,
    "intermediate_size": 128,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
}


def image_processor() -> Qwen2VLImageProcessorPil:
    sizes: dict[str, Any] = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": FRAMES}
    pixels = {"shortest_edge": LEAST_PIXELS, "longest_edge": MOST_PIXELS}
    return Qwen2VLImageProcessorPil(**sizes, size=pixels, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def seeing_model(
    decoder: Mapping[str, Any], vocabulary: Mapping[str, int], spread: float
) -> Qwen3VLForConditionalGeneration:
    """A random model with tied embeddings, whose decoder has these settings; `spread` is the initializers' standard deviation."""
    half = decoder["head_dim"] // 2  # rotations, which time, rows and columns share
    rope = {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
    }
    config = Qwen3VLConfig(
        text_config={**decoder, "rope_parameters": rope},
        vision_config={**TOWER, "out_hidden_size": decoder["hidden_size"], "initializer_range": spread},
        image_token_id=vocabulary[IMAGE],
        video_token_id=vocabulary[VIDEO],
        vision_start_token_id=vocabulary[BEGIN],
        vision_end_token_id=vocabulary[END],
        tie_word_embeddings=True,
        dtype="float32",
    )
    return Qwen3VLForConditionalGeneration(config)
