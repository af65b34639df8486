"""Liger kernels in FSDP2's models (Hsu et al. 2024, arXiv:2410.10989): norms, rotations and gates, each fused into one Triton
kernel on CUDA.

Invariants:
- They replace the computation of a layer only: weights keep their names and shapes.
- Log-probs and entropies stay our own (`learner/logprobs.py`): Liger's fused cross-entropies give a loss and no log-prob.
- What is replaced are transformers' classes, for all models that this process builds from then on.
"""

from __future__ import annotations

from importlib import import_module, util

import torch
from transformers import PretrainedConfig

from ...errors import ConfigError

KEY = "learner.backend.options=[liger]"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
KERNELS = {"rms_norm": True, "rope": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False}
"""What is replaced. Liger's default enables the last one too, which would replace the model's `forward`."""


def check(device: torch.device, model: PretrainedConfig) -> None:
    """Raises ConfigError where Liger's kernels do not run on `device` for a model of this config."""
    if device.type != "cuda":
        raise ConfigError(
            f"{KEY} takes kernels for CUDA, and this learner runs on the {device.type.upper()}; leave it out"
        )
    if util.find_spec("liger_kernel") is None:
        raise ConfigError(f"{KEY} needs the package liger-kernel; `pip install liger-kernel`, or leave it out")
    if model.model_type not in FAMILIES:
        raise ConfigError(
            f"{KEY}: {model.name_or_path!r} is a model of family {model.model_type}; allowed are {', '.join(FAMILIES)}, and "
            "any family without it"
        )


def apply(family: str) -> None:
    liger = import_module("liger_kernel.transformers")  # not at the top: it needs Triton
    getattr(liger, f"apply_liger_kernel_to_{family}")(**KERNELS)
