"""The policy's optimizer steps of one batch.

    sequences ──minibatches──> rows ──proximal log-probs──> loss ──> step of the policy

Invariants:
- All steps of a batch are against the proximal policy that it began with.
- With one step per batch that is the policy which is stepped, and its log-probs are those of the step's own forward pass: nothing
  is computed twice. Losses that choose tokens before the step are the exception.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..buffer.trajectory import Trajectory
from ..configs.algorithm import Gae
from ..configs.schema import Learner
from ..errors import LearnerError
from .algorithms import chooses_tokens, loss_of
from .backend import Backend, LossOutput, PackedRow, PolicyLoss, StepResult
from .batch import TrainSequence, fresh_rows, minibatches, mismatch, rank_rows, with_proximal
from .checkpoint import CheckpointState
from .meter import StepDone
from .schedule import warm_up


class Stepper:
    """One rank's.

    Args:
        config: the learner's section.
        backend: this rank's part of the policy.
        longest: tokens of the longest possible episode, `agent.max_tokens`.
    """

    def __init__(self, config: Learner, backend: Backend, longest: int) -> None:
        advantage = config.algorithm.advantage
        self._config = config
        self._backend = backend
        self._critic_warmup = advantage.critic_warmup if isinstance(advantage, Gae) else 0
        self._loss = loss_of(config.algorithm, longest)
        self._one_pass = config.algorithm.minibatches == 1 and not chooses_tokens(config.algorithm)

    def step(self, sequences: Sequence[TrainSequence], fresh: Sequence[Trajectory], state: CheckpointState) -> StepDone:
        """Collective. Step the policy on `sequences`, which are the same on all ranks.

        Args:
            fresh: trajectories that the engines sampled just now: they and the learner must agree about their tokens, of which
                a batch may hold none.

        Raises:
            LearnerError: there is no token to train, or the step failed (`Backend.step`); the weights are as before.
        """
        backend, config = self._backend, self._config
        if not sequences:
            raise LearnerError(
                f"the batch of step {state.step + 1} holds no token that may be trained; see buffer.max_staleness"
            )
        step = state.step - self._critic_warmup
        lr = warm_up(config.optimizer.lr, step, config.optimizer.warmup_steps) if step >= 0 else 0.0
        budget = config.backend.tokens_per_microbatch
        parts = minibatches(sequences, config.algorithm.minibatches)
        mine, shared = (backend.data_rank, backend.data_size, budget), backend.shares_prefixes
        rows = [rank_rows(part, *mine, shares_prefixes=shared) for part in parts]
        probe = self._scored(fresh_rows(fresh, state.version, budget))
        if self._one_pass:
            seen: list[PackedRow] = []
            results = [self._one_pass_step(part, lr, seen) for part in rows]
        else:
            rows = [self._scored(part) for part in rows]
            seen = [row for part in rows for row in part]
            results = [backend.step(part, self._loss(part, backend.gather), lr) for part in rows]
        gap, _ = mismatch([*probe, *seen])
        return StepDone(
            results=tuple(results),
            lr=lr,
            mismatch=backend.maximum(gap),
            compared=_comparable(sequences) + mismatch(probe)[1],
        )

    def _scored(self, rows: Sequence[PackedRow]) -> list[PackedRow]:
        """Collective. `rows` with the proximal log-probs that the policy gives now."""
        return [with_proximal(r, p) for r, p in zip(rows, self._backend.logprobs(rows), strict=True)]

    def _one_pass_step(self, rows: Sequence[PackedRow], lr: float, seen: list[PackedRow]) -> StepResult:
        """Collective. A step whose forward pass gives the proximal log-probs; rows that this rank computed go to `seen`."""
        loss: PolicyLoss = self._loss(rows, self._backend.gather)

        def on_policy(logprobs: torch.Tensor, entropy: torch.Tensor, row: PackedRow) -> LossOutput:
            seen.append(with_proximal(row, logprobs.detach()))
            return loss(logprobs, entropy, seen[-1])

        return self._backend.step(rows, on_policy, lr)


def _comparable(sequences: Sequence[TrainSequence]) -> int:
    """The tokens that `mismatch` is over, whichever rank sees their log-probs: of a pipeline only the last stage does."""
    return sum(int((s.trained & (s.lags == 0) & ~s.mixed).sum()) for s in sequences)
