"""Pass rates: every task of a data set played several times by one policy, without training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ..buffer.messages import Lease
from ..common.scores import SOLVED, TaskRating
from .failures import FailureLog, FailureWindow
from .loop_watchdog import EventLoopWatchdog
from .player import EpisodePlayer, EpisodeResult


async def rate(player: EpisodePlayer, tasks: Sequence[int], samples: int, rated: Callable[[TaskRating], None]) -> None:
    """Play each of `tasks`, of the only environment, `samples` times, as many episodes at a time as the servers decode at once.
    `rated` receives a task's rating when its last episode has ended. Raises EpisodesFail as a worker: so many failed that rates say
    nothing."""
    queue = ((number, task, member) for number, task in enumerate(tasks) for member in range(samples))
    results: dict[int, list[EpisodeResult]] = {}
    failures, window = FailureLog(), FailureWindow(lambda text: None)

    async def play_on() -> None:
        for number, task, member in queue:
            lease = Lease(number, 0, tuple(range(samples)), 0, 0, 0, task)
            result = await player.play(lease, member)
            if not result.outcome.trainable:
                failures.record(f"{lease.episode(member)} of the rating", result.outcome, result.error)
            window.add(result.outcome, useful=result.outcome.trainable, slots=player.concurrency)
            played = results.setdefault(number, [])
            played.append(result)
            if len(played) == samples:
                rated(_rating(task, results.pop(number)))

    async with EventLoopWatchdog(), asyncio.TaskGroup() as group:
        for slot in range(min(player.concurrency, len(tasks) * samples)):
            group.create_task(play_on(), name=f"slot {slot}")


def _rating(task: int, played: Sequence[EpisodeResult]) -> TaskRating:
    rewards = [one.reward for one in played if one.outcome.trainable]
    solves = sum(reward >= SOLVED for reward in rewards)
    mean = sum(rewards) / len(rewards) if rewards else None
    return TaskRating(task, len(rewards), solves, mean, len(played) - len(rewards))
