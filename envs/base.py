"""The environment contract: what a policy acts on.

Invariants:
- One instance serves one episode: `reset`, then `step` until `done`, then `close`, whatever happened in between.
- An environment sees messages and rewards, never tokens, versions or sockets.
- An environment that cannot go on raises; a wrong answer is a reward. The two are never mixed.
- Its coroutines share an event loop with hundreds of others: what blocks or computes for long goes through `in_thread`.
"""

from __future__ import annotations

import random
from typing import Any, Literal, Protocol

import msgspec

JSON = dict[str, Any]
"""A JSON object that is not ours to type: a tool's JSON schema, its arguments, a task's payload."""


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call the assistant made: a tool's name and its arguments."""

    name: str
    arguments: JSON
    id: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message. `tool_calls` only on `assistant`; `tool_call_id` and `name` only on `tool`.

    `malformed` says what was wrong with an assistant message that could not be parsed into tool calls ("" when fine).
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    malformed: str = ""


class ToolSpec(msgspec.Struct, frozen=True):
    """What the policy is told of a tool; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: JSON


class Task(msgspec.Struct, frozen=True):
    """One thing to do. `payload` is the environment's own; it must be JSON."""

    id: str
    payload: JSON = {}


class Observation(msgspec.Struct, frozen=True):
    """What `reset` shows the policy: the opening messages and the tools on offer."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()


class StepResult(msgspec.Struct, frozen=True):
    """What follows an assistant message: new messages, and the reward of this step.

    `done` ends the episode; with `truncated` it ends by a limit of the environment's, not by what the policy did.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    metrics: dict[str, float] = {}


class Environment(Protocol):
    """Stateful, one instance per episode."""

    async def reset(self, task: Task) -> Observation:
        """Start the episode."""
        ...

    async def step(self, message: Message) -> StepResult:
        """Take the assistant's message."""
        ...

    async def close(self) -> None:
        """Release what the episode held; called exactly once, also after a failure."""
        ...


class TaskSource(Protocol):
    """A named, endless, deterministic supply of tasks, and of environments to try them in.

    `task(i)` must return the same task for the same `i` in every process. Training takes indices from 0 upwards;
    evaluation takes them from a disjoint source that was made with `split="eval"`.

    A source may declare `penalty`, a finite number: the reward that a failed episode is trained with where the config asks for it
    (`rollout.failures.REASON.then=train`). Without one, or with None, failed episodes of this environment are never trained on.
    """

    name: str

    def task(self, index: int) -> Task:
        """The `index`-th task, `index >= 0`. Called in a thread, never in two at once."""
        ...

    def make(self) -> Environment:
        """A fresh environment for one episode."""
        ...

    def demonstration(self, task: Task, rng: random.Random) -> tuple[Observation, tuple[Message, ...]] | None:
        """The opening and a whole conversation after it (assistant and tool messages) to imitate in a supervised warm-up.

        None when this source has none.
        """
        ...
