"""Whether Megatron can be used for a model at all: known before anything is started, without importing it."""

from __future__ import annotations

import contextlib
from importlib.metadata import PackageNotFoundError, version

import torch
from transformers import PretrainedConfig

from ...common import accelerator
from ...configs.backends import Megatron
from ...errors import ConfigError

KEY = "learner.backend"
VERSION = "0.16.1"  # versions of megatron-core: `cpu.py` rewrites its source, and `checkpoint.py` calls its internals
ENGINES = "2.10.", "2.11."  # versions of TransformerEngine without those that multiply for a router in TF32

FAMILIES = ("qwen3", "qwen3_moe", "llama")
ROPES = ("default", "linear", "llama3")


def check_installed(layout: Megatron) -> None:
    """Raises ConfigError where Megatron is not installed, is another version, or cannot have the device that is asked for."""
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        raise ConfigError(
            f"{KEY}.kind: megatron needs the package megatron-core; run `make install`, or `pip install -e .[megatron]` "
            "in an environment of your own"
        ) from None
    if found != VERSION:
        raise ConfigError(
            f"{KEY}.kind: megatron is written for megatron-core {VERSION}, and {found} is installed; "
            f"`pip install megatron-core=={VERSION}`"
        )
    here = accelerator.current()
    if here and here.type != "cuda" and layout.device != "cpu":
        raise ConfigError(
            f"{KEY}.kind: megatron computes on CUDA devices and on CPUs, and torch sees an {here.name} here; allowed are "
            f"{KEY}.device=cpu and {KEY}.kind=fsdp2"
        )
    if not torch.cuda.is_available():
        return
    if layout.device == "cpu":
        raise ConfigError(
            f"{KEY}.device: cpu with {KEY}.kind=megatron, which takes the CUDA devices that torch sees; allowed are auto and "
            "cuda, or an empty CUDA_VISIBLE_DEVICES"
        )
    engine = "none"
    with contextlib.suppress(PackageNotFoundError):
        engine = version("transformer-engine")
    if not engine.startswith(ENGINES):
        raise ConfigError(
            f"{KEY}.kind: megatron on CUDA is written for transformer-engine 2.10 and 2.11, and {engine} is installed; "
            "`pip install --no-build-isolation 'transformer-engine[pytorch]>=2.10,<2.12'`"
        )


def check_family(config: PretrainedConfig) -> None:
    """Raises ConfigError for models that are not mapped here, and for options that a mapped one would compute differently."""
    path = config.name_or_path
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"{KEY}.kind=megatron: {path!r} is a model of family {config.model_type}; allowed are {', '.join(FAMILIES)}, "
            f"and any family with {KEY}.kind=fsdp2"
        )
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    asked = {
        "attention_bias": getattr(config, "attention_bias", False),
        "mlp_bias": getattr(config, "mlp_bias", False),
        "use_sliding_window": getattr(config, "use_sliding_window", False),
        "mlp_only_layers": getattr(config, "mlp_only_layers", ()),
        "decoder_sparse_step": getattr(config, "decoder_sparse_step", 1) != 1,
        f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
        f"rope_type={rope}": rope not in ROPES,
    }
    if unmapped := [name for name, present in asked.items() if present]:
        raise ConfigError(
            f"{KEY}.kind=megatron: {path!r} wants {', '.join(unmapped)}, which is not mapped to Megatron; allowed is "
            f"{KEY}.kind=fsdp2"
        )


def check_layout(layout: Megatron, model: PretrainedConfig) -> None:
    """Raises ConfigError where a model of this config cannot be split so."""
    experts = getattr(model, "num_experts", None)
    if experts is None and layout.expert_parallel > 1:
        raise ConfigError(f"{KEY}.parallel.expert={layout.expert_parallel}: the model has no experts; allowed is 1")
    if experts is not None and layout.tensor_parallel > 1 and layout.expert_parallel == 1:
        # Megatron would leave the gradients of experts unsummed: each tensor rank has whole ones, and its own share of the tokens.
        raise ConfigError(
            f"{KEY}.parallel.expert=1: with {KEY}.parallel.tensor={layout.tensor_parallel} a mixture of experts needs "
            f"parallel.expert, too; allowed are divisors of its {experts} experts above 1"
        )
    tensor = ("parallel.tensor", layout.tensor_parallel)
    stages = ("parallel.pipeline x parallel.virtual", layout.pipeline_parallel * layout.virtual_stages)
    counts = {
        "key-value heads": (model.num_key_value_heads, *tensor),
        "query heads": (model.num_attention_heads, *tensor),
        "tokens in the vocabulary": (model.vocab_size, *tensor),
        "numbers inside a feed-forward layer": (model.intermediate_size, *tensor),
        "layers": (model.num_hidden_layers, *stages),
        "experts": (experts or layout.expert_parallel, "parallel.expert", layout.expert_parallel),
    }
    for what, (count, key, size) in counts.items():
        if count % size:
            raise ConfigError(f"{KEY}.{key}: {size} does not divide the model's {count} {what}; allowed are divisors")
