"""Supervised fine-tuning: the same backend, a loss that is minus the log-likelihood of the marked tokens. Every rank calls
`run_sft` with the same sequences and seed, and takes its part of each step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ..configs.sft import Sft
from ..errors import ConfigError
from .backend import Backend, LossOutput
from .batch import TrainBatch, supervised
from .packing import MicroBatch, microbatches
from .step import warm_up_cosine

WARMUP_SHARE = 0.05  # share of the steps over which the learning rate rises, until AdamW's second moment settles
FINAL_SHARE = 0.1  # share of the steps, at the end, over which the reported loss is averaged
Example = tuple[Sequence[int] | NDArray[np.int32], Sequence[bool] | NDArray[np.bool_]]  # token ids, which are imitated


class SftProgress(msgspec.Struct, frozen=True):
    """After one optimizer step: `step` of `steps`, mean loss in nats per trained token, tokens (context included) per second."""

    step: int
    steps: int
    loss: float
    lr: float
    tokens_per_s: float


class HeldOut(msgspec.Struct, frozen=True):
    """After `epoch` passes over the others: mean loss on the held-out sequences, nats per token, over their `tokens`."""

    epoch: int
    loss: float
    tokens: int


class SftResult(msgspec.Struct, frozen=True):
    """The outcome of a fine-tuning on `sequences` of `tokens` in all, context included."""

    sequences: int
    tokens: int
    loss: float  # mean over the last tenth of the steps, nats per trained token
    held_out: tuple[HeldOut, ...]  # before the first epoch and after each; empty where nothing is held out


def negative_log_likelihood(logprobs: torch.Tensor, entropy: torch.Tensor, row: MicroBatch) -> LossOutput:
    """A `PolicyLoss`: - sum of log p over trained tokens."""
    return LossOutput(loss_sum=-logprobs[row.loss_mask].sum(), sums={"entropy": entropy[row.loss_mask].detach().sum()})


def run_sft(
    backend: Backend,
    sequences: Sequence[Example],
    config: Sft,
    *,
    tokens_per_microbatch: int,
    seed: int,
    report: Callable[[SftProgress | HeldOut], None],
) -> SftResult:
    """Collective. Train for `config.epochs` with `backend` at temperature 1. Raises ConfigError: no sequence has a token to train
    on."""
    examples = supervised(sequences)
    examples = examples.select([i for i, one in enumerate(examples) if one.loss_mask.any()])
    if not len(examples):
        raise ConfigError(f"sft: none of {len(sequences)} conversations has a token to train on")
    generator = np.random.default_rng(seed)
    examples, held = _split(examples, config.held_out, generator)
    plan = [_epoch(examples, config.tokens_per_step, generator) for _ in range(config.epochs)]
    steps = sum(len(batches) for batches in plan)
    warmup = max(1, round(WARMUP_SHARE * steps))
    losses: list[float] = []
    found: list[HeldOut] = []

    def evaluate(epoch: int) -> None:
        if len(held):
            found.append(_evaluated(backend, held, tokens_per_microbatch, epoch))
            report(found[-1])

    evaluate(0)
    for epoch, batches in enumerate(plan, start=1):
        for batch in batches:
            began = time.perf_counter()
            lr = warm_up_cosine(config.lr, len(losses), warmup, steps)
            rows = microbatches(batch, backend.data_rank, backend.data_size, tokens_per_microbatch)
            result = backend.step(rows, negative_log_likelihood, lr)
            losses.append(result.loss)
            speed = len(batch.token_ids) / (time.perf_counter() - began)
            report(SftProgress(step=len(losses), steps=steps, loss=result.loss, lr=lr, tokens_per_s=speed))
        evaluate(epoch)
    last = losses[-max(1, round(FINAL_SHARE * len(losses))) :]
    return SftResult(
        sequences=len(examples), tokens=len(examples.token_ids), loss=sum(last) / len(last), held_out=tuple(found)
    )


def _split(examples: TrainBatch, share: float, generator: np.random.Generator) -> tuple[TrainBatch, TrainBatch]:
    """The sequences to train on, at least one, and those held out: a random `share`, at least one of two or more if not 0."""
    count = min(math.ceil(share * len(examples)), len(examples) - 1)
    chosen = set(generator.permutation(len(examples))[:count].tolist()) if count else set[int]()
    return examples.select([i for i in range(len(examples)) if i not in chosen]), examples.select(sorted(chosen))


def _evaluated(backend: Backend, held: TrainBatch, budget: int, epoch: int) -> HeldOut:
    rows = microbatches(held, backend.data_rank, backend.data_size, budget)
    scored = backend.logprobs(rows)
    pairs = [(-one[row.loss_mask].double().sum(), row.loss_mask.sum()) for one, row in zip(scored, rows, strict=True)]
    loss, tokens = backend.gather(torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)).sum(0).tolist()
    return HeldOut(epoch=epoch, loss=loss / tokens, tokens=int(tokens))


def _epoch(examples: TrainBatch, tokens_per_step: int, generator: np.random.Generator) -> list[TrainBatch]:
    """A shuffled pass in steps of at most `tokens_per_step` tokens, or one longer sequence."""
    steps: list[list[int]] = []
    room, sizes = 0, examples.sizes.tolist()
    for index in generator.permutation(len(examples)).tolist():
        if sizes[index] > room:
            steps.append([])
            room = tokens_per_step
        steps[-1].append(index)
        room -= sizes[index]
    return [examples.select(step) for step in steps]
