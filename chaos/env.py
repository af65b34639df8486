"""The environment of `slipstream chaos`, which injects faults: short, cheap episodes of one to four turns, some of which fail or
are slow.

Invariants:
- The number of turns depends only on the task's index; rewards and faults only on the policy's messages.
"""

from __future__ import annotations

import asyncio
import random

from ..envs import Message, Observation, SimpleEnv, StepResult, Task
from ..errors import EnvError

TURNS = 4
"""Most completions of an episode."""

FAILURE_SHARE = 0.03
"""Share of the turns in which the environment raises."""

SLOW_SHARE = 0.1
"""Share of the turns that take up to `SLOW_S` longer."""

SLOW_S = 1.0


class FlakyEnv(SimpleEnv):
    """One to four turns with random rewards; some turns raise EnvError, some are slow."""

    def task(self, index: int) -> Task:
        return Task(f"flaky-{index}", {"turns": self.rng(index).randint(1, TURNS)})

    async def reset(self, task: Task) -> Observation:
        self._turns_left = task.payload["turns"]
        self._transcript = ""
        return Observation((Message("user", f"Say something about {task.id}."),))

    async def step(self, message: Message) -> StepResult:
        self._turns_left -= 1
        self._transcript += message.content
        rng = random.Random(self._transcript)
        if rng.random() < FAILURE_SHARE:
            raise EnvError("an injected failure")
        if rng.random() < SLOW_SHARE:
            await asyncio.sleep(rng.uniform(0, SLOW_S))
        return StepResult((Message("user", "Go on."),), reward=rng.random(), done=self._turns_left == 0)
