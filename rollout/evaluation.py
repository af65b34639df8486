"""Evaluation: fresh tasks, the environment's own verifier, the current weights, no training."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import Counter
from collections.abc import Sequence

import msgspec

from ..buffer.admission import Admission
from ..buffer.messages import Lease
from ..common.outcomes import failures_text
from ..errors import EvaluationError
from .failures import FailureLog, too_many_failed
from .loop_watchdog import EventLoopWatchdog
from .player import EpisodePlayer, EpisodeResult


class EvaluationScore(msgspec.Struct, frozen=True):
    """The rewards of a set of episodes: their mean over the `tasks` that did not fail and its standard error, None where all
    failed; and the episodes by outcome, `failed_*` included."""

    tasks: int
    reward_mean: float | None
    reward_stderr: float | None
    outcomes: dict[str, int]


class EvaluationResult(EvaluationScore, frozen=True, kw_only=True):
    """One entry of `evaluations.json`. `label` is when in the run it was made (`warm start`, `final`), `environments` the scores by
    environment of a mixture."""

    label: str
    version: int
    reward_mean: float
    reward_stderr: float
    seconds: float
    environments: dict[str, EvaluationScore] = {}


async def evaluate(player: EpisodePlayer, label: str, tasks: int) -> EvaluationResult:
    """Play `tasks` tasks once each: of each environment its share, from its first task on; as many at a time as the servers decode
    at once. Raises EvaluationError: so many episodes failed that the others say nothing (`failures.END_SHARE`)."""
    started = time.perf_counter()
    slots = asyncio.Semaphore(player.concurrency)
    counts = Admission(0, tasks, tuple(part.share for part in player.parts)).quotas([0] * len(player.parts))
    chosen = [(env, task) for env, count in enumerate(counts) for task in range(count)]

    async def play(number: int) -> EpisodeResult:
        env, task = chosen[number]
        async with slots:
            return await player.play(Lease(number, 0, (0,), 0, 0, env, task), 0)

    async with EventLoopWatchdog():
        results = await asyncio.gather(*(play(i) for i in range(tasks)))
    total, failures = _score(results), FailureLog()
    failed = [(number, result) for number, result in enumerate(results) if not result.outcome.trainable]
    for number, result in failed:
        failures.record(f"{number} of the evaluation", result.outcome, result.error)
    if total.reward_mean is None or total.reward_stderr is None or too_many_failed(total.outcomes):
        outcome = failed[0][1].outcome
        raise EvaluationError(
            f"{label}: {failures_text(total.outcomes)}, the first by {outcome.reason}: {outcome.detail}"
        )
    played = [[r for r, (at, _) in zip(results, chosen, strict=True) if at == env] for env in range(len(player.parts))]
    scores = {part.name: _score(episodes) for part, episodes in zip(player.parts, played, strict=True)}
    versions = [t.version_spans[-1].version for r in results for t in r.trajectories if t.version_spans]
    return EvaluationResult(
        **msgspec.structs.asdict(total),
        label=label,
        version=max(versions, default=0),
        seconds=time.perf_counter() - started,
        environments=scores if len(scores) > 1 else {},
    )


def _score(results: Sequence[EpisodeResult]) -> EvaluationScore:
    rewards = [r.reward for r in results if r.outcome.trainable]
    n = len(rewards)
    outcomes = Counter(r.outcome.label for r in results)
    if not n:
        return EvaluationScore(0, None, None, dict(outcomes))
    deviation = statistics.stdev(rewards) if n > 1 else 0.0
    return EvaluationScore(n, statistics.fmean(rewards), deviation / math.sqrt(n), dict(outcomes))
