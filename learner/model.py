"""Finding and checking the policy, and making its model.

Invariants:
- `check_model` reads config and tokenizer only, never a weight, so that a wrong path is reported before anything starts.
- A folder is never looked up on the hub, a hub name only where its files are not cached.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
)
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.initialization import no_init_weights

from ..common.images import FAMILIES as IMAGE_FAMILIES
from ..common.kv_cache import kv_bytes_per_token
from ..common.modelscope import is_on_modelscope, local_folder, repository_of
from ..common.routed_experts import ROUTER_FAMILIES, RouterShape, routers_of
from ..common.vision import attention_of
from ..errors import ConfigError, first_line
from .hub import require_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds to import, and a worker makes no model

PACKABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Other kinds (recurrent, linear, chunked) would leak state from one packed sequence into the next."""

FILES = {"model": ("*.safetensors",), "tokenizer": ("tokenizer.json", "*.model", "vocab.*")}
"""A folder holds one of each. Without the second, transformers silently makes an empty tokenizer of the family."""

MODEL_KEY = "model.path"  # where the config names the policy
REPLAY_KEY = "learner.backend.options=[router_replay]"
LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError)  # of missing, malformed, foreign files


class ModelShape(msgspec.Struct, frozen=True):
    """Longest context in tokens, query heads, and entries of the KV cache per token over all layers."""

    positions: int
    heads: int
    kv_numbers: int


def read_config(path: str) -> PretrainedConfig:
    """The config of a folder or hub name. Raises ConfigError where there is none."""
    return _load(AutoConfig, path, "config")


def read_shape(path: str) -> ModelShape:
    config: Any = read_config(path).get_text_config(decoder=True)
    return ModelShape(config.max_position_embeddings, config.num_attention_heads, kv_bytes_per_token(config, 1))


@functools.cache
def read_routers(path: str) -> RouterShape:
    """The routers of the mixture of experts in `path`. Raises ConfigError where there is none whose choices can be replayed."""
    config: Any = read_config(path)
    if config.model_type not in ROUTER_FAMILIES:
        raise ConfigError(
            f"{REPLAY_KEY}: {path!r} is a model of family {config.model_type}; allowed are mixtures of experts of "
            f"{', '.join(ROUTER_FAMILIES)}, and any model without it"
        )
    with torch.device("meta"):
        routers = routers_of(AutoModelForCausalLM.from_config(config))
    top_k = max((router.top_k for router in routers.values()), default=0)
    if top_k < 2:
        raise ConfigError(f"{REPLAY_KEY}: {path!r} takes {top_k} experts for a token; allowed are 2 and more")
    return RouterShape(tuple(routers), config.num_hidden_layers, top_k, next(iter(routers.values())).num_experts)


def check_model(path: str, key: str = MODEL_KEY) -> None:
    """Check that `path`, the value of config key `key`, is a causal LM that can be trained here, without reading its weights.
    Raises ConfigError as `check_files`, and where it is neither a text-only model nor one whose images are known, or has layers
    that cannot be packed."""
    config = check_files(path, key)
    decoder = config.get_text_config(decoder=True)
    if decoder is not config and config.model_type not in IMAGE_FAMILIES:
        raise ConfigError(
            f"{key}: {path!r} is a {config.model_type}, of several parts; allowed are text-only decoders, and of those with images "
            f"{', '.join(IMAGE_FAMILIES)}"
        )
    kinds = set(getattr(decoder, "layer_types", None) or ()) - PACKABLE_LAYERS
    if kinds:
        raise ConfigError(
            f"{key}: {path!r} has layers of kind {', '.join(sorted(kinds))}; allowed are {', '.join(sorted(PACKABLE_LAYERS))}"
        )
    require_unquantized(path, config, key)
    if unpackable := _unpackable(config):
        raise ConfigError(
            f"{key}: {path!r} is a {config.model_type} with {unpackable}, which attention over packed rows does not compute; "
            "allowed are models with causal attention, as of Qwen3, Llama, Mistral, Gemma 3, OLMo 2, GLM-4.5 or DeepSeek-V3"
        )


def require_unquantized(path: str, config: PretrainedConfig, key: str = MODEL_KEY) -> None:
    """Raises ConfigError where the weights in `path` are quantized."""
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{key}: {path!r} holds quantized weights; allowed are float32, bfloat16 and float16")


def _unpackable(config: PretrainedConfig) -> str | None:
    """What the model of `config` computes that `fsdp2/attention.py` does not; None where it computes all of it."""
    model_class: Any = _loader_of(config)._model_mapping.get(type(config), None)
    if model_class is None:
        return "no causal language model in transformers"
    if not model_class._supports_attention_backend:
        return "layers whose attention or state cannot be replaced"
    return None


