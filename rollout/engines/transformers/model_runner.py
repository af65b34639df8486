"""The model runner over a transformers model: any causal LM with supported attention, batched continuously.

Invariants:
- A sequence's tokens are kept here; its keys and values are a cache. Losing those (`recompute`, or because the cache is full)
  costs time and no token.
- A sequence samples from its own generator, seeded by its request or from the server's seed.
- At most `max_concurrent` sequences decode at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Items

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from ..base import EngineLoad
from ..server.contract import DecodingSequence, SampledToken, Sequence
from ..server.sampling import draw, score
from .expert_recorder import ExpertRecorder
from .images import SeenImages
from .paging import PriorityScheduler, SaltedCache, lay_out

BATCH_TOKENS = 1024  # of one forward pass: long prompts are computed in pieces, so that other sequences do not wait


class TransformersModelRunner:
    """See `ModelRunner` for the methods. `model` has the attention `attention.PAGED`; the longest sequence must fit into `blocks`
    KV blocks of `paging.PAGE` tokens; `seed` is for sequences without one; `images` for a model that sees some. Raises EngineError:
    the experts of this model's routers cannot be recorded."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        blocks: int,
        max_concurrent: int,
        seed: int,
        record_experts: bool = False,
        images: SeenImages | None = None,
    ) -> None:
        self.model = model
        self._device = model.device
        self._cache = SaltedCache(model.config.get_text_config(), blocks, model.device, model.dtype)
        self._experts = ExpertRecorder(model, self._cache) if record_experts else None
        self._images = images
        self._scheduler = PriorityScheduler(self._cache, max_concurrent)
        self._slices_hidden = bool(model._supports_logits_to_keep())  # type: ignore[operator]
        self._running: dict[str, DecodingSequence] = {}
        self._arrivals = itertools.count()
        self._seeds = random.Random(seed)

    def add(self, sequence: Sequence) -> None:
        if self._images is not None:
            self._cache.images[sequence.id] = self._images.add(sequence)
        self._running[sequence.id] = running = DecodingSequence(sequence, self._seeds)
        self._cache.salts[sequence.id] = sequence.salt
        self._scheduler.ranks[sequence.id] = (sequence.priority, next(self._arrivals))
        self._scheduler.add_waiting_request(_fresh(running))

    def abort(self, id: str) -> None:
        if id not in self._running:
            return
        self._scheduler.set_request_cancellation(id)
        self._scheduler.clear_cancelled_requests()
        self._forget(id)

    @torch.inference_mode()
    def step(self) -> list[SampledToken]:
        if not self.busy():
            return []
        requests, inputs = lay_out(self._cache, self._schedule(), self._device)
        if self._images is not None:
            read = [
                (r.state.request_id, r.state.position_offset - r.query_length, r.state.position_offset)
                for r in requests
            ]
            if (positions := self._images.load(read)) is not None:
                inputs["position_ids"] = positions
        keep = inputs["logits_to_keep"] if self._slices_hidden else inputs.pop("logits_to_keep")
        logits = self.model(**inputs).logits[0]
        logits = (logits if self._slices_hidden else logits[keep]).float()
        if self._experts is not None:
            self._experts.store(inputs["layouts"])
        new = [request for request in requests if request.has_new_token]
        sampled = self._sample(logits, new) if new else []
        for request in requests:
            self._cache.mark_complete_blocks(request.state, request.complete_blocks)
        for entry in sampled:
            if entry.finish is not None:
                self._scheduler.finish_request(entry.id)
                self._forget(entry.id)
        return sampled

    def busy(self) -> bool:
        return bool(self._running)

    def recompute(self) -> None:
        for id in list(self._scheduler.active_requests):
            self._requeue(id)
        self._scheduler.block_new_requests = False
        self._cache.reset()

    def free_cache(self) -> None:
        self.recompute()
        self._cache.free()

    def allocate_cache(self) -> None:
        self._cache.allocate()

    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        return score(self.model, token_ids)

    def get_load(self) -> EngineLoad:
        scheduler = self._scheduler
        return EngineLoad(len(scheduler.active_requests), len(scheduler.waiting_requests), self._cache.usage())

    def _schedule(self) -> list[FutureRequestState]:
        """The sequences of the next forward pass; when the cache is full, the last one to arrive is preempted."""
        while True:
            scheduled = self._scheduler.schedule_batch(BATCH_TOKENS, self._cache.max_tokens_read)[0]
            if scheduled:
                return scheduled
            if self._cache.evict_cached_blocks():
                continue
            active = self._scheduler.active_requests
            if len(active) < 2:
                raise RuntimeError(f"{len(self._running)} sequences and none fits into the KV cache")
            self._requeue(max(active, key=self._scheduler.ranks.__getitem__))
            # Until one has ended: else sequences would preempt each other in turns.
            self._scheduler.block_new_requests = True

    def _requeue(self, id: str) -> None:
        """Free a sequence's blocks; its tokens, sampled ones included, become a prompt."""
        self._scheduler.finish_request(id)
        self._scheduler.add_waiting_request(_fresh(self._running[id]))

    def _sample(self, logits: torch.Tensor, requests: Items[FutureRequestState]) -> list[SampledToken]:
        runs = [self._running[r.state.request_id] for r in requests]
        tokens, logprobs = draw(logits, [r.sequence.sampling for r in runs], [r.rng.random() for r in runs])
        sampled = []
        for request, run, token, logprob in zip(requests, runs, tokens, logprobs, strict=True):
            request.state.generated_tokens.append(token)
            request.state.tokens_to_process = [token]
            experts = None if self._experts is None else self._experts.unsent(run)
            sampled.append(SampledToken(run.sequence.id, token, logprob, run.add(token), experts))
        return sampled

    def _forget(self, id: str) -> None:
        del self._running[id], self._cache.salts[id], self._scheduler.ranks[id]
        if self._images is not None:
            del self._cache.images[id]
            self._images.forget(id)
        self._scheduler.block_new_requests = False


def _fresh(running: DecodingSequence) -> RequestState:
    """A request that starts with all tokens so far. `DecodingSequence.add` decides when it ends, not transformers."""
    return RequestState(running.sequence.id, running.tokens[:], max_new_tokens=None)
