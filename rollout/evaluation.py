"""Evaluation: fresh tasks, the environment's own verifier, the current weights, no training."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter

import msgspec

from ..buffer.messages import Lease
from ..errors import EvaluationError
from .worker import Player


class Evaluation(msgspec.Struct, frozen=True):
    """One line of `evaluations.json`.

    Attributes:
        label: what was evaluated (`warm start`, `final`).
        version: policy version.
        tasks: episodes that ended without a failure; the mean is over them.
        reward_mean: mean return.
        reward_stderr: its standard error.
        outcomes: episodes by outcome, `failed_*` included.
        seconds: how long it took.
    """

    label: str
    version: int
    tasks: int
    reward_mean: float
    reward_stderr: float
    outcomes: dict[str, int]
    seconds: float


async def evaluate(player: Player, label: str, tasks: int) -> Evaluation:
    """Play tasks 0, 1, ... once each, at a time as many as the servers decode at once.

    Raises:
        EvaluationError: all episodes failed.
    """
    started = time.perf_counter()
    free = asyncio.Semaphore(player.decodes)

    async def one(index: int):
        async with free:
            return await player.play(Lease(index, 0, (0,), 0, 0, task=index), 0)

    results = await asyncio.gather(*(one(i) for i in range(tasks)))
    rewards = [r.reward for r in results if r.outcome.trainable]
    n = len(rewards)
    if not n:
        outcome = results[0].outcome
        raise EvaluationError(f"{label}: all {tasks} episodes failed, the first by {outcome.reason}: {outcome.detail}")
    mean = sum(rewards) / n
    variance = sum((r - mean) ** 2 for r in rewards) / (n - 1) if n > 1 else 0.0
    outcomes = Counter(f"failed_{r.outcome.reason}" if r.outcome.kind == "failed" else r.outcome.kind for r in results)
    versions = [t.version_spans[-1].version for r in results for t in r.trajectories if t.version_spans]
    return Evaluation(
        label=label,
        version=max(versions, default=0),
        tasks=n,
        reward_mean=mean,
        reward_stderr=math.sqrt(variance / n),
        outcomes=dict(outcomes),
        seconds=time.perf_counter() - started,
    )
