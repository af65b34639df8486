"""How the tensors of a checkpoint and the parameters of a transformers model correspond: by name, or by transformers' own
conversions for loading where it holds several of them as one (the experts of a mixture), or one of them as several."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

Shape = tuple[int, ...]
Part = tuple[
    str, str, torch.Tensor
]  # the name of a tensor of a checkpoint, the pattern of `CheckpointLayout.route`, the tensor


class CheckpointLayout:
    """That of `model`, of which it keeps names and shapes.

    Attributes:
        held: the shapes of parameters and buffers that are saved, by name; tied ones under all their names.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model_config, self._prefix = model.config, model.base_model_prefix
        self.held: dict[str, Shape] = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        conversions = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model)
        self._renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        self._converters = [c for c in conversions if isinstance(c, WeightConverter)]
        self._by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}

    def route(self, name: str, shape: Shape) -> tuple[str, str | None]:
        """The parameter that the tensor `name` is for, and the pattern by which it is converted; None where it is that parameter.
        The parameter is not in `held` where the model has no use for the tensor."""
        if self.held.get(name) == shape:
            return name, None
        return rename_source_key(name, self._renamings, self._converters, self._prefix, self.held)

    def convert(self, target: str, parts: Sequence[Part]) -> dict[str, torch.Tensor]:
        """The parameters that `parts` make, which all have the route `target`."""
        converter = deepcopy(self._by_pattern[parts[0][1]])
        for name, pattern, tensor in sorted(parts, key=lambda part: dot_natural_key(part[0])):
            converter.add_tensor(target, name, pattern, tensor)  # type: ignore[arg-type]
        made: dict[str, Any] = converter.convert(target, model=None, config=self._model_config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}

    def stacks(self, pattern: str) -> bool:
        """Whether the tensors of `pattern` become rows of one parameter, in their natural order: any of them can be converted
        without the others."""
        first: ConversionOps = self._by_pattern[pattern].operations[0]
        return isinstance(first, MergeModulelist) and first.dim == 0
