"""What a server is told of a model whose linear layers it is to hold in fp8: the `quantization_config` of such a checkpoint.

    config.json ──> names and shapes of all weights, of a model without memory ──> which are in fp8, and which layers are not

Invariants:
- No weight is read: a server starts without weights, and the first push brings them.
- The names are those of a checkpoint and of a push, so that what the learner quantizes (`weightsync/fp8.py`) and what the server
  expects in fp8 are the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ...common.modelscope import local_folder
from ...configs.engine_checks import FP8
from ...errors import ConfigError
from ...weightsync import fp8
from ...weightsync.weight_check import Shapes
from .server.weights import checkpoint_shapes

OUTPUTS = {"q_a_proj": 1, "o_proj": 0, "down_proj": 0, "w2": 0, "kv_a_proj_with_mqa": 0}
"""Over how many GPUs the outputs of a layer are split where not over all; 0 is for layers that need no whole blocks of outputs."""
HEADS = (
    "k_proj",
    "v_proj",
)  # layers whose outputs are split into whole heads; with fewer of them than GPUs, some have the same
SPLIT_INPUTS = ("o_proj", "down_proj", "w2")  # layers whose inputs are split over GPUs


def quantization_config(path: str, ranks: int) -> dict[str, Any]:
    """That of the model of a folder or hub name, for kernels that multiply whole blocks, each layer on `ranks` GPUs. Raises
    ConfigError: its linear layers cannot be served in fp8."""
    shapes = weight_shapes(path)
    heads = getattr(_config_of(path).get_text_config(decoder=True), "num_key_value_heads", None)
    check_blocks(path, shapes, ranks, heads or ranks)
    other = [
        name.removesuffix(fp8.WEIGHT)
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(fp8.WEIGHT) and not fp8.is_quantized(name, shape)
    ]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": other,
    }


@functools.cache
def _config_of(path: str) -> Any:
    return AutoConfig.from_pretrained(local_folder(path, "model.path", weights=False))


@functools.cache
def weight_shapes(path: str) -> Shapes:
    """Names and shapes of all tensors of a checkpoint of the model in `path`. Raises ConfigError: it is no causal language model,
    or none of its weights is quantized."""
    try:
        with torch.device("meta"):
            shapes = checkpoint_shapes(AutoModelForCausalLM.from_config(_config_of(path)))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: {path!r} is no causal language model: {error}") from error
    if not any(fp8.is_quantized(name, shape) for name, shape in shapes.items()):
        known = ", ".join(sorted(fp8.LAYERS))
        raise ConfigError(f"{FP8}: no linear layer of {path!r} has a name that is quantized; these are {known}")
    return shapes


def check_blocks(path: str, shapes: Shapes, ranks: int, heads: int) -> None:
    """Raises ConfigError where a layer would be split within a block, over `ranks` GPUs or from the layers that a server computes
    together with it; or where experts are not matrices of their own. `heads` are those of keys and values."""
    for name, shape in shapes.items():
        if len(shape) == 3 and ".experts." in name:
            raise ConfigError(
                f"{FP8}: {path!r} holds its experts in one tensor, {name}, which is not quantized; allowed are "
                "models with a matrix for each expert, and rollout.engine.kind=transformers"
            )
        if not fp8.is_quantized(name, shape):
            continue
        layer = name.removesuffix(fp8.WEIGHT).rpartition(".")[2]
        shared = 1 if ".experts." in name else ranks  # a server may take other blocks for experts
        outputs = min(ranks, heads) if layer in HEADS else OUTPUTS.get(layer, shared)
        parts = {"outputs": outputs, "inputs": shared if layer in SPLIT_INPUTS else 1}
        for (what, over), size in zip(parts.items(), shape, strict=True):
            if over and size % (fp8.BLOCK * over):
                raise ConfigError(
                    f"{FP8}: {name} of {path!r} has {size} {what}, and vLLM multiplies whole blocks; allowed are "
                    f"multiples of {fp8.BLOCK * over}, and with rollout.engine.kind=transformers any"
                )
