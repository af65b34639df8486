"""The contract of a kind of Slipstream's own server: a model runner that decodes a batch of sequences, one token per step.

Invariants:
- All methods of a runner are called by one thread, the server's engine thread; none blocks longer than one forward pass.
- A runner knows no sockets, versions or pauses: the engine thread decides when to call `step`.
- Weights may be replaced between two steps. Running sequences keep their keys and values, unless `recompute` is called.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from aiohttp.typedefs import Middleware
from numpy.typing import NDArray

from ....agents.base import FinishReason
from ....common.images import PromptImage
from ..base import EngineLoad, SamplingParams

if TYPE_CHECKING:
    import torch

    from .weights import ModelWeights


class RequestLimits(msgspec.Struct, frozen=True):
    """Limits of a request: ids below `vocab_size`, prompt and completion within `max_tokens`; `eos` ends a completion unless the
    request sets `ignore_eos`; `images`: prompts may have some."""

    vocab_size: int
    max_tokens: int
    eos: tuple[int, ...] = ()
    images: bool = False


class Sequence(msgspec.Struct, frozen=True):
    """A request: `token_ids` to continue. Only sequences of equal `salt` share cached prefixes; lower `priority` goes first."""

    id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: str = ""
    priority: int = 0
    images: tuple[PromptImage, ...] = ()


class SampledToken(msgspec.Struct, frozen=True):
    """The next token of sequence `id`, its log-prob in nats, the finish reason of the last one, and of a server that records them
    the experts [n, layers, top_k] of the tokens that were read since the sequence's token before."""

    id: str
    token: int
    logprob: float
    finish: FinishReason | None = None
    experts: NDArray[Any] | None = None


class DecodingSequence:
    """A sequence in the batch: all its tokens so far, and its random generator, seeded by its request or else from `seeds`."""

    def __init__(self, sequence: Sequence, seeds: random.Random) -> None:
        seed = sequence.sampling.seed
        self.sequence = sequence
        self.tokens = list(sequence.token_ids)
        self.experts_from = sequence.sampling.experts_from or 0  # first position whose experts were not sent yet
        self.rng = random.Random(seeds.getrandbits(64) if seed is None else seed)

    def add(self, token: int) -> FinishReason | None:
        """Append a sampled token; the finish reason if it was the last."""
        self.tokens.append(token)
        sampling = self.sequence.sampling
        if token in sampling.stop_token_ids:
            return "stop"
        sampled = len(self.tokens) - len(self.sequence.token_ids)
        return "length" if sampled >= sampling.max_tokens else None


class ModelRunner(Protocol):
    """Decodes sequences with `model`, whose parameters the server replaces in place."""

    @property
    def model(self) -> torch.nn.Module: ...

    def add(self, sequence: Sequence) -> None:
        """Take a sequence into the batch, or queue it until there is room. Raises BadRequest where an image of it cannot be read,
        or has other tokens."""

    def abort(self, id: str) -> None:
        """Remove a sequence, if it exists."""

    def step(self) -> list[SampledToken]:
        """Advance the batch; at most one token per sequence. Empty when idle, or while prompts are computed."""
        ...

    def busy(self) -> bool:
        """Whether a step would compute anything."""
        ...

    def recompute(self) -> None:
        """Drop every key and value, cached prefixes included. Running sequences recompute theirs and lose no token."""

    def free_cache(self) -> None:
        """As `recompute`, and free the memory of keys and values. No `step` until `allocate_cache`."""

    def allocate_cache(self) -> None:
        """Allocate the memory that `free_cache` freed."""

    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """Log-probs in nats of `token_ids[1:]` at temperature 1, from a separate forward pass."""
        ...

    def get_load(self) -> EngineLoad: ...


@dataclass(frozen=True)
class EngineServer:
    """The parts of one server; `middlewares` handle every request before the app."""

    runner: ModelRunner
    weights: ModelWeights
    limits: RequestLimits
    middlewares: tuple[Middleware, ...] = ()
