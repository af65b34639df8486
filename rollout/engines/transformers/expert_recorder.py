"""Records which experts the routers of a model choose for each token that it reads, beside the keys and values of the token.

Invariants:
- A token whose keys and values are shared, or were read for another sequence, has the experts that were chosen when they were
  computed: both lie at the same rows of the cache.
- The experts of a token are sent once, with the token that is sampled next; computing a sequence anew sends none again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from ....common.routed_experts import RouterShape, routers_of
from ....errors import EngineError
from ..server.contract import DecodingSequence
from .attention import Layout
from .paging import PAGE

KIND = "full_attention"  # layers of this kind keep the keys of all tokens


class ExpertRecorder:
    """Of `model`, whose keys and values are in `cache`. Raises EngineError: its routers are unknown, or all its layers forget."""

    def __init__(self, model: PreTrainedModel, cache: PagedAttentionCache) -> None:
        routers = routers_of(model)
        if not routers:
            raise EngineError(f"the routers of a {model.config.model_type} are unknown, so that it records no experts")
        if KIND not in cache.cache_allocators:
            raise EngineError(
                "experts are recorded where a layer keeps the keys of all tokens, and here all are sliding"
            )
        first = next(iter(routers.values()))
        depth = model.config.get_text_config().num_hidden_layers
        shape = RouterShape(tuple(routers), depth, first.top_k, first.num_experts)
        self._layers = list(shape.layers)
        self._chosen: dict[int, torch.Tensor] = {}
        self._allocator = cache.cache_allocators[KIND]
        # A row of the cache is a token's keys, or its values, in one layer; a block holds those of `PAGE` tokens.
        self._stride = self._allocator.block_physical_stride
        blocks = 2 * len(self._allocator.cache_tensor) // self._stride
        self._held = np.zeros((blocks * PAGE, depth, shape.top_k), dtype=shape.dtype)
        for layer, router in routers.items():
            router.register_forward_hook(self._hook(layer))

    def store(self, layouts: Mapping[str, Layout]) -> None:
        """Keep what was chosen in the last forward pass, for the tokens of its layouts."""
        chosen = torch.stack([self._chosen[layer] for layer in self._layers], 1)
        places = self._places(layouts[KIND].write.cpu().numpy())
        self._held[places[:, None], self._layers] = chosen.cpu().numpy()

    def unsent(self, running: DecodingSequence) -> NDArray[Any]:
        """[n, layers, top_k]: of the tokens that `running` has read and that were not sent yet; before its next token is added."""
        start, end = running.experts_from, len(running.tokens)
        running.experts_from = end
        rows = self._allocator.get_write_indices(running.sequence.id, start, end - start)
        return self._held[self._places(np.array(rows, dtype=np.int64))]

    def _places(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where the experts of tokens are held whose first keys are at `rows` of the cache."""
        return rows // self._stride * PAGE + rows % self._stride

    def _hook(self, layer: int) -> Any:
        def keep(_: object, __: object, output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
            self._chosen[layer] = output[2]

        return keep
