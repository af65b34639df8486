"""Evaluation: held-out tasks, the environment's own verifier, the current weights, no training."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import msgspec

from ..buffer.admission import Admission
from ..buffer.messages import Lease
from ..common.outcomes import failures_text
from ..common.scores import EvaluationResult
from ..envs import EnvPart
from ..errors import EvaluationError
from .failures import FailureLog, too_many_failed
from .loop_watchdog import EventLoopWatchdog
from .player import EpisodePlayer, EpisodeResult
from .scores import score

KeepEpisode = Callable[[Lease, int, EpisodeResult], None]
"""(lease, member, how its episode ended). It returns at once."""


def task_counts(parts: Sequence[EnvPart], tasks: int) -> tuple[int, ...]:
    """How many of so many tasks each environment plays: its share, or all that it has where these are fewer."""
    counts = _shares(parts, tasks)
    return tuple(min(count, part.size or count) for part, count in zip(parts, counts, strict=True))


def fewer_tasks(parts: Sequence[EnvPart], tasks: int) -> str:
    """Which environments have fewer tasks than their share of so many; "" where none has."""
    wanted, played = _shares(parts, tasks), task_counts(parts, tasks)
    return "; ".join(
        f"{part.name}: {has} held-out task{'s' * (has > 1)}, not {count}"
        for part, count, has in zip(parts, wanted, played, strict=True)
        if has < count
    )


def _shares(parts: Sequence[EnvPart], tasks: int) -> tuple[int, ...]:
    return Admission(0, tasks, tuple(part.share for part in parts)).quotas([0] * len(parts))


async def evaluate(
    player: EpisodePlayer,
    label: str,
    tasks: int,
    samples: int = 1,
    tell: Callable[[str], None] = lambda text: None,
    *,
    first: int = 0,
    keep: KeepEpisode = lambda lease, member, result: None,
) -> EvaluationResult:
    """Play `tasks` tasks `samples` times each: of each environment its share, from its first task on, none twice; as many
    at a time as the servers decode at once. Groups are numbered from `first` on; `keep` receives each episode that ends, and `tell`
    hears of the first failures. Raises EvaluationError: so many episodes failed that the others say nothing
    (`failures.END_SHARE`)."""
    started = time.perf_counter()
    slots, failures = asyncio.Semaphore(player.concurrency), FailureLog(tell)
    leases = [
        Lease(number, 0, tuple(range(samples)), 0, 0, env, task)
        for number, (env, task) in enumerate(
            ((env, task) for env, count in enumerate(task_counts(player.parts, tasks)) for task in range(count)),
            start=first,
        )
    ]

    async def play(lease: Lease, member: int) -> EpisodeResult:
        async with slots:
            result = await player.play(lease, member)
        keep(lease, member, result)
        if not result.outcome.trainable:
            failures.record(f"{lease.episode(member)} of the evaluation", result.outcome, result.error)
        return result

    async with EventLoopWatchdog():
        episodes = await asyncio.gather(*(play(lease, member) for lease in leases for member in lease.members))
    played = [episodes[i : i + samples] for i in range(0, len(episodes), samples)]
    total = score(played)
    if total.reward_mean is None or total.reward_stderr is None or too_many_failed(total.outcomes):
        outcome = next(one.outcome for one in episodes if not one.outcome.trainable)
        raise EvaluationError(
            f"{label}: {failures_text(total.outcomes)}, the first by {outcome.reason}: {outcome.detail}"
        )
    scores = {
        part.name: score([task for task, lease in zip(played, leases, strict=True) if lease.env == env])
        for env, part in enumerate(player.parts)
    }
    versions = sorted({span.version for one in episodes for t in one.trajectories for span in t.version_spans})
    return EvaluationResult(
        **msgspec.structs.asdict(total),
        label=label,
        version=max(versions, default=0),
        versions=tuple(versions) if len(versions) > 1 else (),
        seconds=time.perf_counter() - started,
        environments=scores if len(scores) > 1 else {},
    )