def check_files(path: str, key: str) -> PretrainedConfig:
    """Check that `path` holds a complete model of any kind with its tokenizer. Returns its config. Raises ConfigError: no such
    folder, no config, no weights file or a truncated one, no tokenizer, or a tokenizer larger than the vocabulary."""
    config = _load(AutoConfig, path, "config", key)
    folder = Path(path)
    for what, patterns in FILES.items():
        if folder.is_dir() and not any(file for pattern in patterns for file in folder.glob(pattern)):
            raise ConfigError(
                f"{key}: folder {path!r} holds no {what} file ({', '.join(patterns)}); "
                f"write the {what} with save_pretrained"
            )
    for file in folder.glob("*.safetensors") if folder.is_dir() else ():
        try:
            with safe_open(file, framework="pt"):  # reads the header and compares it with the size of the file
                pass
        except SafetensorError as error:
            raise ConfigError(f"{key}: {file} is not a whole weights file: {error}") from error
    vocabulary = config.get_text_config(decoder=True).vocab_size
    size = len(_load(AutoTokenizer, path, "tokenizer", key))
    if size > vocabulary:
        raise ConfigError(
            f"{key}: {path!r} has a tokenizer of {size} tokens and a model of {vocabulary}; "
            "resize the model's embeddings or take the tokenizer it was made with"
        )
    return config


@functools.cache
def vocabulary_size(path: str) -> int:
    """Rows of the model's embedding: every token id is below it. Raises ConfigError where there is no model."""
    return _load(AutoConfig, path, "config").get_text_config(decoder=True).vocab_size


@functools.cache
def has_images(path: str) -> bool:
    """Whether the model sees images. Raises ConfigError where there is none."""
    return read_config(path).model_type in IMAGE_FAMILIES


def load_tokenizer(path: str) -> Tokenizer:
    return _load(AutoTokenizer, path, "tokenizer")


def make_model(path: str, attention: str) -> PreTrainedModel:
    """The causal LM of a folder or hub name: float32, on CPU, without dropout, with parameters that nothing was written to yet and
    that take no memory until then (`weight_reader.py`). Raises ConfigError where there is none, or it cannot attend by
    `attention`."""
    config = read_config(path)
    model = _make(_loader_of(config), path, "causal language model", config, attention)
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = _load(GenerationConfig, path, "generation config")
    return model


def _loader_of(config: PretrainedConfig) -> Any:
    return AutoModelForImageTextToText if config.model_type in IMAGE_FAMILIES else AutoModelForCausalLM


def make_critic(path: str, attention: str) -> PreTrainedModel:
    """As `make_model`, with a head of zeros that gives one number for each token, float32[1, N, 1] as `logits`."""
    config = _load(AutoConfig, path, "config", num_labels=1)
    model: Any = _make(AutoModelForTokenClassification, path, "language model that can score tokens", config, attention)
    for parameter in model.score.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def _make(loader: Any, path: str, what: str, config: PretrainedConfig, attention: str) -> PreTrainedModel:
    try:
        # Buffers are computed. A parameter is memory that the kernel has not given yet: it is written to one shard at a time.
        with no_init_weights():
            how = attention_of(config, attention)
            model = loader.from_config(config, dtype=torch.float32, attn_implementation=how)
    except LOAD_ERRORS as error:
        raise ConfigError(f"{MODEL_KEY}: {path!r} is no usable {what}: {first_line(error)}") from error
    model.tie_weights()
    return model.eval()


def _load(loader: Any, path: str, what: str, key: str = MODEL_KEY, **options: Any) -> Any:
    if is_on_modelscope(path):
        loaded = _load(loader, local_folder(path, key, weights=False), what, key, **options)
        loaded.name_or_path = repository_of(path)  # by which `agent.renderer=auto` finds the chat format
        return loaded
    folder = Path(path).is_dir()
    try:
        return loader.from_pretrained(path, local_files_only=True, **options)
    except LOAD_ERRORS as error:
        if folder:
            raise ConfigError(f"{key}: folder {path!r} holds no usable {what}: {first_line(error)}") from error
    require_model(path, key)  # one request with a deadline first: the loaders retry a failed one for half a minute
    try:
        return loader.from_pretrained(path, **options)
    # All errors: the hub client raises those of its HTTP library, and the library changes between releases.
    except Exception as error:
        raise ConfigError(f"{key}: the hub's {path!r} has no usable {what}: {first_line(error)}") from error
