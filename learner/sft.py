"""Supervised fine-tuning: the same backend, a loss that is minus the log-likelihood of the marked tokens; and training on
preferences. Every rank calls `run_sft` or `run_preferences` with the same sequences and seed, and takes its part of each step.

A policy learns preferences by DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7), whose reference is the policy before the
first step: its log-probs of all sequences are computed once, and no second model is held.

A reward model scores a sequence by a head on its last token; of a preference it learns (Bradley & Terry 1952; Ouyang et al. 2022,
arXiv:2203.02155, equation 1)

    - log sigmoid(score of the chosen - score of the rejected)        mean over the preferences of a step

This is the loss of DPO with scores in place of log-ratios (`algorithms/preferences.py`), which may be in any row and on any rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ..common.images import PlacedImage
from ..configs.algorithm import Algorithm, Dpo, NoAdvantage
from ..configs.sft import Sft
from ..errors import ConfigError
from .algorithms import loss_of
from .algorithms.preferences import gather_pairs
from .aux_models.base import score_whole
from .backend import Backend, BackendStepResult, LossOutput
from .batch import TrainBatch, supervised
from .packing import MicroBatch, microbatches, with_proximal
from .step import warm_up_cosine

WARMUP_SHARE = 0.05  # share of the steps over which the learning rate rises, until AdamW's second moment settles
FINAL_SHARE = 0.1  # share of the steps, at the end, over which the reported loss is averaged
Example = tuple[Sequence[int] | NDArray[np.int32], Sequence[bool] | NDArray[np.bool_]]  # token ids, which are imitated

BRADLEY_TERRY = Dpo(eta=1.0)


class ExampleImages(msgspec.Struct, frozen=True):
    """Of each sequence the images in it, by positions; and the files of all of them, by digest."""

    placed: tuple[tuple[PlacedImage, ...], ...]
    files: dict[str, bytes]


class SftProgress(msgspec.Struct, frozen=True):
    """After one optimizer step: `step` of `steps`, mean loss in nats per trained token or preference, tokens (context included) per
    second."""

    step: int
    steps: int
    loss: float
    lr: float
    tokens_per_s: float


class HeldOut(msgspec.Struct, frozen=True):
    """After `epoch` passes over the others: mean loss on the held-out sequences, nats per token, over their `tokens`; of
    preferences nats per preference, over their number, and the share of them whose chosen sequence has the higher score, or with
    DPO gained more log-likelihood than the other."""

    epoch: int
    loss: float
    tokens: int
    right: float | None = None


class SftResult(msgspec.Struct, frozen=True):
    """The outcome of a fine-tuning on `sequences` of `tokens` in all, context included."""

    sequences: int
    tokens: int
    loss: float  # mean over the last tenth of the steps, nats per trained token or preference
    held_out: tuple[HeldOut, ...]  # before the first epoch and after each; empty where nothing is held out


def negative_log_likelihood(logprobs: torch.Tensor, entropy: torch.Tensor, row: MicroBatch) -> LossOutput:
    """A `PolicyLoss`: - sum of log p over trained tokens."""
    return LossOutput(loss_sum=-logprobs[row.loss_mask].sum(), sums={"entropy": entropy[row.loss_mask].detach().sum()})


class _Objective(msgspec.Struct, frozen=True):
    """What is learned of a sequence, or of `size` sequences one after the other, which stay together."""

    size: int
    step: Callable[[Backend, Sequence[MicroBatch], float], BackendStepResult]  # collective; at this learning rate
    evaluate: Callable[[Backend, Sequence[MicroBatch], int], HeldOut]  # collective; after this epoch


def run_sft(
    backend: Backend,
    sequences: Sequence[Example],
    config: Sft,
    *,
    tokens_per_microbatch: int,
    seed: int,
    report: Callable[[SftProgress | HeldOut], None],
    images: ExampleImages | None = None,
) -> SftResult:
    """Collective. Train for `config.epochs` with `backend` at temperature 1. Raises ConfigError: no sequence has a token to train
    on."""
    examples = supervised(sequences)
    if images is not None:
        examples = msgspec.structs.replace(examples, images=images.placed, image_files=images.files)
    examples = examples.select([i for i, one in enumerate(examples) if one.loss_mask.any()])
    if not len(examples):
        raise ConfigError(f"sft: none of {len(sequences)} conversations has a token to train on")
    return _run(backend, examples, _LIKELIHOOD, config, tokens_per_microbatch, seed, report)


def run_preferences(
    backend: Backend,
    preferences: Sequence[tuple[Example, Example]],
    config: Sft,
    *,
    tokens_per_microbatch: int,
    seed: int,
    report: Callable[[SftProgress | HeldOut], None],
) -> SftResult:
    """Collective. As `run_sft`, of the chosen and of the rejected sequence of each preference. With `sft.loss.kind=dpo` `backend`
    is a policy; else it has a head, as a critic, whose output before a token is the score of all tokens up to there."""
    sequences = [sequence for pair in preferences for sequence in pair]
    if isinstance(config.loss, Dpo):
        loss, examples = config.loss, supervised(sequences)
        reference = score_whole([backend], backend, examples, tokens_per_microbatch)[:, 0]
    else:
        # Of each sequence another token is asked for, whatever it is: the output before it is that at the last token.
        ended = [[*ids, ids[-1]] for ids, _ in sequences]
        loss, examples = BRADLEY_TERRY, supervised([(ids, [False] * (len(ids) - 1) + [True]) for ids in ended])
        reference = np.zeros(len(examples.token_ids), dtype=np.float32)
    examples = msgspec.structs.replace(
        examples,
        groups=np.arange(len(examples)) // 2,
        rewards=np.tile([1.0, 0.0], len(preferences)),
        reference_logprobs=reference,
    )
    return _run(backend, examples, _by_preference(loss), config, tokens_per_microbatch, seed, report)


def _run(
    backend: Backend,
    examples: TrainBatch,
    objective: _Objective,
    config: Sft,
    budget: int,
    seed: int,
    report: Callable[[SftProgress | HeldOut], None],
) -> SftResult:
    generator = np.random.default_rng(seed)
    examples, held = _split(examples, config.held_out, generator, objective.size)
    plan = [_epoch(examples, config.tokens_per_step, generator, objective.size) for _ in range(config.epochs)]
    steps = sum(len(batches) for batches in plan)
    warmup = max(1, round(WARMUP_SHARE * steps))
    losses: list[float] = []
    found: list[HeldOut] = []

    def evaluate(epoch: int) -> None:
        if len(held):
            rows = microbatches(held, backend.data_rank, backend.data_size, budget)
            found.append(objective.evaluate(backend, rows, epoch))
            report(found[-1])

    evaluate(0)
    for epoch, batches in enumerate(plan, start=1):
        for batch in batches:
            began = time.perf_counter()
            lr = warm_up_cosine(config.lr, len(losses), warmup, steps)
            rows = microbatches(batch, backend.data_rank, backend.data_size, budget)
            result = objective.step(backend, rows, lr)
            losses.append(result.loss)
            speed = len(batch.token_ids) / (time.perf_counter() - began)
            report(SftProgress(step=len(losses), steps=steps, loss=result.loss, lr=lr, tokens_per_s=speed))
        evaluate(epoch)
    last = losses[-max(1, round(FINAL_SHARE * len(losses))) :]
    return SftResult(
        sequences=len(examples), tokens=len(examples.token_ids), loss=sum(last) / len(last), held_out=tuple(found)
    )


def _split(
    examples: TrainBatch, share: float, generator: np.random.Generator, size: int
) -> tuple[TrainBatch, TrainBatch]:
    """What to train on, at least one example of `size` sequences, and what is held out: a random `share`, at least one of two or
    more if not 0."""
    units = len(examples) // size
    count = min(math.ceil(share * units), units - 1)
    chosen = set(generator.permutation(units)[:count].tolist()) if count else set[int]()
    others = [i for i in range(units) if i not in chosen]
    return examples.select(_sequences(others, size)), examples.select(_sequences(sorted(chosen), size))


def _sequences(units: Sequence[int], size: int) -> list[int]:
    return [size * unit + i for unit in units for i in range(size)]


def _epoch(examples: TrainBatch, tokens_per_step: int, generator: np.random.Generator, size: int) -> list[TrainBatch]:
    """A shuffled pass in steps of at most `tokens_per_step` tokens, or one longer example of `size` sequences."""
    steps: list[list[int]] = []
    room, sizes = 0, examples.sizes.reshape(-1, size).sum(1).tolist()
    for unit in generator.permutation(len(sizes)).tolist():
        if sizes[unit] > room:
            steps.append([])
            room = tokens_per_step
        steps[-1].append(unit)
        room -= sizes[unit]
    return [examples.select(_sequences(step, size)) for step in steps]


# --- what is learned


def _step_by_likelihood(backend: Backend, rows: Sequence[MicroBatch], lr: float) -> BackendStepResult:
    return backend.step(rows, negative_log_likelihood, lr)


def _likelihood_of_held_out(backend: Backend, rows: Sequence[MicroBatch], epoch: int) -> HeldOut:
    scored = backend.logprobs(rows)
    pairs = [(-one[row.loss_mask].double().sum(), row.loss_mask.sum()) for one, row in zip(scored, rows, strict=True)]
    loss, tokens = backend.gather(torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)).sum(0).tolist()
    return HeldOut(epoch=epoch, loss=loss / tokens, tokens=int(tokens))


def _scored(backend: Backend, rows: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Collective. `rows` with the scores that the model gives now."""
    return [with_proximal(row, scores) for row, scores in zip(rows, backend.logprobs(rows), strict=True)]


def _by_preference(loss: Dpo) -> _Objective:
    """Of a preference - log sigmoid(margin / eta), mean over the preferences of a step."""
    batch_loss = loss_of(Algorithm(advantage=NoAdvantage(), loss=loss), longest=1)

    def step(backend: Backend, rows: Sequence[MicroBatch], lr: float) -> BackendStepResult:
        rows = _scored(backend, rows)
        return backend.step(rows, batch_loss(rows, backend.gather), lr)

    def evaluate(backend: Backend, rows: Sequence[MicroBatch], epoch: int) -> HeldOut:
        margins = torch.tensor([pair.margin for pair in gather_pairs(_scored(backend, rows), backend.gather)[0]])
        mean, right = -functional.logsigmoid(margins / loss.eta).mean(), (margins > 0).double().mean()
        return HeldOut(epoch=epoch, loss=float(mean), tokens=len(margins), right=float(right))

    return _Objective(2, step, evaluate)


_LIKELIHOOD = _Objective(1, _step_by_likelihood, _likelihood_of_held_out)
