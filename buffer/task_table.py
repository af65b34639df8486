"""The tasks of a run: which one a new group gets, and what its attempts came to. The samplers of `env.sampler` choose; one of
the user's own is a `TaskSampler`. Pure.

Invariants:
- A choice follows from the seed, the number of the draw and what was observed: a run that was killed goes on as if it had not been.
- What a sampler knows it was told by `observe`. It holds no file, socket, clock or global random state.
- An episode that ended and did not fail is one attempt, counted in the transaction that stores its end: exactly once across kills.
- What `drain` gives are differences, so that a sampler that needs no statistics costs no memory; the store adds them up.
- A mistake of the user's sampler is an EnvError that names the class, and the line where it raised.
"""

from __future__ import annotations

import bisect
import operator
import random
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from ..common.scores import SOLVED
from ..errors import EnvError, describe_user_error

RETIRED_AFTER = 16  # solved attempts in a row, two groups of eight, after which a task is solved
HOPELESS_AFTER = 16  # attempts without any that solved the task
HOPELESS_SHARE = 1 / 16  # of the draws that go to tasks that none solved
LEARNING_SHARE = 1 / 2  # of the other draws that go to tasks of the pool `learning` while there are unseen ones


class TaskStatistics(msgspec.Struct, frozen=True):
    """What is known of a task."""

    groups: int = 0  # how often it was chosen
    attempts: int = 0  # episodes that ended and did not fail
    solves: int = 0  # of these, with a reward of 1 or more, by the environment's own verifier
    streak: int = 0  # the last attempts that all solved it
    version: int = -1  # newest policy version in an attempt; -1 without one


StoredTask = tuple[int, int, TaskStatistics]  # environment, task, what is known of it


class TaskSampler(Protocol):
    """Chooses tasks. A sampler of the user's own is a class that is called with `tasks`, how many there are (0: no end), and
    `seed`."""

    def observe(self, task: int, statistics: TaskStatistics) -> None:
        """What is known of a task: of each one in the store when the buffer starts, in order; then at every choice and attempt."""
        ...

    def next(self, draw: int) -> int:
        """The task of the next group, 0 up to, but not, `tasks`. `draw` counts the groups of this environment in the whole run. It
        is called in the buffer's event loop and has to return within microseconds."""
        ...


class SequentialSampler:
    """One task after the other; after the last of `tasks` the first again, or without end for 0."""

    def __init__(self, tasks: int = 0, seed: int = 0) -> None:
        self._tasks = tasks

    def observe(self, task: int, statistics: TaskStatistics) -> None: ...

    def next(self, draw: int) -> int:
        return draw % self._tasks if self._tasks else draw


class PoolSampler:
    """Tasks by how often they were solved.

        unseen ──chosen──> learning ──HOPELESS_AFTER attempts without a solve──> hopeless ──a solve──> learning
                               └──RETIRED_AFTER solves in a row──> solved, not played again while there are others

    Unseen tasks come in a seeded order, those of `learning` at random, and of the hopeless ones that which was chosen least often,
    so that each of them comes again.
    """

    def __init__(self, tasks: int, seed: int) -> None:
        self._seed = seed
        self._order = list(range(tasks))
        random.Random(seed).shuffle(self._order)
        self._position = 0  # in `_order`: all before it were chosen
        self._seen: dict[int, tuple[str, int]] = {}  # task -> its pool, and how often it was chosen
        # Sorted, so that a choice does not depend on the order in which tasks came in: (times chosen, task) of the hopeless
        # ones, (0, task) of the others.
        self._pools: dict[str, list[tuple[int, int]]] = {"learning": [], "hopeless": [], "solved": []}

    def observe(self, task: int, statistics: TaskStatistics) -> None:
        pool = pool_of(statistics)
        entry = pool, statistics.groups if pool == "hopeless" else 0
        before = self._seen.get(task)
        if before == entry:
            return
        if before is not None:
            members = self._pools[before[0]]
            del members[bisect.bisect_left(members, (before[1], task))]
        self._seen[task] = entry
        bisect.insort(self._pools[pool], (entry[1], task))

    def next(self, draw: int) -> int:
        rng = random.Random(f"{self._seed} {draw}")
        learning, hopeless, solved = self._pools["learning"], self._pools["hopeless"], self._pools["solved"]
        if hopeless and rng.random() < HOPELESS_SHARE:
            return hopeless[0][1]
        unseen = self._unseen()
        if learning and (unseen is None or rng.random() < LEARNING_SHARE):
            return rng.choice(learning)[1]
        if unseen is not None:
            return unseen
        return hopeless[0][1] if hopeless else rng.choice(solved)[1]

    def _unseen(self) -> int | None:
        while self._position < len(self._order) and self._order[self._position] in self._seen:
            self._position += 1
        return self._order[self._position] if self._position < len(self._order) else None


def pool_of(statistics: TaskStatistics) -> str:
    """The pool of a task that was chosen."""
    if statistics.streak >= RETIRED_AFTER:
        return "solved"
    return "hopeless" if not statistics.solves and statistics.attempts >= HOPELESS_AFTER else "learning"


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
