"""The fake engine under a law: real requests, streams, pauses and pushes, around steps that sleep instead of computing.

Invariants:
- A completion has as many tokens as its request allows; the last is a stop token, where the request names one.
- Steps follow each other without a gap: what this process computes between two steps is a part of them, as long as it is shorter.
- Weights are received and loaded, and the canary is scored, by the real model.
- Prefixes of whole blocks are cached among requests of one salt, until keys and values are dropped.
"""

from __future__ import annotations

import asyncio
import random
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
from ..server.sampling import score
from .faults import FaultInjector, hit_in_thread, reported_logprob
from .law import BLOCK, EngineLaw

LOGPROB = -1.0  # nats, of every token


class EmulatedModelRunner:
    """See `ModelRunner` for the methods. Steps take the seconds of `law`; `faults` are checked before every token. `drained` is set
    while nothing runs and nothing may begin."""

    def __init__(self, model: PreTrainedModel, options: Options, faults: FaultInjector, law: EngineLaw) -> None:
        self.model = model
        self.drained = threading.Event()
        self._max_concurrent = options.max_concurrent
        self._seeds = random.Random(options.seed)
        self._faults = faults
        self._law = law
        self._running: dict[str, DecodingSequence] = {}
        self._waiting: list[Sequence] = []
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

    def add(self, sequence: Sequence) -> None:
        self._waiting.append(sequence)
        self._waiting.sort(key=lambda waiting: waiting.priority)

    def abort(self, id: str) -> None:
        self._running.pop(id, None)
        self._waiting = [sequence for sequence in self._waiting if sequence.id != id]
        with self._lock:
            self._note_drained()

    def step(self) -> list[SampledToken]:
        """One token of every running sequence."""
        self._admit()
        self._sleep()
        sampled = [self._advance(running) for running in self._running.values()]
        for token in sampled:
            if token.finish:
                self._cache(self._running.pop(token.id))
        with self._lock:
            self._note_drained()
        return sampled

    def recompute(self) -> None:
        self._cached.clear()
        self._uncached += sum(len(running.tokens) for running in self._running.values())

    def free_cache(self) -> None:
        self.recompute()

    def allocate_cache(self) -> None:
        """There is none to allocate."""

    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        return score(self.model, token_ids)

    def get_load(self) -> EngineLoad:
        return EngineLoad(len(self._running), len(self._waiting), 0.0)

    def _admit(self) -> None:
        """Begin the sequences that wait, while there is room and nothing is held."""
        with self._lock:
            while self._waiting and len(self._running) < self._max_concurrent and not self._held:
                running = self._begin(self._waiting.pop(0))
                self._running[running.sequence.id] = running

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
