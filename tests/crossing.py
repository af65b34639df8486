"""An environment whose episodes outlive policy versions, for tests of what is too old. Imported by the workers of a run."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task
from slipstream.envs.simple import Split

LOOK_S = 0.02
"""Between looks at a file, which offers nothing to await."""

QUICK_TURNS, LONG_TURNS = 2, 4
"""Turns of tasks that do not wait, and of those that do."""


class Crossing(SimpleEnv):
    """Pays at random by what was said, so that every step moves the policy. Every fifth task is long: it waits before each turn
    but the first until `versions` more lines are in `metrics` (one for each version that the learner made and the engines serve),
    or for `patience_s` seconds where they do not come."""

    def __init__(self, *, split: Split, seed: int, metrics: str, versions: int, patience_s: float) -> None:
        super().__init__(split=split, seed=seed)
        self._metrics = Path(metrics)
        self._versions = versions
        self._patience_s = patience_s

    def task(self, index: int) -> Task:
        return Task(f"{index}", {"long": index % 5 == 1})

    async def reset(self, task: Task) -> Observation:
        self._said = task.id
        self._long = bool(task.payload["long"])
        self._turns_left = LONG_TURNS if self._long else QUICK_TURNS
        return Observation((Message("user", f"Tell me about {task.id}."),))

    async def step(self, message: Message) -> StepResult:
        self._said += message.content
        self._turns_left -= 1
        if self._long and self._turns_left:
            await self._later()
        reward = random.Random(self._said).random()
        return StepResult((Message("user", "Go on."),), reward=reward, done=not self._turns_left)

    async def _later(self) -> None:
        awaited, until = self._made() + self._versions, time.monotonic() + self._patience_s
        while self._made() < awaited and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)

    def _made(self) -> int:
        return self._metrics.read_bytes().count(b"\n") if self._metrics.exists() else 0
