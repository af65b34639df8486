"""ReTool (Feng et al. 2025, arXiv:2504.11536): the policy learns to compute with a Python interpreter instead of in its head.

See retool.yaml for the commands. The interpreter runs in a sandbox of the episode; half of the demonstrations call it, half guess.
"""

from __future__ import annotations

import random
from typing import Any

from slipstream.envs import Message, Observation, PythonTool, SimpleEnv, StepResult, Task, ToolCall, call_tool

SIGNS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
TURNS = 4  # calls of the interpreter and wrong answers, together


class ReTool(SimpleEnv):
    """`What is 47 * 82?`, with the tool `python`; the reward is 1 for the number alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.spec = PythonTool().tool.spec

    def task(self, index: int) -> Task:
        rng = self.rng(index)
        a, sign, b = rng.randint(10, 99), rng.choice("+-*"), rng.randint(10, 99)
        return Task(f"retool-{index}", {"expression": f"{a} {sign} {b}", "answer": SIGNS[sign](a, b)})

    async def reset(self, task: Task) -> Observation:
        self.answer, self.turns = str(task.payload["answer"]), 0
        self.python = PythonTool()
        return self.opening(task)

    def opening(self, task: Task) -> Observation:
        question = f"What is {task.payload['expression']}? Answer with the number."
        return Observation((Message("user", question),), (self.spec,))

    async def step(self, message: Message) -> StepResult:
        self.turns += 1
        if not message.tool_calls and not message.malformed:
            return StepResult(reward=float(message.content.strip() == self.answer), done=True)
        if self.turns == TURNS:
            return StepResult(reward=0.0, done=True, truncated=True)
        if message.malformed:
            return StepResult((Message("user", f"error: {message.malformed}"),))
        replies = [await call_tool({"python": self.python.tool}, call) for call in message.tool_calls]
        return StepResult(tuple(reply for reply, _ in replies))

    async def close(self) -> None:
        await self.python.close()

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]]:
        answer = task.payload["answer"]
        if rng.random() < 0.5:
            return self.opening(task), (Message("assistant", str(answer + rng.randint(-20, 20))),)
        call = ToolCall("python", {"code": task.payload["expression"]})
        result = Message("tool", str(answer), name="python")
        return self.opening(task), (Message("assistant", "", (call,)), result, Message("assistant", str(answer)))
