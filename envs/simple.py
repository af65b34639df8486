"""An environment as one class, which is both the task source and the episode; docs/environments.md has an example. A config selects
it by `env: {kind: python, factory: "my_package.my_module:MyEnv"}`.

Invariants:
- `make` returns a shallow copy for each episode; `reset` sets the state of one episode.
- `rng(index)` differs between splits and seeds, and is the same in every process.
- `reset`, `step` and `close` must not block: use `await in_thread(function, ...)` for blocking calls.
"""

from __future__ import annotations

import copy
import random
from abc import ABC, abstractmethod
from typing import Any, Literal, Self

from .base import Message, Observation, StepResult, Task

Split = Literal["train", "eval"]


class SimpleEnv(ABC):
    """Base of environments that are one class; implements TaskSource and Environment."""

    penalty: float | None = None
    """Reward of a failed episode where the config trains on failures (`rollout.failures.REASON.then=train`); None forbids that. Set
    it below the lowest return of an episode, so that failing never pays."""

    def __init__(self, *, split: Split, seed: int, **arguments: Any) -> None:
        """`arguments` come from the config and are kept in the attribute `arguments`; a subclass may name them instead."""
        self.name = type(self).__name__
        self.split = split
        self.seed = seed
        self.arguments = arguments

    def rng(self, index: int) -> random.Random:
        """Randomness for the `index`-th task."""
        return random.Random(f"{self.name}/{self.split}/{self.seed}/{index}")

    def make(self) -> Self:
        return copy.copy(self)

    @abstractmethod
    def task(self, index: int) -> Task:
        """The `index`-th task, the same in every process."""

    @abstractmethod
    async def reset(self, task: Task) -> Observation:
        """Start the episode."""

    @abstractmethod
    async def step(self, message: Message) -> StepResult:
        """Process the assistant's message."""

    async def close(self) -> None:
        """Release the episode's resources."""
        return None

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]] | None:
        """A conversation to imitate in a supervised warm-up; None for no demonstrations."""
        return None
