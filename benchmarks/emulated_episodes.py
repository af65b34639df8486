"""Emulated episodes for `slipstream bench async`, by a law: an environment that says how long each turn shall be and whose tools
sleep, and an agent that samples as many tokens. The law is the very object that the simulator draws from.

A task's members are drawn from the task's own random numbers, so that every run plays the same episodes. Of a share of the tasks,
`alike`, all members earn 1; of the others about half.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec

from ..agents.base import Policy
from ..envs import Environment, Message, Observation, SimpleEnv, StepResult, Task
from ..planner.workload import Lognormal, TurnShape

FACTORY, AGENT = f"{__name__}:EmulatedTasks", f"{__name__}:play"
DIGIT = 200  # token ids that the prompt of a task is made of


class EmulatedTasks(SimpleEnv):
    """`law` has the fields of `Lognormal`."""

    def __init__(self, *, law: dict[str, Any], alike: float = 0.0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._law, self._alike = msgspec.convert(law, Lognormal), alike
        self._begun: Counter[str] = Counter()  # episodes of each task; one for all episodes of a worker

    def task(self, index: int) -> Task:
        return Task(f"{index}", {"index": index})

    async def reset(self, task: Task) -> Observation:
        member = self._begun[task.id]
        self._begun[task.id] += 1
        index = task.payload["index"]
        self._turns = list(self._law.group(self.rng(index), member + 1)[member].turns)
        self._all_earn = self.rng(-1 - index).random() < self._alike  # random numbers that no length depends on
        return Observation((Message("user", msgspec.json.encode(self._turns).decode()),))

    async def step(self, message: Message) -> StepResult:
        turn = self._turns.pop(0)
        if turn.environment_s:
            await asyncio.sleep(turn.environment_s)
        return StepResult(done=not self._turns, reward=1.0 if self._all_earn else float(turn.sampled % 2))


async def play(env: Environment, policy: Policy, task: Task) -> None:
    """As many tokens in each turn as the environment's first message says."""
    observation = await env.reset(task)
    ids = list[int]()
    for turn in msgspec.json.decode(observation.messages[0].content, type=tuple[TurnShape, ...]):
        ids += prompt_of(task.payload["index"], turn.prompt)
        ids += (await policy.generate(ids, turn.sampled)).token_ids
        await env.step(Message("assistant", ""))


def prompt_of(task: int, tokens: int) -> list[int]:
    """Token ids of a prompt: three that name the task, as far as there is room, and others that are all alike."""
    return [2 + task // DIGIT**place % DIGIT if place < 3 else 2 for place in range(tokens)]
