"""The `fake` engine: a plain transformers forward with one cache per sequence, slow and exact, with scripted faults. Under a law
(`law.py`) it does not compute: `emulated.py`.

Invariants:
- No batching, prefix cache or paging: a reference for what other engines compute.
- A sequence's cache holds every token but the last; after `recompute` it holds none, and the next step fills it.
- Faults act before the app and between tokens, never in the computation.
"""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedModel

from ..base import EngineLoad
from ..server.contract import DecodingSequence, EngineServer, RequestLimits, SampledToken, Sequence
from ..server.launch import Options
from ..server.sampling import draw
from ..server.weights import ModelWeights, eos_token_ids, load_model
from .batch import BatchRunner
from .emulated import EmulatedModelRunner, draining
from .faults import FaultInjector, hit_in_thread, middleware, read_script, reported_logprob
from .law import read_law


class _Running(DecodingSequence):
    cache: DynamicCache


class FakeModelRunner(BatchRunner[_Running]):
    """Decodes one sequence after the other."""

    def __init__(self, model: PreTrainedModel, options: Options, faults: FaultInjector) -> None:
        super().__init__(model, options, faults)
        self._capacity = options.max_concurrent * options.max_tokens

    def recompute(self) -> None:
        for running in self._running.values():
            running.cache = self._empty()

    def get_load(self) -> EngineLoad:
        held = sum(running.cache.get_seq_length() for running in self._running.values())
        return EngineLoad(len(self._running), len(self._waiting), min(1.0, held / self._capacity))

    def _begin(self, sequence: Sequence) -> _Running:
        running = _Running(sequence, self._seeds)
        running.cache = self._empty()
        return running

    @torch.inference_mode()
    def _advance(self, running: _Running) -> SampledToken:
        lie = hit_in_thread(self._faults, "token")
        missing = running.tokens[running.cache.get_seq_length() :]
        ids = torch.tensor([missing], device=self.model.device)
        output = self.model(ids, past_key_values=running.cache, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        (token,), (logprob,) = draw(logits, [running.sequence.sampling], [running.rng.random()])
        return SampledToken(running.sequence.id, token, reported_logprob(logprob, lie), running.add(token))

    def _empty(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)


def serve(options: Options) -> EngineServer:
    """The parts of a fake server. Raises ConfigError: no such model, an invalid fault or law; EngineError: a scripted fault."""
    faults = FaultInjector(read_script(), options.replica)
    hit_in_thread(faults, "start")
    model = load_model(options.model, options.dtype)
    limits = RequestLimits(model.config.vocab_size, options.max_tokens, eos_token_ids(model))
    weights, law = ModelWeights(model), read_law()
    if law is None:
        return EngineServer(FakeModelRunner(model, options, faults), weights, limits, (middleware(faults),))
    emulated = EmulatedModelRunner(model, options, faults, law)
    drains = (draining(emulated),) if law.drains else ()
    return EngineServer(emulated, weights, limits, (middleware(faults), *drains))
