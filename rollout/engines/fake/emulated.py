"""The fake engine under a law: real requests, streams, pauses and pushes, around steps that sleep instead of computing.

Invariants:
- A completion has as many tokens as its request allows; the last is a stop token, where the request names one.
- Steps follow each other without a gap: what this process computes between two steps is a part of them, as long as it is shorter.
- Weights are received and loaded, and the canary is scored, by the real model.
- Prefixes of whole blocks are cached among requests of one salt, until keys and values are dropped.
"""

from __future__ import annotations

import asyncio
import threading
import time
from array import array
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware
from transformers import PreTrainedModel

from ..base import EngineLoad
from ..server.contract import DecodingSequence, SampledToken, Sequence
from ..server.launch import Options
from ..server.protocol import CACHE
from .batch import BatchRunner
from .faults import FaultInjector, hit_in_thread, reported_logprob
from .law import BLOCK, EngineLaw

LOGPROB = -1.0  # nats, of every token


class EmulatedModelRunner(BatchRunner[DecodingSequence]):
    """Steps that take the seconds of `law`. `drained` is set while nothing runs and nothing may begin."""

    def __init__(self, model: PreTrainedModel, options: Options, faults: FaultInjector, law: EngineLaw) -> None:
        super().__init__(model, options, faults)
        self.drained = threading.Event()
        self._law = law
        self._ended = 0.0  # when the last step did, `time.monotonic`
        self._uncached = 0  # tokens that are prefilled before the next token is decoded
        self._cached: set[tuple[str, int]] = set()  # salts and hashes of prefixes
        self._held = False
        self._lock = threading.Lock()  # over `_held` and what it decides: `hold` is called in another thread

    def hold(self) -> None:
        """Begin no sequence from now on. From any thread."""
        with self._lock:
            self._held = True
            self._note_drained()

    def release(self) -> None:
        """Begin sequences again. From any thread; a command to the engine thread must follow, which wakes it."""
        with self._lock:
            self._held = False
            self.drained.clear()

    def busy(self) -> bool:
        return bool(self._running or (self._waiting and not self._held))

    def abort(self, id: str) -> None:
        super().abort(id)
        with self._lock:
            self._note_drained()

    def step(self) -> list[SampledToken]:
        sampled = super().step()
        with self._lock:
            self._note_drained()
        return sampled

    def recompute(self) -> None:
        self._cached.clear()
        self._uncached += sum(len(running.tokens) for running in self._running.values())

    def get_load(self) -> EngineLoad:
        return EngineLoad(len(self._running), len(self._waiting), 0.0)

    def _admit(self) -> None:
        with self._lock:
            if not self._held:
                super()._admit()
        self._sleep()

    def _sleep(self) -> None:
        """Until the end of this step."""
        law, now = self._law, time.monotonic()
        began = self._ended if now - self._ended < law.step_s else now
        took = law.step_s + law.sequence_s * len(self._running) + law.prefill_s * self._uncached
        self._uncached = 0
        self._ended = max(now, began + took)
        time.sleep(self._ended - now)

    def _begin(self, sequence: Sequence) -> DecodingSequence:
        running = DecodingSequence(sequence, self._seeds)
        if self._law.prefill_s:
            hits = [(sequence.salt, prefix) in self._cached for prefix in _prefixes(running.tokens)]
            cached = BLOCK * (hits.index(False) if False in hits else len(hits))
            self._uncached += len(running.tokens) - min(cached, len(running.tokens) - 1)
            self._cache(running)
        return running

    def _advance(self, running: DecodingSequence) -> SampledToken:
        lie = hit_in_thread(self._faults, "token")
        sampling, stops = running.sequence.sampling, running.sequence.sampling.stop_token_ids
        last = len(running.tokens) + 1 - len(running.sequence.token_ids) == sampling.max_tokens
        token = stops[0] if last and stops else next(id for id in range(len(stops) + 1) if id not in stops)
        return SampledToken(running.sequence.id, token, reported_logprob(LOGPROB, lie), running.add(token))

    def _end(self, running: DecodingSequence) -> None:
        self._cache(running)

    def _cache(self, running: DecodingSequence) -> None:
        if self._law.prefill_s:
            self._cached |= {(running.sequence.salt, prefix) for prefix in _prefixes(running.tokens)}

    def _note_drained(self) -> None:
        if self._held and not self._running:
            self.drained.set()


def _prefixes(tokens: list[int]) -> list[int]:
    """A hash of each prefix of whole blocks."""
    ids, size = array("q", tokens).tobytes(), 8 * BLOCK
    return [hash(ids[:end]) for end in range(size, len(ids) + 1, size)]


def draining(runner: EmulatedModelRunner) -> Middleware:
    """A pause begins when the running sequences have ended."""

    @web.middleware
    async def drain(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path in ("/pause", "/sleep"):
            runner.hold()
            await asyncio.to_thread(runner.drained.wait)
        elif request.path == "/resume" or (request.path == "/wake_up" and CACHE in request.query.getall("tags", ())):
            runner.release()
        return await handler(request)

    return drain
