"""The stepper over a transformers model: any causal LM that transformers can attend for, batched continuously.

Invariants:
- A sequence's tokens are kept here; its keys and values are a cache of them. Losing those (`recompute`, or because the cache is
  full) costs time and no token.
- A sequence draws from a generator of its own, seeded by its request or from the server's seed.
- At most `max_concurrent` sequences decode at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Items

import torch
from transformers import PreTrainedModel
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

from ...agents.base import FinishReason
from ..engine import Pressure
from .paging import PriorityScheduler, SaltedCache, lay_out
from .sampling import draw
from .stepper import Sampled, Sequence

BATCH_TOKENS = 1024
"""Tokens of one forward pass at most: a long prompt is computed in pieces, so that nobody else waits for all of it."""


class _Running:
    """A sequence, all its tokens so far, and its source of randomness."""

    def __init__(self, sequence: Sequence, rng: random.Random) -> None:
        self.sequence = sequence
        self.tokens = list(sequence.token_ids)
        self.rng = rng

    def add(self, token: int) -> FinishReason | None:
        """Append a sampled token; says why it was the last, if it was."""
        self.tokens.append(token)
        sampling = self.sequence.sampling
        if token in sampling.stop_token_ids:
            return "stop"
        made = len(self.tokens) - len(self.sequence.token_ids)
        return "length" if made >= sampling.max_tokens else None


class TransformersStepper:
    """See `Stepper`.

    Args:
        model: loaded with attention `attention.PAGED`; its device is where everything happens.
        blocks: KV blocks of `paging.PAGE` tokens; the longest sequence must fit.
        max_concurrent: sequences decoded at once.
        seed: of sequences that bring none.
    """

    def __init__(self, model: PreTrainedModel, *, blocks: int, max_concurrent: int, seed: int) -> None:
        self.model: torch.nn.Module = model.eval()
        self._device = model.device
        self._cache = SaltedCache(model.config.get_text_config(), blocks, model.device, model.dtype)
        self._scheduler = PriorityScheduler(self._cache, max_concurrent)
        self._slices_hidden = bool(model._supports_logits_to_keep())  # type: ignore[operator]
        self._running: dict[str, _Running] = {}
        self._arrivals = itertools.count()
        self._seeds = random.Random(seed)

    def add(self, sequence: Sequence) -> None:
        """See `Stepper.add`."""
        seed = sequence.sampling.seed
        rng = random.Random(self._seeds.getrandbits(64) if seed is None else seed)
        self._running[sequence.id] = running = _Running(sequence, rng)
        self._cache.salts[sequence.id] = sequence.salt
        self._scheduler.ranks[sequence.id] = (sequence.priority, next(self._arrivals))
        self._scheduler.add_waiting_request(_fresh(running))

    def abort(self, id: str) -> None:
        """See `Stepper.abort`."""
        if id not in self._running:
            return
        self._scheduler.set_request_cancellation(id)
        self._scheduler.clear_cancelled_requests()
        self._forget(id)

    @torch.inference_mode()
    def step(self) -> list[Sampled]:
        """See `Stepper.step`."""
        if not self.busy():
            return []
        batch = lay_out(self._cache, self._schedule(), self._device)
        inputs = dict(batch.inputs)
        keep = inputs["logits_to_keep"] if self._slices_hidden else inputs.pop("logits_to_keep")
        logits = self.model(**inputs).logits[0]
        logits = (logits if self._slices_hidden else logits[keep]).float()
        sampled = self._sample(logits, batch.sampled) if batch.sampled else []
        for request in batch.requests:
            self._cache.mark_complete_blocks(request.state, request.complete_blocks)
        for entry in sampled:
            if entry.finish is not None:
                self._scheduler.finish_request(entry.id)
                self._forget(entry.id)
        return sampled

    def busy(self) -> bool:
        """See `Stepper.busy`."""
        return bool(self._running)

    def recompute(self) -> None:
        """See `Stepper.recompute`."""
        for id in list(self._scheduler.active_requests):
            self._requeue(id)
        self._scheduler.block_new_requests = False
        self._cache.reset()

    @torch.inference_mode()
    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """See `Stepper.score`."""
        tokens = torch.tensor([token_ids], device=self._device)
        logits = self.model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
        chosen = logits.gather(1, tokens[0, 1:, None]).squeeze(1)
        return (chosen - logits.logsumexp(-1)).tolist()

    def pressure(self) -> Pressure:
        """See `Stepper.pressure`."""
        scheduler = self._scheduler
        return Pressure(len(scheduler.active_requests), len(scheduler.waiting_requests), self._cache.usage())

    def _schedule(self) -> list[FutureRequestState]:
        """The sequences of the next forward pass; when the cache is full, the last to come gives its blocks back."""
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
            self._scheduler.block_new_requests = (
                True  # until one has ended, or they would take each other's blocks in turns
            )

    def _requeue(self, id: str) -> None:
        """Free a sequence's blocks; its tokens, sampled ones included, become a prompt."""
        self._scheduler.finish_request(id)
        self._scheduler.add_waiting_request(_fresh(self._running[id]))

    def _sample(self, logits: torch.Tensor, requests: Items[FutureRequestState]) -> list[Sampled]:
        runs = [self._running[r.state.request_id] for r in requests]
        tokens, logprobs = draw(logits, [r.sequence.sampling for r in runs], [r.rng.random() for r in runs])
        sampled = []
        for request, run, token, logprob in zip(requests, runs, tokens, logprobs, strict=True):
            request.state.generated_tokens.append(token)
            request.state.tokens_to_process = [token]
            sampled.append(Sampled(run.sequence.id, token, logprob, run.add(token)))
        return sampled

    def _forget(self, id: str) -> None:
        del self._running[id], self._cache.salts[id], self._scheduler.ranks[id]
        self._scheduler.block_new_requests = False


def _fresh(running: _Running) -> RequestState:
    """A request that starts with all tokens there are. When it ends is decided here, not by transformers."""
    return RequestState(running.sequence.id, running.tokens[:], max_new_tokens=None)
