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

LATENT = "deepseek_v3"  # the family of latent attention
FAMILIES = ("qwen3", "qwen3_moe", "llama", LATENT)
ROPES = ("default", "linear", "llama3")
LATENT_ROPES = ("default", "yarn")


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
        f"rope_type={rope}": rope not in (LATENT_ROPES if has_latent_attention(config) else ROPES),
    }
    if has_latent_attention(config):
        asked |= _asked_of_latent(config)
    if unmapped := [name for name, present in asked.items() if present]:
        raise ConfigError(
            f"{KEY}.kind=megatron: {path!r} wants {', '.join(unmapped)}, which is not mapped to Megatron; allowed is "
            f"{KEY}.kind=fsdp2"
        )


def has_latent_attention(config: PretrainedConfig) -> bool:
    return config.model_type == LATENT


def routed_experts(config: PretrainedConfig) -> int | None:
    """The experts of a layer that routes to some; None where no layer does."""
    if has_latent_attention(config):
        return config.n_routed_experts if config.first_k_dense_replace < config.num_hidden_layers else None
    return getattr(config, "num_experts", None)


def _asked_of_latent(config: PretrainedConfig) -> dict[str, bool]:
    rope = config.rope_parameters or {}
    scales = [rope.get(name) for name in ("mscale", "mscale_all_dim")]
    chosen, limited = config.num_experts_per_tok, (config.topk_group or 1) < (config.n_group or 1)
    routes = routed_experts(config) is not None
    return {
        "rope_interleave=false": not config.rope_interleave,
        # Else transformers scales what is rotated, too.
        f"mscale={scales[0]} with mscale_all_dim={scales[1]}": rope.get("rope_type", "default") == "yarn"
        and (not scales[0] or scales[0] != scales[1] or "attention_factor" in rope),
        "norm_topk_prob=false": routes and not config.norm_topk_prob,
        "num_experts_per_tok=1": routes and chosen == 1,
        "n_shared_experts=0": routes and not config.n_shared_experts,
        # transformers adds up a group's best two experts, Megatron as many as one of the groups gives.
        f"num_experts_per_tok={chosen} from topk_group={config.topk_group}": routes
        and limited
        and chosen // config.topk_group != 2,
    }


def check_layout(layout: Megatron, model: PretrainedConfig) -> None:
    """Raises ConfigError where a model of this config cannot be split so."""
    experts = routed_experts(model)
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
        "numbers inside shared experts": (_shared_width(model), *tensor),
        "layers": (model.num_hidden_layers, *stages),
        "experts": (experts or layout.expert_parallel, "parallel.expert", layout.expert_parallel),
    }
    for what, (count, key, size) in counts.items():
        if count % size:
            raise ConfigError(f"{KEY}.{key}: {size} does not divide the model's {count} {what}; allowed are divisors")
    if has_latent_attention(model) and layout.expert_parallel > 1 and experts is not None:
        _check_every_rank_routes(layout, model)


def _shared_width(model: PretrainedConfig) -> int:
    """0 where there are no shared experts."""
    if not has_latent_attention(model) or routed_experts(model) is None:
        return 0
    return model.moe_intermediate_size * model.n_shared_experts


def _check_every_rank_routes(layout: Megatron, model: PretrainedConfig) -> None:
    """Ranks with split experts have an optimizer for these, whose steps all ranks take together."""
    stages = layout.pipeline_parallel
    each = model.num_hidden_layers // (stages * layout.virtual_stages)
    last = (stages * (layout.virtual_stages - 1) + 1) * each  # behind the last layer of the first stage
    if last <= model.first_k_dense_replace:
        raise ConfigError(
            f"{KEY}.parallel.expert={layout.expert_parallel}: the first of {KEY}.parallel.pipeline={stages} stages has layers 0 to "
            f"{last - 1}, and the model's first {model.first_k_dense_replace} have no experts; allowed are fewer stages, more of "
            "parallel.virtual, and parallel.expert=1"
        )
