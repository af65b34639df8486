"""Imported before vLLM's Qwen3-VL, for a Python without torchvision, such as that of vLLM's build for CPUs: from transformers'
module that reads images over torchvision vLLM takes a function that computes sizes. The module over Pillow has the same function.
"""

from __future__ import annotations

import importlib.util
import sys

from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as over_pillow

OVER_TORCHVISION = "transformers.models.qwen2_vl.image_processing_qwen2_vl"

if importlib.util.find_spec("torchvision") is None:
    sys.modules.setdefault(OVER_TORCHVISION, over_pillow)
