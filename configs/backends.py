"""The config section `learner.backend`: the kinds of backends that hold and step the model, each with its own few fields."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import field

from .section import NonNegative, Positive, Section

Option = Literal["recompute", "compile", "offload", "liger", "router_replay", "frozen_vision"]
MegatronOption = Literal["recompute", "offload", "router_replay"]
REPLAY: MegatronOption = "router_replay"
FROZEN_VISION: Option = "frozen_vision"


class Ranks(Section, frozen=True):
    ranks: Positive = 1
    """Learner processes."""
    device: Literal["auto", "cpu", "cuda", "npu", "xpu"] = "auto"
    """Where the learner runs; `auto` takes the accelerator that torch sees, if any. `cuda` is ROCm, too, as torch calls it. For
    `megatron` there is `cuda`, which needs TransformerEngine, and `cpu`."""
    tokens_per_microbatch: Positive = 8192
    """Tokens packed into one forward pass."""
    lora_rank: NonNegative = 0
    """Train adapters of this rank and freeze the model (LoRA, Hu et al. 2021, arXiv:2106.09685); 0 trains all weights. Adapters
    want a learning rate about ten times higher."""


Fsdp2Axis = Literal["context", "expert"]


class Fsdp2(Ranks, frozen=True, tag_field="kind", tag="fsdp2"):
    """PyTorch fully_shard over a transformers model."""

    parallel: dict[Fsdp2Axis, Positive] = field(default_factory=lambda: dict.fromkeys(get_args(Fsdp2Axis), 1))
    """`context`: ranks that share the tokens of each row, for sequences too long for one rank; divides `ranks` and the model's
    heads. The other ranks are data parallel. `expert`: ranks that split the experts of a mixture, of whatever rows; divides
    `ranks` and the experts."""
    options: tuple[Option, ...] = ()
    """`recompute`: keep only each layer's input and recompute activations in the backward pass, for less memory and about a third
    more work. `compile`, without `liger`: torch.compile every layer; the first steps of a process take minutes. `offload`, not on
    CPUs: weights, gradients and optimizer state stay in host memory and visit the GPU layer by layer, small ones together.
    `liger`, CUDA only: fused kernels of the package liger-kernel for norms, rotary embeddings and feed-forward gates.
    `router_replay`: the routers of a mixture of experts take the experts that the engine's took for the same token
    (arXiv:2510.11370), with weights of their own; engines record them and trajectories carry them. `frozen_vision`, of a model
    that sees images: its vision tower is not trained."""

    @property
    def context_parallel(self) -> int:
        return self.parallel.get("context", 1)

    @property
    def expert_parallel(self) -> int:
        return self.parallel.get("expert", 1)


MegatronAxis = Literal["tensor", "pipeline", "virtual", "context", "expert"]


class Megatron(Ranks, frozen=True, tag_field="kind", tag="megatron"):
    """Megatron-core, for Qwen3, Qwen3-MoE, Llama and DeepSeek-V3: a model split over ranks by tensors, layers, context and experts.
    What is left of the ranks is data parallel, with the optimizer's state sharded over it."""

    parallel: dict[MegatronAxis, Positive] = field(default_factory=lambda: dict.fromkeys(get_args(MegatronAxis), 1))
    """How many ranks split the model, by axis. `tensor`: ranks that split every matrix; above 1 they also split norms and
    residuals by tokens (sequence parallel). `pipeline`: stages that split the layers. `virtual`: interleaved parts of each stage;
    more of them leave a stage idle for less of a step and send more. `context`: ranks that split every sequence. `expert`: ranks
    of a stage that split the experts of a mixture."""
    options: tuple[MegatronOption, ...] = ()
    """`recompute`: keep only each layer's input and recompute activations in the backward pass, for less memory and about a third
    more work. `offload`: float32 master weights and optimizer state stay in host memory, where the optimizer steps; the GPU keeps
    weights in `model.dtype` and gradients. `router_replay`: the routers of a mixture of experts take the experts that the engine's
    took for the same token (arXiv:2510.11370), with weights of their own; engines record them and trajectories carry them."""

    @property
    def tensor_parallel(self) -> int:
        return self.parallel.get("tensor", 1)

    @property
    def pipeline_parallel(self) -> int:
        return self.parallel.get("pipeline", 1)

    @property
    def virtual_stages(self) -> int:
        return self.parallel.get("virtual", 1)

    @property
    def context_parallel(self) -> int:
        return self.parallel.get("context", 1)

    @property
    def expert_parallel(self) -> int:
        return self.parallel.get("expert", 1)


def copy_ranks(backend: Fsdp2 | Megatron) -> int:
    """Ranks that take the same rows, holding one copy of the model or sharing the work on it: `ranks` is a multiple of it."""
    if isinstance(backend, Fsdp2):
        return backend.context_parallel
    return backend.tensor_parallel * backend.pipeline_parallel * backend.context_parallel
