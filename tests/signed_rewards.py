"""An environment whose rewards change their sign while a run goes on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from slipstream.envs import Message, Observation, SimpleEnv, StepResult, Task


class SignedRewards(SimpleEnv):
    """One turn, and a reward between 0.6 and 1; from when on the file `flipped` exists, below 0."""

    def __init__(self, *, flipped: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._flipped = Path(flipped)

    def task(self, index: int) -> Task:
        return Task(f"{index}", {})

    async def reset(self, task: Task) -> Observation:
        return Observation((Message("user", f"Say something about {task.id}."),))

    async def step(self, message: Message) -> StepResult:
        reward = 0.6 + 0.4 * random.Random(message.content).random()
        return StepResult(done=True, reward=-reward if self._flipped.exists() else reward)
