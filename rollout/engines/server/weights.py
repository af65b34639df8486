"""A transformers model that is serving: how it is loaded, and how pushed tensors replace its parameters.

Invariants:
- Tensors have the names and shapes of the checkpoint; where transformers holds them in another layout (experts fused into one
  tensor), its own conversions for loading that checkpoint are applied.
- `check` compares every name and shape before a byte is received.
- Parameters are overwritten in place: tied ones stay tied, and references to the model stay valid.
- A push has every parameter, so that none needs a copy while a server sleeps.
- Weights in fp8 are dequantized as they are loaded: the model computes what their numbers are, in its own dtype, and takes the
  memory of that.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging as transformers_logging

from ....common import accelerator
from ....common.images import FAMILIES
from ....common.vision import attention_of
from ....errors import ConfigError, first_line
from ....weightsync.checkpoint_layout import CheckpointLayout, Part
from ....weightsync.fp8 import dequantized
from ....weightsync.plan import TransferPlan
from ....weightsync.weight_check import Shapes, check_weights


class ModelWeights:
    """The parameters of one model that was loaded by `from_pretrained`. Raises ConfigError for an unsupported layout."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._held: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        self._layout = CheckpointLayout(model)
        self._dtype = model.dtype
        self.shapes = checkpoint_shapes(model)  # of every tensor that a push may hold
        self.optional = frozenset(getattr(model, "all_tied_weights_keys", None) or {})  # tied: a push may lack these
        self._routes = {name: self._layout.route(name, shape) for name, shape in self.shapes.items()}
        for name, (target, _) in self._routes.items():
            if target not in self._held:
                raise ConfigError(f"model.path: no pushed {name!r} could reach the model; {target!r} is not in it")

    def check(self, plan: TransferPlan) -> None:
        """Raises WeightSyncError: a name is unknown, missing or has another shape."""
        check_weights(plan, self.shapes, optional=self.optional)

    @torch.no_grad()
    def free(self) -> None:
        """Free the memory of all parameters, until `allocate`. Their names and shapes stay."""
        for held in self._held.values():
            if isinstance(held, torch.nn.Parameter):
                held.data = held.new_empty(0)
        accelerator.empty_cache()  # other processes want the memory

    @torch.no_grad()
    def allocate(self) -> None:
        """Allocate what `free` freed. The numbers are any, until `load`."""
        for name, held in self._held.items():
            if isinstance(held, torch.nn.Parameter) and tuple(held.shape) != self._layout.held[name]:
                held.data = held.new_empty(self._layout.held[name])

    @torch.no_grad()
    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Overwrite the parameters with `tensors`, which passed `check`."""
        fused: dict[str, list[Part]] = defaultdict(list)
        for name, tensor in dequantized(tensors, self._dtype):
            target, pattern = self._routes[name]
            if pattern is None:
                self._held[target].copy_(tensor)
            else:
                fused[target].append((name, pattern, tensor))
        for target, parts in fused.items():
            for held, made in self._layout.convert(target, parts).items():
                self._held[held].copy_(made)


def checkpoint_shapes(model: PreTrainedModel) -> Shapes:
    """Names and shapes that `save_pretrained` would write, tied tensors under all their names."""
    held = {name: torch.empty_like(tensor, device="meta") for name, tensor in model.state_dict().items()}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, held).items()}


def load_model(path: str, dtype: str, attention: str | None = None) -> PreTrainedModel:
    """The model of a folder or hub name, for inference; its decoder attends by `attention`. Raises ConfigError where there is no
    such model."""
    transformers_logging.disable_progress_bar()
    try:
        config: Any = AutoConfig.from_pretrained(path)
        loader: Any = AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM
        options = {} if attention is None else {"attn_implementation": attention_of(config, attention)}
        model: PreTrainedModel = loader.from_pretrained(path, dtype=getattr(torch, dtype), **options)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise ConfigError(
            f"model.path: {path!r} is no causal language model for this server: {first_line(error)}"
        ) from error
    return model.eval()


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end a sequence by the model's own settings."""
    eos = model.generation_config.eos_token_id if model.generation_config else model.config.eos_token_id
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
