"""The batch of a fake engine: which sequences run and which wait. How a token comes about is a subclass's."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch
from transformers import PreTrainedModel

from ..server.contract import DecodingSequence, SampledToken, Sequence
from ..server.launch import Options
from .faults import FaultInjector

R = TypeVar("R", bound=DecodingSequence)


class BatchRunner(ABC, Generic[R]):
    """`faults` are checked before every token, by subclasses."""

    def __init__(self, model: PreTrainedModel, options: Options, faults: FaultInjector) -> None:
        self.model = model
        self._max_concurrent = options.max_concurrent
        self._seeds = random.Random(options.seed)
        self._faults = faults
        self._running: dict[str, R] = {}
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
        self._admit()
        sampled = [self._advance(running) for running in self._running.values()]
        for token in sampled:
            if token.finish:
                self._end(self._running.pop(token.id))
        return sampled

    @abstractmethod
    def recompute(self) -> None: ...

    def free_cache(self) -> None:
        self.recompute()

    def allocate_cache(self) -> None:
        """Each sequence has a cache of its own, which grows with it."""

    @torch.inference_mode()
    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        ids = torch.tensor([token_ids], device=self.model.device)
        logprobs = self.model(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()

    def _admit(self) -> None:
        """Begin the sequences that wait, while there is room."""
        while self._waiting and len(self._running) < self._max_concurrent:
            running = self._begin(self._waiting.pop(0))
            self._running[running.sequence.id] = running

    @abstractmethod
    def _begin(self, sequence: Sequence) -> R: ...

    @abstractmethod
    def _advance(self, running: R) -> SampledToken:
        """Sample its next token."""

    def _end(self, running: R) -> None:
        """It has its last token."""
