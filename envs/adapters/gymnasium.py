"""Gymnasium environments (`gymnasium.make(id)`) whose actions can be written as JSON.

Invariants:
- The policy acts by one tool, `act`, whose schema follows from the action space. What `action_space.contains` refuses is told to
  the policy and not played. An exception of the library is a failure of the environment.
- Observations are text: the library's own rendering (`render_mode="ansi"`) where there is one, else the values.
- The reward of a step is the sum of its actions' rewards. `terminated` ends the episode, `truncated` and `max_turns` cut it off.
- The library runs in threads, so it may compute for long.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ...common.libraries import load_library
from ...configs.environments import Gymnasium
from ...errors import ConfigError
from ..base import JSON, Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ..simple import SimpleEnv, Split
from ..tools import in_thread
from .turns import turn_metrics

TOOL = "act"
DIGITS = 4  # significant digits of a number in an observation: more is noise in a prompt
CURSOR = re.compile(r"\x1b\[[0-9;]*m(.)\x1b\[0m")  # how the toy text environments color the player's cell


class GymnasiumEnv(SimpleEnv):
    """One environment id; each task is a seed of its reset."""

    def __init__(self, config: Gymnasium, split: Split, seed: int, key: str = "env") -> None:
        """Raises ConfigError naming `key`: gymnasium is not installed, has no such id, refuses the arguments, or the actions have
        no form as JSON."""
        super().__init__(split=split, seed=seed)
        self._library = load_library(f"{key}.kind: gymnasium", "gymnasium", "envs")
        self.config, self.name = config, config.id
        self._arguments = dict(config.arguments)
        try:
            env = self._library.make(config.id, **self._arguments)
            if "ansi" in env.metadata.get("render_modes", ()) and "render_mode" not in self._arguments:
                env.close()
                self._arguments["render_mode"] = "ansi"
                env = self._library.make(config.id, **self._arguments)
        except Exception as error:  # environments raise what they like for wrong arguments
            at = "arguments" if self._arguments else "id"
            line = " ".join(str(error).split())
            raise ConfigError(
                f"{key}.{at}: gymnasium cannot make {config.id!r}: {type(error).__name__}: {line}"
            ) from error
        self._space = env.action_space
        self._renders = env.render_mode == "ansi"
        env.close()
        schema = action_schema(self._space)
        if schema is None:
            kind = type(self._space).__name__
            raise ConfigError(
                f"{key}.id: the actions of {config.id!r} are {kind}, which the tool cannot take; wrap the environment"
            )
        parameters = {"type": "object", "properties": {"action": schema}, "required": ["action"]}
        self._tools = (ToolSpec(TOOL, "Take an action.", parameters),)
        self._prompt = config.prompt or f"You act in {config.id}. An action is {self._space}. Take one in each turn."
        self._env: Any = None
        self._turns = self._invalid = 0

    def task(self, index: int) -> Task:
        seed = self.rng(index).getrandbits(31)
        return Task(f"{self.name}-{self.split}-{self.seed}-{index}", {"seed": seed})

    async def reset(self, task: Task) -> Observation:
        self._turns = self._invalid = 0
        self._env = await in_thread(lambda: self._library.make(self.config.id, **self._arguments))
        seen, _ = await in_thread(lambda: self._env.reset(seed=task.payload["seed"]))
        return Observation((Message("user", f"{self._prompt}\n\n{await in_thread(self._show, seen)}"),), self._tools)

    async def step(self, message: Message) -> StepResult:
        self._turns += 1
        if not message.tool_calls:
            self._invalid += 1
            problem = message.malformed or f"call the tool {TOOL} to act"
            return self._result((Message("user", f"error: {problem}"),), 0.0)
        replies: list[Message] = []
        reward = 0.0
        for call in message.tool_calls:
            action, problem = self._action(call)
            if problem:
                self._invalid += 1
                replies.append(Message("tool", f"error: {problem}", tool_call_id=call.id, name=call.name))
                continue
            seen, earned, terminated, truncated, _ = await in_thread(self._env.step, action)
            reward += float(earned)
            text = await in_thread(self._show, seen)
            replies.append(Message("tool", text, tool_call_id=call.id, name=call.name))
            if terminated or truncated:
                return self._result(tuple(replies), reward, done=True, truncated=not terminated)
        return self._result(tuple(replies), reward)

    async def close(self) -> None:
        if self._env is not None:
            await in_thread(self._env.close)

    def _result(
        self, replies: tuple[Message, ...], reward: float, *, done: bool = False, truncated: bool = False
    ) -> StepResult:
        over = not done and self._turns >= self.config.max_turns
        metrics = turn_metrics(self._turns, self._invalid)
        return StepResult(replies, reward, done or over, truncated or over, metrics)

    def _action(self, call: ToolCall) -> tuple[Any, str]:
        """The action of a call, and what is wrong with it; "" where it can be played."""
        if call.name != TOOL:
            return None, f"there is no tool {call.name!r}; use {TOOL}"
        if set(call.arguments) != {"action"}:
            return None, f'{TOOL} takes {{"action": ...}} and nothing else'
        given = call.arguments["action"]
        action = to_action(self._space, given)
        if action is None or not self._space.contains(action):
            return None, f"{given!r:.100} is no action; an action is {self._space}"
        return action, ""

    def _show(self, seen: Any) -> str:
        return CURSOR.sub(r"[\1]", str(self._env.render())).strip() if self._renders else str(rounded(seen))


def action_schema(space: Any) -> JSON | None:
    """The JSON schema of an action; None for a kind of space without one. By the names of gymnasium's own classes."""
    match type(space).__name__:
        case "Discrete":
            return {"type": "integer", "minimum": int(space.start), "maximum": int(space.start + space.n - 1)}
        case "Text":
            return {"type": "string", "minLength": space.min_length, "maxLength": space.max_length}
        case "MultiDiscrete" | "MultiBinary" if len(space.shape) == 1:
            return {
                "type": "array",
                "items": {"type": "integer"},
                "minItems": space.shape[0],
                "maxItems": space.shape[0],
            }
        case "Box" if len(space.shape) == 1:
            return {
                "type": "array",
                "items": {"type": "number"},
                "minItems": space.shape[0],
                "maxItems": space.shape[0],
            }
        case _:
            return None


def to_action(space: Any, given: Any) -> Any:
    """A JSON value as a value of the space's type; None where it has another form."""
    kind = type(space).__name__
    if kind == "Discrete":
        return given if isinstance(given, int) and not isinstance(given, bool) else None
    if kind == "Text":
        return given if isinstance(given, str) else None
    numbers = (int,) if kind in ("MultiDiscrete", "MultiBinary") else (int, float)
    if not isinstance(given, list) or not all(isinstance(x, numbers) and not isinstance(x, bool) for x in given):
        return None
    try:
        return np.asarray(given, dtype=space.dtype)
    except OverflowError:
        return None


def rounded(seen: Any) -> Any:
    """An observation as plain values, its numbers to `DIGITS` significant digits."""
    if isinstance(seen, dict):
        return {name: rounded(value) for name, value in seen.items()}
    if isinstance(seen, tuple | list):
        return [rounded(value) for value in seen]
    if isinstance(seen, np.ndarray):
        return rounded(seen.tolist())
    if isinstance(seen, np.generic):
        seen = seen.item()
    return float(f"{seen:.{DIGITS}g}") if isinstance(seen, float) else seen
