"""The policy's optimizer steps of one batch.

    TrainBatch ──minibatches──> MicroBatch ──proximal log-probs──> loss ──> step of the policy
                                                                    └──LargestRatios──> `ratio_p999`, `ratio_max`

The proximal policy of all steps of a batch is the policy at its start. With one step per batch, the step's own forward pass gives
the proximal log-probs, unless the loss chooses tokens or compares episodes before the step. Each epoch takes the same steps on the
same minibatches; annotations have what the first one saw of single tokens, the largest ratios are those of all.

Invariants of the largest importance ratios, which are exact over all ranks:
- The loss and the step are the same with and without them; ratios stay on the device until `LargestRatios.finish`.
- Each rank keeps one in a thousand of the tokens of all ranks and epochs, so that the kept ones of all ranks together contain the
  largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..buffer.trajectory import Trajectory
from ..configs.algorithm import Kl, warmup_of
from ..configs.schema import Learner
from ..errors import LearnerError
from .algorithms import loss_of, scores_first
from .algorithms.divergence import KL_COEFFICIENT, coefficient_of, next_coefficient
from .backend import Backend, BackendStepResult, LossOutput, PolicyLoss, TokenOutputs, listening
from .batch import TrainBatch
from .checkpoint_folder import CheckpointState
from .metrics import PolicyStepResult
from .packing import (
    MicroBatch,
    comparable_tokens,
    fresh_microbatches,
    mismatch,
    plan_steps,
    to_microbatch,
    with_proximal,
    without_candidates,
)

FLOOR = 0.1  # share of the peak at which the cosine of the learning rate ends
SHARE = 0.001  # of a batch's tokens whose ratios are kept


class PolicyStepper:
    """One rank's policy steps. `longest` is that of `TrainingLoop`.

    Attributes:
        peak_lr: the learning rate after warm-up; on all ranks the same, and it may change between two batches.
        first_step: batches before it are for the critic alone, which warms up; no method is called for them.
    """

    def __init__(self, config: Learner, backend: Backend, longest: int) -> None:
        self._config = config
        self._backend = backend
        self.peak_lr = config.optimizer.lr
        self.first_step = warmup_of(config.algorithm)
        self._loss = loss_of(config.algorithm, longest)
        algorithm = config.algorithm
        self._one_pass = algorithm.minibatches == algorithm.epochs == 1 and not scores_first(algorithm)

    def plan(self, batch: TrainBatch) -> list[list[list[int]]]:
        """Of each optimizer step of an epoch this rank's micro-batches, as indices of the sequences of `batch`; see
        `plan_steps`."""
        backend, config = self._backend, self._config
        local = backend.data_rank, backend.data_size, config.backend.tokens_per_microbatch
        return plan_steps(batch, config.algorithm.minibatches, *local, shares_prefixes=backend.shares_prefixes)

    def step(
        self,
        batch: TrainBatch,
        plan: Sequence[Sequence[Sequence[int]]],
        fresh: Sequence[Trajectory],
        state: CheckpointState,
        annotate: Callable[[PolicyLoss], PolicyLoss] = lambda loss: loss,
    ) -> PolicyStepResult:
        """Collective. Step the policy on `batch`, of which this rank has the rows of its `plan`; engine and learner are compared
        on `fresh` trajectories; `annotate` listens to the loss of each step. Raises LearnerError: there is no token to train, or
        `Backend.step` failed; the weights are unchanged."""
        backend, config = self._backend, self._config
        if not len(batch):
            raise LearnerError(
                f"the batch of step {state.step + 1} holds no token that may be trained; see buffer.max_staleness and buffer.filter"
            )
        lr = warm_up(self.peak_lr, state.step - self.first_step, config.optimizer.warmup_steps)
        rows = [[to_microbatch(batch.select(row)) for row in step_rows] for step_rows in plan]
        budget = config.backend.tokens_per_microbatch
        probe = self._scored(fresh_microbatches(fresh, state.version, budget, batch.image_files))
        ratios = LargestRatios(int(batch.trained_samples.sum()) * config.algorithm.epochs)

        def listened(loss: PolicyLoss) -> PolicyLoss:
            return annotate(ratios.of(loss))

        if self._one_pass:
            seen: list[MicroBatch] = []
            results = [self._one_pass_step(part, lr, seen, listened) for part in rows]
        else:
            rows = [self._scored(part) for part in rows]
            seen = [row for part in rows for row in part]
            losses = [self._loss(part, backend.gather) for part in rows]
            results = [backend.step(part, listened(loss), lr) for part, loss in zip(rows, losses, strict=True)]
            for _ in range(1, config.algorithm.epochs):
                results += [backend.step(part, ratios.of(loss), lr) for part, loss in zip(rows, losses, strict=True)]
        gap, _ = mismatch([*probe, *seen])
        ratio_p999, ratio_max = ratios.finish(backend)
        return PolicyStepResult(
            results=tuple(results),
            lr=lr,
            mismatch=backend.maximum(gap),
            compared=comparable_tokens(batch) + mismatch(probe)[1],
            ratio_p999=ratio_p999,
            ratio_max=ratio_max,
        )

    def carried(self, batch: TrainBatch, done: PolicyStepResult | None) -> dict[str, float]:
        """The numbers that the algorithm carries on after the step on `batch`; on all ranks the same. `done` is None where only the
        critic stepped."""
        kl = self._config.algorithm.kl
        if not isinstance(kl, Kl) or not isinstance(kl.coefficient, dict):
            return batch.carried
        coefficient = coefficient_of(kl, batch.carried)
        if done is not None:
            sampled = batch.trained_samples
            by_episode = int(sampled.sum()) / max(1, len(np.unique(batch.episode_of_token[sampled])))
            coefficient = next_coefficient(kl, coefficient, done.means["kl_reference"] * by_episode)
        return {**batch.carried, KL_COEFFICIENT: coefficient}

    def _scored(self, rows: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Collective. `rows` with the proximal log-probs that the policy gives now."""
        return [with_proximal(r, p) for r, p in zip(rows, self._backend.logprobs(rows), strict=True)]

    def _one_pass_step(
        self,
        rows: Sequence[MicroBatch],
        lr: float,
        seen: list[MicroBatch],
        annotate: Callable[[PolicyLoss], PolicyLoss],
    ) -> BackendStepResult:
        """Collective. A step whose forward pass gives the proximal log-probs; rows that this rank computed go to `seen`."""
        loss = annotate(self._loss(rows, self._backend.gather))

        def on_policy(logprobs: torch.Tensor, entropy: torch.Tensor, row: MicroBatch) -> LossOutput:
            known = with_proximal(row, logprobs.detach())
            seen.append(without_candidates(known))
            return loss(logprobs, entropy, known)

        return self._backend.step(rows, on_policy, lr)


