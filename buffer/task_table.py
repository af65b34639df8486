"""The tasks of a run: which one a new group gets, and what its attempts came to. Pure.

Invariants:
- An episode that ended and did not fail is one attempt, counted in the transaction that stores its end: exactly once across kills.
- What `drain` gives are differences, so that a sampler that needs no statistics costs no memory; the store adds them up.
- A mistake of the user's sampler is an EnvError that names the class, and the line where it raised.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ..common.scores import SOLVED
from ..errors import EnvError, describe_user_error
from .samplers import SequentialSampler, TaskSampler, TaskStatistics

StoredTask = tuple[int, int, TaskStatistics]  # environment, task, what is known of it


class Attempt(msgspec.Struct, frozen=True):
    """What an episode came to: the task's id, and the reward by the environment's own verifier."""

    task_id: str
    reward: float


class TaskChange(msgspec.Struct):
    """What was added to a task's statistics since the last transaction; `streak` begins anew after an attempt that did not solve
    it."""

    id: str = ""
    groups: int = 0
    attempts: int = 0
    solves: int = 0
    streak: int = 0
    version: int = -1


class TaskTable:
    """`samplers` by environment, and what the store knows of their tasks. Raises EnvError: a sampler raised, or chose what is no
    task."""

    def __init__(
        self, samplers: Sequence[TaskSampler], tasks: Sequence[int] = (), stored: Iterable[StoredTask] = ()
    ) -> None:
        self._samplers = tuple(samplers)
        self._tasks = tuple(tasks) or (0,) * len(self._samplers)  # how many each has; 0 without end
        self._known: dict[tuple[int, int], TaskStatistics] = {}
        self._changes: dict[tuple[int, int], TaskChange] = {}
        for env, task, statistics in stored:
            self._observe(env, task, statistics)

    def choose(self, env: int, draw: int) -> int:
        """The task of the next group of an environment."""
        sampler, tasks = self._samplers[env], self._tasks[env]
        try:
            chosen = sampler.next(draw)
        except Exception as error:  # it may be the user's
            raise self._broken(sampler, f"next({draw}) raised {describe_user_error(error)}") from error
        task = _integer(chosen)
        if task < 0 or (tasks and task >= tasks):
            allowed = f"0 to {tasks - 1}" if tasks else "integers from 0 on"
            raise self._broken(sampler, f"next({draw}) returned {chosen!r:.100}; allowed are {allowed}")
        self._add(env, task, TaskChange(groups=1))
        return task

    def attempted(self, env: int, task: int, attempt: Attempt, version: int) -> None:
        """An episode of a task ended and did not fail."""
        solved = int(attempt.reward >= SOLVED)
        self._add(env, task, TaskChange(attempt.task_id, 0, 1, solved, solved, version))

    def drain(self) -> dict[tuple[int, int], TaskChange]:
        """What changed since the last call, by environment and task."""
        changes, self._changes = self._changes, {}
        return changes

    def _add(self, env: int, task: int, new: TaskChange) -> None:
        change = self._changes.setdefault((env, task), TaskChange())
        change.id = new.id or change.id
        change.groups += new.groups
        change.attempts += new.attempts
        change.solves += new.solves
        change.streak = 0 if new.attempts > new.solves else change.streak + new.streak
        change.version = max(change.version, new.version)
        if not isinstance(self._samplers[env], SequentialSampler):
            old = self._known.get((env, task), TaskStatistics())
            streak = 0 if new.attempts > new.solves else old.streak + new.streak
            known = TaskStatistics(
                old.groups + new.groups,
                old.attempts + new.attempts,
                old.solves + new.solves,
                streak,
                max(old.version, new.version),
            )
            self._observe(env, task, known)

    def _observe(self, env: int, task: int, statistics: TaskStatistics) -> None:
        sampler = self._samplers[env]
        if isinstance(sampler, SequentialSampler):
            return
        self._known[env, task] = statistics
        try:
            sampler.observe(task, statistics)
        except Exception as error:  # it may be the user's
            raise self._broken(sampler, f"observe({task}, ...) raised {describe_user_error(error)}") from error

    def _broken(self, sampler: TaskSampler, why: str) -> EnvError:
        return EnvError(f"env.sampler: {type(sampler).__name__}.{why}", final=True)


def _integer(chosen: Any) -> int:
    """What a sampler returned, integers of numpy included; -1 for what is none."""
    try:
        return -1 if isinstance(chosen, bool) else operator.index(chosen)
    except TypeError:
        return -1
