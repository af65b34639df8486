"""The `fake` engine: a plain transformers forward with one cache per sequence, slow and exact, and faults by script.

Invariants:
- Nothing clever: no batching, no prefix cache, no paging. What another engine computes can be compared with this one.
- A sequence's cache holds every token but the last; after `recompute` it holds none, and the next step fills it.
- Faults are in front of the app and between tokens, never in what is computed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ...agents.base import FinishReason
from ...errors import ConfigError
from ..engine import Pressure
from .faults import Faults, at_start, at_token, middleware
from .options import Options
from .protocol import Limits
from .sampling import draw
from .served import Served
from .stepper import Sampled, Sequence
from .weights import ModelWeights


@dataclass
class _Running:
    """One sequence, all its tokens so far, and the keys and values of the first of them."""

    sequence: Sequence
    tokens: list[int]
    dice: random.Random
    cache: DynamicCache
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.sequence.sampling.max_tokens


class FakeStepper:
    """Decodes one sequence after the other.

    Args:
        model: in evaluation mode.
        max_concurrent: sequences that decode at once; the others wait.
        max_tokens: of a sequence; the room for all of them is what `kv_usage` is a share of.
        seed: of requests that bring none.
        faults: asked before every token.
    """

    def __init__(
        self, model: PreTrainedModel, *, max_concurrent: int, max_tokens: int, seed: int, faults: Faults
    ) -> None:
        self.model: torch.nn.Module = model
        self._language_model = model
        self._max_concurrent = max_concurrent
        self._capacity = max_concurrent * max_tokens
        self._seeds = random.Random(seed)
        self._faults = faults
        self._running: dict[str, _Running] = {}
        self._waiting: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """See `Stepper.add`."""
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda waiting: waiting.priority)

    def abort(self, id: str) -> None:
        """See `Stepper.abort`."""
        self._running.pop(id, None)
        self._waiting = [sequence for sequence in self._waiting if sequence.id != id]

    def busy(self) -> bool:
        """See `Stepper.busy`."""
        return bool(self._running or self._waiting)

    def step(self) -> list[Sampled]:
        """One token of every running sequence."""
        while self._waiting and len(self._running) < self._max_concurrent:
            sequence = self._waiting.pop(0)
            seed = sequence.sampling.seed
            dice = random.Random(self._seeds.getrandbits(64) if seed is None else seed)
            self._running[sequence.id] = _Running(sequence, list(sequence.token_ids), dice, self._empty())
        sampled = [self._advance(running) for running in self._running.values()]
        for token in sampled:
            if token.finish:
                del self._running[token.id]
        return sampled

    def recompute(self) -> None:
        """See `Stepper.recompute`."""
        for running in self._running.values():
            running.cache = self._empty()

    @torch.inference_mode()
    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """See `Stepper.score`."""
        ids = torch.tensor([token_ids], device=self._language_model.device)
        logprobs = self._language_model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()

    def pressure(self) -> Pressure:
        """See `Stepper.pressure`."""
        held = sum(running.cache.get_seq_length() for running in self._running.values())
        return Pressure(len(self._running), len(self._waiting), min(1.0, held / self._capacity))

    @torch.inference_mode()
    def _advance(self, running: _Running) -> Sampled:
        lies = at_token(self._faults)
        missing = running.tokens[running.cache.get_seq_length() :]
        ids = torch.tensor([missing], device=self._language_model.device)
        logits = (
            self._language_model(ids, past_key_values=running.cache, use_cache=True, logits_to_keep=1)
            .logits[:, -1]
            .float()
        )
        sampling = running.sequence.sampling
        (token,), (logprob,) = draw(logits, [sampling], [running.dice.random()])
        running.tokens.append(token)
        running.left -= 1
        finish: FinishReason | None = "length" if running.left == 0 else None
        if token in sampling.stop_token_ids:
            finish = "stop"
        return Sampled(running.sequence.id, token, float("nan") if lies else logprob, finish)

    def _empty(self) -> DynamicCache:
        return DynamicCache(config=self._language_model.config)


def serve(options: Options) -> Served:
    """The parts of a fake server. Raises ConfigError: no such model, or a fault that means nothing; EngineError: by script."""
    faults = Faults(options.faults, options.replica)
    at_start(faults)
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model.path: cannot load {options.model!r}: {error}") from error
    stepper = FakeStepper(
        model,
        max_concurrent=options.max_concurrent,
        max_tokens=options.max_tokens,
        seed=options.seed,
        faults=faults,
    )
    limits = Limits(model.config.vocab_size, options.max_tokens, tuple(_ends(model.generation_config.eos_token_id)))
    return Served(stepper, ModelWeights(model), limits, (middleware(faults),))


def _ends(eos: int | Iterable[int] | None) -> Iterable[int]:
    return () if eos is None else (eos,) if isinstance(eos, int) else eos
