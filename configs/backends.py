"""How the learner holds and steps the model: the kinds of backends, each with its own few fields."""

from __future__ import annotations

from typing import Literal

from .section import NonNegative, Positive, Section


class Fsdp2(Section, frozen=True, tag_field="kind", tag="fsdp2"):
    """PyTorch fully_shard over a transformers model."""

    ranks: Positive = 1
    """Learner processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the learner runs; `auto` takes CUDA where there is one."""
    tokens_per_microbatch: Positive = 8192
    """Tokens packed into one forward pass."""
    context_parallel: Positive = 1
    """Ranks that share the tokens of each row, for sequences too long for one; divides `ranks` and the model's heads."""
    recompute: bool = False
    """Keep only what enters each layer and compute the rest again on the way back: less memory, about a third more work."""
    compile: bool = False
    """torch.compile every layer but its attention. The first steps of a process take minutes: for large models and long runs."""
    offload: bool = False
    """CUDA only: weights, gradients and optimizer state stay in the host's memory and visit the GPU layer by layer."""
    liger: bool = False
    """CUDA only: Liger's fused kernels (the package liger-kernel) for norms, rotations and feed-forward gates."""
    lora_rank: NonNegative = 0
    """Train adapters of this rank and freeze the model (LoRA, Hu et al. 2021, arXiv:2106.09685); 0 trains all weights. Adapters
    want a learning rate about ten times higher."""


class Megatron(Section, frozen=True, tag_field="kind", tag="megatron"):
    """Megatron-core, for Qwen3, Qwen3-MoE and Llama: a model split over ranks by tensors, layers, context and experts. What is left
    of the ranks is data parallel, with the optimizer's state sharded over it."""

    ranks: Positive = 1
    """Learner processes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the learner runs; `auto` takes CUDA where there is one, which needs TransformerEngine."""
    tokens_per_microbatch: Positive = 8192
    """Tokens packed into one forward pass."""
    tensor_parallel: Positive = 1
    """Ranks that every matrix is split over; above 1 norms and residuals are split by tokens over them, too (sequence parallel)."""
    pipeline_parallel: Positive = 1
    """Stages that the layers are split over."""
    virtual_stages: Positive = 1
    """Parts of its layers that each stage holds in turn; more of them leave it idle for less of a step and send more."""
    context_parallel: Positive = 1
    """Ranks that every sequence is split over."""
    expert_parallel: Positive = 1
    """Ranks that the experts of a mixture are split over, among those of a stage."""


def copy_ranks(backend: Fsdp2 | Megatron) -> int:
    """Ranks that take the same rows, holding one copy of the model or sharing the work on it: `ranks` is a multiple of it."""
    if isinstance(backend, Fsdp2):
        return backend.context_parallel
    return backend.tensor_parallel * backend.pipeline_parallel * backend.context_parallel