class LargestRatios:
    """The largest importance ratios in the optimizer steps whose losses `of` listens to, of all ranks together. `tokens` are the
    trained tokens that the policy sampled, each as often as a step is taken on it."""

    def __init__(self, tokens: int) -> None:
        self._count = max(1, math.ceil(SHARE * tokens))
        self._largest: torch.Tensor | None = None  # log-ratios, float[at most `_count`]

    def of(self, loss: PolicyLoss) -> PolicyLoss:
        """`loss`, which is listened to."""
        return listening(loss, self._record_row)

    def finish(self, backend: Backend) -> tuple[float | None, float | None]:
        """Collective. The ratio p / b that one trained token in a thousand reaches, and the largest one. None: no rank saw one."""
        mine = torch.zeros(0) if self._largest is None else self._largest
        found = (
            backend.gather(mine.double().cpu()[:, None]).flatten().sort(descending=True).values[: self._count].tolist()
        )
        # A rank that computes no loss, such as the first of a pipeline, has gathered nothing.
        p999, maximum = (backend.maximum(value) for value in ((found[-1], found[0]) if found else (-math.inf,) * 2))
        return (None, None) if maximum == -math.inf else (_exp(p999), _exp(maximum))

    @torch.no_grad()
    def _record_row(self, tokens: TokenOutputs, row: MicroBatch) -> None:
        values = tokens.log_ratio if self._largest is None else torch.cat([self._largest, tokens.log_ratio])
        self._largest = values.topk(min(self._count, len(values))).values


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))  # e^709 is the largest float


# --- learning rates: pure functions of the step, without state


def warm_up(peak: float, step: int, warmup_steps: int) -> float:
    """Rate of optimizer step `step` (from 0): linear over `warmup_steps`, then `peak`."""
    return peak * min(1.0, (step + 1) / max(1, warmup_steps))


def warm_up_cosine(peak: float, step: int, warmup_steps: int, steps: int) -> float:
    """As `warm_up`, then half a cosine down to a tenth of `peak` at the last of `steps` (Loshchilov & Hutter 2017)."""
    if step < warmup_steps:
        return warm_up(peak, step, warmup_steps)
    progress = min(1.0, (step - warmup_steps + 1) / max(1, steps - warmup_steps))
    return peak * (FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * progress)))
