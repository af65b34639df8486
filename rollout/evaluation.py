"""Evaluation: fresh tasks, the environment's own verifier, the current weights, no training."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from ..buffer.admission import Admission
from ..buffer.messages import Lease
from ..errors import EvaluationError
from .blocking import LoopGuard
from .episode import EpisodeResult
from .worker import Player


class Score(msgspec.Struct, frozen=True):
    """What the episodes of one environment earned.

    Attributes:
        tasks: episodes that ended without a failure; the mean is over them.
        reward_mean: mean return; None where all failed.
        reward_stderr: its standard error; None where all failed.
        outcomes: episodes by outcome, `failed_*` included.
    """

    tasks: int
    reward_mean: float | None
    reward_stderr: float | None
    outcomes: dict[str, int]


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
        environments: of a mixture, the same by environment.
    """

    label: str
    version: int
    tasks: int
    reward_mean: float
    reward_stderr: float
    outcomes: dict[str, int]
    seconds: float
    environments: dict[str, Score] = {}


async def evaluate(player: Player, label: str, tasks: int) -> Evaluation:
    """Play `tasks` tasks once each, of each environment its share from its first on, at a time as many as the servers decode at
    once.

    Raises:
        EvaluationError: all episodes failed.
    """
    started = time.perf_counter()
    free = asyncio.Semaphore(player.decodes)
    counts = Admission(0, tasks, tuple(part.share for part in player.parts)).quotas([0] * len(player.parts))
    chosen = [(env, task) for env, count in enumerate(counts) for task in range(count)]

    async def one(number: int) -> EpisodeResult:
        env, task = chosen[number]
        async with free:
            return await player.play(Lease(number, 0, (0,), 0, 0, env, task), 0)

    async with LoopGuard():
        results = await asyncio.gather(*(one(i) for i in range(tasks)))
    whole = _score(results)
    if whole.reward_mean is None or whole.reward_stderr is None:
        outcome = results[0].outcome
        raise EvaluationError(f"{label}: all {tasks} episodes failed, the first by {outcome.reason}: {outcome.detail}")
    scores = {
        part.name: _score([result for result, (at, _) in zip(results, chosen, strict=True) if at == env])
        for env, part in enumerate(player.parts)
    }
    versions = [t.version_spans[-1].version for r in results for t in r.trajectories if t.version_spans]
    return Evaluation(
        label=label,
        version=max(versions, default=0),
        tasks=whole.tasks,
        reward_mean=whole.reward_mean,
        reward_stderr=whole.reward_stderr,
        outcomes=whole.outcomes,
        seconds=time.perf_counter() - started,
        environments=scores if len(scores) > 1 else {},
    )


def by_environment(evaluation: Evaluation) -> str:
    """How each part of a mixture did, in parentheses; "" where there is but one environment."""
    told = [
        f"{name} {'failed' if score.reward_mean is None else f'{score.reward_mean:.3f}'}"
        for name, score in evaluation.environments.items()
    ]
    return f" ({', '.join(told)})" if told else ""


def _score(results: Sequence[EpisodeResult]) -> Score:
    rewards = [r.reward for r in results if r.outcome.trainable]
    n = len(rewards)
    outcomes = Counter(f"failed_{r.outcome.reason}" if r.outcome.kind == "failed" else r.outcome.kind for r in results)
    if not n:
        return Score(0, None, None, dict(outcomes))
    mean = sum(rewards) / n
    variance = sum((r - mean) ** 2 for r in rewards) / (n - 1) if n > 1 else 0.0
    return Score(n, mean, math.sqrt(variance / n), dict(outcomes))
