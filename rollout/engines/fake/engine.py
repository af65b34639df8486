"""The `fake` engine: the kind `transformers` with scripted faults. Under a law (`law.py`) it does not compute: `emulated.py`.

Invariants:
- Faults act before the app and when tokens are handed out, never in the computation.
- The prompt by which a server checks itself before it listens meets no fault.
"""

from __future__ import annotations

import dataclasses

import msgspec

from ..server.contract import EngineServer, RequestLimits, SampledToken
from ..server.launch import Options
from ..server.weights import ModelWeights, eos_token_ids, load_model
from ..transformers import engine
from ..transformers.model_runner import TransformersModelRunner
from .emulated import EmulatedModelRunner, draining
from .faults import FaultInjector, hit_in_thread, middleware, read_script, reported_logprob
from .law import EngineLaw, read_law


class FaultyModelRunner(TransformersModelRunner):
    """Checks `faults` before every token that it hands out; without any until they are set."""

    faults: FaultInjector | None = None

    def step(self) -> list[SampledToken]:
        sampled, faults = super().step(), self.faults
        return sampled if faults is None else [_reported(token, faults) for token in sampled]


def _reported(token: SampledToken, faults: FaultInjector) -> SampledToken:
    lie = hit_in_thread(faults, "token")
    return msgspec.structs.replace(token, logprob=reported_logprob(token.logprob, lie)) if lie else token


def serve(options: Options) -> EngineServer:
    """The parts of a fake server. Raises ConfigError: no such model, an invalid fault or law; EngineError: a scripted fault."""
    faults = FaultInjector(read_script(), options.replica)
    hit_in_thread(faults, "start")
    if (law := read_law()) is not None:
        return _emulated(options, faults, law)
    server = engine.serve(options, FaultyModelRunner)
    assert isinstance(server.runner, FaultyModelRunner)
    server.runner.faults = faults
    return dataclasses.replace(server, middlewares=(middleware(faults),))


def _emulated(options: Options, faults: FaultInjector, law: EngineLaw) -> EngineServer:
    model = load_model(options.model, options.dtype)
    limits = RequestLimits(model.config.vocab_size, options.max_tokens, eos_token_ids(model))
    runner = EmulatedModelRunner(model, options, faults, law)
    drains = (draining(runner),) if law.drains else ()
    return EngineServer(runner, ModelWeights(model), limits, (middleware(faults), *drains))
