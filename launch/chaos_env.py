"""What the policy acts on under `slipstream chaos`: episodes of every kind, short, in any order, at no cost.

Invariants:
- What a task does depends on its index alone, what an episode earns on what was said in it.
"""

from __future__ import annotations

import asyncio
import random

from ..envs import Message, Observation, SimpleEnv, StepResult, Task
from ..errors import EnvError

TURNS = 4
"""Most completions of an episode."""

FAILS = 0.03
"""Share of the episodes that the environment fails."""

DAWDLES = 0.1
"""Share of the episodes that take up to `DAWDLE_S` longer."""

DAWDLE_S = 1.0


class Turmoil(SimpleEnv):
    """Small talk of one to four turns that is paid at random; some of it fails, some of it takes its time."""

    def task(self, index: int) -> Task:
        return Task(f"turmoil-{index}", {"turns": self.rng(index).randint(1, TURNS)})

    async def reset(self, task: Task) -> Observation:
        self._left = task.payload["turns"]
        self._said = ""
        return Observation((Message("user", f"Say something about {task.id}."),))

    async def step(self, message: Message) -> StepResult:
        self._left -= 1
        self._said += message.content
        fate = random.Random(self._said)
        if fate.random() < FAILS:
            raise EnvError("this one was to fail")
        if fate.random() < DAWDLES:
            await asyncio.sleep(fate.uniform(0, DAWDLE_S))
        return StepResult((Message("user", "Go on."),), reward=fate.random(), done=self._left == 0)
