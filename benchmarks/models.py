"""The policies of benchmarks, made here in given sizes, and the episodes that they play."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ..configs.schema import Agent
from ..envs import Message, Observation, PythonTool, SimpleEnv, StepResult, Task, ToolCall, call_tool
from ..launch.init_model import TinyModelShape, init_model

SHAPES = {
    "1M": TinyModelShape(),
    "3M": TinyModelShape(hidden=256, layers=4, heads=4, kv_heads=1, head_dim=64, intermediate=768),
    "10M": TinyModelShape(hidden=384, layers=6, heads=6, kv_heads=2, head_dim=64, intermediate=1152),
    "50M": TinyModelShape(hidden=768, layers=7, heads=12, kv_heads=3, head_dim=64, intermediate=2304),
    "300M": TinyModelShape(hidden=1408, layers=13, heads=22, kv_heads=11, head_dim=64, intermediate=4224),
    "440M": TinyModelShape(hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072),
}
"""By their number of parameters; "1M" is the quickstart's, "440M" has the layers of Qwen3-0.6B."""

TURNS = 4

AGAIN = "Go on, and say more about it."

CELL = ToolCall("python", {"code": "sum(range(1000))"})

SLEEP_S = 10.0


class Talk(SimpleEnv):
    """Says the same few words `TURNS` times, whatever it is told: episodes of known length for a policy that knows nothing."""

    def task(self, index: int) -> Task:
        return Task(f"talk-{index}", {"words": self.opening(index)})

    def opening(self, index: int) -> str:
        """What the `index`-th episode begins with."""
        return f"Tell me about the number {self.rng(index).randint(0, 9999)}."

    async def reset(self, task: Task) -> Observation:
        self._said = 0
        return Observation((Message("user", task.payload["words"]),))

    async def step(self, message: Message) -> StepResult:
        self._said += 1
        return StepResult((Message("user", AGAIN),), done=self._said == TURNS)


class TalkAndCompute(Talk):
    """As `Talk`, with a call of the tool `python` in each turn."""

    async def reset(self, task: Task) -> Observation:
        self._python = PythonTool()
        return await super().reset(task)

    async def step(self, message: Message) -> StepResult:
        _, valid = await call_tool({"python": self._python.tool}, CELL)
        assert valid
        return await super().step(message)

    async def close(self) -> None:
        await self._python.close()


class TalkAndSleep(Talk):
    """As `Talk`, with a tool in each turn that only takes `SLEEP_S`."""

    async def step(self, message: Message) -> StepResult:
        await asyncio.sleep(SLEEP_S)
        return await super().step(message)


def make_policy(folder: Path, size: str, seed: int = 0) -> int:
    """Write a random policy of `size` (a key of SHAPES) with its tokenizer to `folder`; the number of its parameters."""
    return init_model(folder, sources=[Talk(split="train", seed=0)], agent=Agent(), seed=seed, shape=SHAPES[size])
