"""The `fake` engine: a plain transformers forward with one cache per sequence, slow and exact, with scripted faults.

Invariants:
- No batching, prefix cache or paging: a reference for what other engines compute.
- A sequence's cache holds every token but the last; after `recompute` it holds none, and the next step fills it.
- Faults act before the app and between tokens, never in the computation.
"""

from __future__ import annotations

import random

import torch
from transformers import DynamicCache, PreTrainedModel

from ..base import EngineLoad
from ..server.contract import DecodingSequence, EngineServer, RequestLimits, SampledToken, Sequence
from ..server.launch import Options
from ..server.sampling import draw
from ..server.weights import ModelWeights, eos_token_ids, load_model
from .faults import FaultInjector, hit_in_thread, middleware, read_script


class _Running(DecodingSequence):
    cache: DynamicCache


class FakeModelRunner:
    """Decodes one sequence after the other; `faults` are checked before every token."""

    def __init__(self, model: PreTrainedModel, options: Options, faults: FaultInjector) -> None:
        self.model = model
        self._max_concurrent = options.max_concurrent
        self._capacity = options.max_concurrent * options.max_tokens
        self._seeds = random.Random(options.seed)
        self._faults = faults
        self._running: dict[str, _Running] = {}
        self._waiting: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda waiting: waiting.priority)

    def abort(self, id: str) -> None:
        self._running.pop(id, None)
        self._waiting = [sequence for sequence in self._waiting if sequence.id != id]

    def busy(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> list[SampledToken]:
        """One token of every running sequence."""
        while self._waiting and len(self._running) < self._max_concurrent:
            running = _Running(self._waiting.pop(0), self._seeds)
            running.cache = self._empty()
            self._running[running.sequence.id] = running
        sampled = [self._advance(running) for running in self._running.values()]
        for token in sampled:
            if token.finish:
                del self._running[token.id]
        return sampled

    def recompute(self) -> None:
        for running in self._running.values():
            running.cache = self._empty()

    @torch.inference_mode()
    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        ids = torch.tensor([token_ids], device=self.model.device)
        logprobs = self.model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()

    def get_load(self) -> EngineLoad:
        held = sum(running.cache.get_seq_length() for running in self._running.values())
        return EngineLoad(len(self._running), len(self._waiting), min(1.0, held / self._capacity))

    @torch.inference_mode()
    def _advance(self, running: _Running) -> SampledToken:
        lies = hit_in_thread(self._faults, "token")
        missing = running.tokens[running.cache.get_seq_length() :]
        ids = torch.tensor([missing], device=self.model.device)
        output = self.model(ids, past_key_values=running.cache, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        (token,), (logprob,) = draw(logits, [running.sequence.sampling], [running.rng.random()])
        return SampledToken(running.sequence.id, token, float("nan") if lies else logprob, running.add(token))

    def _empty(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)


def serve(options: Options) -> EngineServer:
    """The parts of a fake server. Raises ConfigError: no such model, or an invalid fault; EngineError: a scripted one."""
    faults = FaultInjector(read_script(), options.replica)
    hit_in_thread(faults, "start")
    model = load_model(options.model, options.dtype)
    limits = RequestLimits(model.config.vocab_size, options.max_tokens, eos_token_ids(model))
    return EngineServer(FakeModelRunner(model, options, faults), ModelWeights(model), limits, (middleware(faults),))
