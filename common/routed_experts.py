"""Which experts the MoE routers of a model chose for each token: recorded where an engine samples the token, replayed where the
learner trains on it (router replay, Ma et al. 2025, arXiv:2510.11370).

    server ──[n, layers, top_k] by position──> completion ──> trajectory, [T, layers, top_k] ──> the learner's routers

Invariants:
- The choices at position p are those of the forward pass that read token p. Where the policy sampled token p + 1, it is the pass
  that token p + 1 was sampled from, and so of the version that sampled it.
- A token without a record has zeros: its experts are equal, which no router chooses. A router here chooses two experts at least.
- The last token of a completion was read by no pass yet: the next request that begins with it has its choices.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

ROUTER_CLASSES = (
    *("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter"),
    *("DeepseekV3TopkRouter", "Glm4MoeTopkRouter"),
)
"""Classes of transformers' MoE routers whose choices are recorded and replayed. Each gives (logits [n, experts],
weights [n, top_k], experts int64[n, top_k])."""
# Of models with these classes.
ROUTER_FAMILIES = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "glm4_moe")
NARROW = 256  # experts that one byte has numbers for
_LAYER = re.compile(r"\blayers\.(\d+)\.")


class RouterShape(msgspec.Struct, frozen=True):
    """The routers of a model of `depth` layers: those of `layers` have one, which chooses `top_k` of `experts`."""

    layers: tuple[int, ...]
    depth: int
    top_k: int
    experts: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the numbers of experts, as vLLM has them."""
        return np.dtype(np.uint8 if self.experts <= NARROW else np.uint16)

    @property
    def layout(self) -> ExpertLayout:
        return ExpertLayout(len(self.layers), self.top_k, self.dtype.itemsize)

    def fits(self, ids: NDArray[Any]) -> bool:
        """Whether these are choices of such routers, or zeros."""
        width = ids.shape[1:] == (len(self.layers), self.top_k) and ids.dtype == self.dtype
        return width and (not ids.size or int(ids.max()) < self.experts)


class ExpertLayout(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the choices of one token are stored: a number of `item_bytes` for each of `top_k` experts of each of `layers` routers."""

    layers: Annotated[int, Meta(ge=1, le=1 << 12)]
    top_k: Annotated[int, Meta(ge=2, le=1 << 8)]
    item_bytes: Annotated[int, Meta(ge=1, le=2)]

    @property
    def token_bytes(self) -> int:
        return self.layers * self.top_k * self.item_bytes

    def view(self, data: NDArray[np.uint8]) -> NDArray[Any]:
        """uint8 or uint16[T, layers, top_k] of T x `token_bytes` bytes, which are not copied where they are aligned."""
        dtype = np.dtype(np.uint8 if self.item_bytes == 1 else np.uint16)
        return np.frombuffer(data, dtype=dtype).reshape(-1, self.layers, self.top_k)


def layout_of(ids: NDArray[Any]) -> ExpertLayout:
    """Of choices [T, layers, top_k]."""
    return ExpertLayout(ids.shape[1], ids.shape[2], ids.dtype.itemsize)


class RoutedExperts(msgspec.Struct, frozen=True):
    """The choices for the tokens at positions `start` to `end` of a conversation: uint8 or uint16[end - start, layers, top_k]."""

    start: int
    ids: NDArray[Any]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)

    def until(self, end: int) -> RoutedExperts:
        """Those before position `end`."""
        return self if self.end <= end else RoutedExperts(self.start, self.ids[: max(0, end - self.start)])

    def then(self, later: RoutedExperts | None) -> RoutedExperts:
        """With those of `later` at positions that have none here: where both have some, this one's stay."""
        if later is None or later.end <= self.end:
            return self
        gap = np.zeros((max(0, later.start - self.end), *self.ids.shape[1:]), dtype=self.ids.dtype)
        return RoutedExperts(self.start, np.concatenate([self.ids, gap, later.ids[max(0, self.end - later.start) :]]))

    def whole(self, tokens: int) -> NDArray[Any]:
        """[tokens, layers, top_k], zeros where there is no record."""
        ids = np.zeros((tokens, *self.ids.shape[1:]), dtype=self.ids.dtype)
        ids[self.start : self.end] = self.ids[: max(0, tokens - self.start)]
        return ids


def merged(first: RoutedExperts | None, later: RoutedExperts | None) -> RoutedExperts | None:
    return later if first is None else first.then(later)


def routers_of(model: Any) -> dict[int, Any]:
    """The MoE routers of a transformers model by the number of their layer, in order; none of classes outside `ROUTER_CLASSES`."""
    found = {}
    for name, module in model.named_modules():
        if type(module).__name__ in ROUTER_CLASSES and (layer := _LAYER.search(f"{name}.")):
            found[int(layer[1])] = module
    return dict(sorted(found.items()))
