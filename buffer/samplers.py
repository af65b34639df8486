"""Which task a new group gets: the samplers of `env.sampler`, and the contract of the user's own. Pure.

Invariants:
- A choice follows from the seed, the number of the draw and what was observed: a run that was killed goes on as if it had not been.
- What a sampler knows it was told by `observe`. It holds no file, socket, clock or global random state.
"""

from __future__ import annotations

import bisect
import random
from typing import Protocol

import msgspec

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
