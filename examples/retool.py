"""ReTool (Feng et al. 2025, arXiv:2504.11536): the policy learns to compute with a Python interpreter instead of in its head.

See retool.yaml for the commands. The interpreter runs in a sandbox of the episode; half of the demonstrations call it, half guess.
"""

from __future__ import annotations

import random
from typing import Any

from slipstream.envs import Message, Observation, PythonTool, Task, Tool, ToolCall, ToolEnv

SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


class ReTool(ToolEnv):
    """`What is 47 * 82?`, with the tool `python`; the reward is 1 for the number alone."""

    turns = 4

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.python = PythonTool()  # without a sandbox until it is called

    def task(self, index: int) -> Task:
        rng = self.rng(index)
        a, sign, b = rng.randint(10, 99), rng.choice("+-*"), rng.randint(10, 99)
        return Task(f"retool-{index}", {"expression": f"{a} {sign} {b}", "answer": SIGNS[sign](a, b)})

    def question(self, task: Task) -> str:
        return f"What is {task.payload['expression']}? Answer with the number."

    def tools(self) -> list[Tool]:
        return [self.python.tool]

    def score(self, task: Task, answer: str) -> float:
        return float(answer.strip() == str(task.payload["answer"]))

    async def reset(self, task: Task) -> Observation:
        self.python = PythonTool()  # of this episode
        return await super().reset(task)

    async def close(self) -> None:
        await self.python.close()

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]]:
        answer = task.payload["answer"]
        if rng.random() < 0.5:
            return self.opening(task), (Message("assistant", str(answer + rng.randint(-20, 20))),)
        call = ToolCall("python", {"code": task.payload["expression"]})
        result = Message("tool", str(answer), name="python")
        return self.opening(task), (Message("assistant", "", (call,)), result, Message("assistant", str(answer)))
