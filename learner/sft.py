"""Supervised warm-up: the same backend, a loss that is minus the log-likelihood of the marked tokens.

Invariants:
- Every rank calls `run_sft` with the same sequences and seed, and takes its part of each step.
- An epoch shows each sequence once; steps hold about `tokens_per_step` tokens, packed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ..configs.schema import Sft
from ..errors import ConfigError
from .backend import Backend, LossOutput, PackedRow
from .batch import TrainSequence, rank_rows, supervised
from .schedule import warm_up_cosine

WARMUP_SHARE = 0.05
"""Share of the steps over which the learning rate rises; AdamW's second moment needs a few dozen steps to mean anything."""

FINAL_SHARE = 0.1
"""Share of the steps, at the end, over which the reported loss is averaged."""


class SftProgress(msgspec.Struct, frozen=True):
    """After one optimizer step: `step` of `steps`, mean loss in nats per trained token, tokens (context included) per second."""

    step: int
    steps: int
    loss: float
    lr: float
    tokens_per_s: float


def negative_log_likelihood(logprobs: torch.Tensor, entropy: torch.Tensor, row: PackedRow) -> LossOutput:
    """A `PolicyLoss`: - sum of log p over trained tokens."""
    return LossOutput(loss_sum=-logprobs[row.trained].sum(), sums={"entropy": entropy[row.trained].detach().sum()})


def run_sft(
    backend: Backend,
    sequences: Sequence[tuple[Sequence[int], Sequence[bool] | NDArray[np.bool_]]],
    config: Sft,
    *,
    tokens_per_microbatch: int,
    seed: int,
    report: Callable[[SftProgress], None],
) -> float:
    """Train on (token ids, loss mask) pairs for `config.epochs`.

    Args:
        tokens_per_microbatch: tokens packed into one forward pass.
        report: called after every step, on every rank.

    Returns:
        Mean loss over the last tenth of the steps, nats per trained token.

    Raises:
        ConfigError: no sequence has a token to train on.
    """
    examples = [supervised(token_ids, mask) for token_ids, mask in sequences]
    examples = [example for example in examples if example.trained.any()]
    if not examples:
        raise ConfigError(f"sft.demonstrations: none of {len(sequences)} demonstrations has a token to train on")
    generator = np.random.default_rng(seed)
    plan = [step for _ in range(config.epochs) for step in _epoch(examples, config.tokens_per_step, generator)]
    warmup = max(1, round(WARMUP_SHARE * len(plan)))
    losses: list[float] = []
    for index, batch in enumerate(plan):
        began = time.perf_counter()
        lr = warm_up_cosine(config.lr, index, warmup, len(plan))
        rows = rank_rows(batch, backend.data_rank, backend.data_size, tokens_per_microbatch)
        result = backend.step(rows, negative_log_likelihood, lr)
        losses.append(result.loss)
        tokens = sum(len(example.token_ids) for example in batch)
        speed = tokens / (time.perf_counter() - began)
        report(SftProgress(step=index + 1, steps=len(plan), loss=result.loss, lr=lr, tokens_per_s=speed))
    last = losses[-max(1, round(FINAL_SHARE * len(losses))) :]
    return sum(last) / len(last)


def _epoch(
    examples: Sequence[TrainSequence], tokens_per_step: int, generator: np.random.Generator
) -> list[list[TrainSequence]]:
    """A shuffled pass in steps of at most `tokens_per_step` tokens, or one longer sequence."""
    steps: list[list[TrainSequence]] = []
    room = 0
    for index in generator.permutation(len(examples)):
        length = len(examples[index].token_ids)
        if length > room:
            steps.append([])
            room = tokens_per_step
        steps[-1].append(examples[index])
        room -= length
    return steps
