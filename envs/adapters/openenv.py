"""Environments of an OpenEnv server, over its own WebSocket protocol; the package openenv is not needed here.

Invariants:
- Each episode has a session of its own, a WebSocket, which ends with the episode.
- The policy acts by one tool, `act`, whose schema is that of the server's action. What the server finds invalid is told to the
  policy and not played. Any other error, and a connection that is lost, is a failure of the environment.
- The reward of a step is the sum of its actions' rewards. `done` of the server ends the episode, `max_turns` cuts it off.
"""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from ...configs.environments import OpenEnv
from ...errors import ConfigError, EnvError, describe
from ..base import JSON, Message, Observation, StepResult, Task, ToolCall, ToolSpec
from ..simple import SimpleEnv, Split
from .turns import turn_metrics

TOOL = "act"
CONNECT_S = 30.0  # until a server has accepted a connection; how long it computes is the step's deadline
MESSAGE = 64 << 20  # largest message of a server in bytes
SHOWN = 300  # most characters of a server's error that the policy reads
BOOKKEEPING = ("metadata", "done", "reward")  # fields of every observation that are not shown


class InvalidAction(Exception):
    """The server refuses an action; the message says why."""


class OpenEnvEnv(SimpleEnv):
    """One server; each task is a seed of its reset."""

    def __init__(self, config: OpenEnv, split: Split, seed: int, key: str = "env") -> None:
        """Raises ConfigError naming `key`: the address is no URL."""
        super().__init__(split=split, seed=seed)
        self.config, self.name = config, config.name or "openenv"
        self._url = config.url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"{key}.url: {config.url!r} is not of the form http://HOST:PORT")
        self._http: aiohttp.ClientSession | None = None
        self._socket: Any = None
        self._turns = self._invalid = 0

    def task(self, index: int) -> Task:
        seed = self.rng(index).getrandbits(31)
        return Task(f"{self.name}-{self.split}-{self.seed}-{index}", {"seed": seed})

    async def reset(self, task: Task) -> Observation:
        self._turns = self._invalid = 0
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECT_S))
        try:
            async with self._http.get(f"{self._url}/schema") as response:
                if response.status != 200:
                    raise EnvError(f"{self._url}/schema answered {response.status}")
                schema = (await response.json())["action"]
            self._socket = await self._http.ws_connect(f"{self._url.replace('http', 'ws', 1)}/ws", max_msg_size=MESSAGE)
            seen = await self._ask("reset", {"seed": task.payload["seed"]})
        except (aiohttp.ClientError, OSError, LookupError, ValueError, InvalidAction) as error:
            raise EnvError(f"the OpenEnv server at {self._url} cannot be used: {describe(error)}") from error
        opening = "\n".join(filter(None, (self.config.prompt, _text(seen))))
        spec = ToolSpec(TOOL, str(schema.get("description") or "Take an action."), _parameters(schema))
        return Observation((Message("user", opening),), (spec,))

    async def step(self, message: Message) -> StepResult:
        self._turns += 1
        if not message.tool_calls:
            self._invalid += 1
            told = f"error: {message.malformed}" if message.malformed else f"error: call the tool {TOOL}"
            return self._result((Message("user", told),), 0.0, done=False)
        replies: list[Message] = []
        total, done = 0.0, False
        for call in message.tool_calls:
            text, reward, done = ("error: the episode is over", 0.0, True) if done else await self._act(call)
            replies.append(Message("tool", text, tool_call_id=call.id, name=call.name))
            total += reward
        return self._result(tuple(replies), total, done=done)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _act(self, call: ToolCall) -> tuple[str, float, bool]:
        """What the policy reads, the reward, and whether the episode is over."""
        if call.name != TOOL:
            self._invalid += 1
            return f"error: there is no tool {call.name!r}; use {TOOL}", 0.0, False
        try:
            seen = await self._ask("step", call.arguments)
        except InvalidAction as error:
            self._invalid += 1
            return f"error: {error}", 0.0, False
        return _text(seen), float(seen.get("reward") or 0.0), bool(seen.get("done"))

    def _result(self, replies: tuple[Message, ...], reward: float, *, done: bool) -> StepResult:
        metrics = turn_metrics(self._turns, self._invalid)
        over = not done and self._turns >= self.config.max_turns
        return StepResult(replies, reward, done or over, truncated=over, metrics=metrics)

    async def _ask(self, kind: str, data: JSON) -> JSON:
        """The server's answer. Raises InvalidAction, EnvError."""
        try:
            await self._socket.send_json({"type": kind, "data": data})
            got = await self._socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise EnvError(f"the connection to {self._url} is lost: {describe(error)}") from error
        if got.type is not aiohttp.WSMsgType.TEXT:
            raise EnvError(f"{self._url} closed the connection: {got.extra or got.data or got.type.name}")
        answer = json.loads(got.data)
        if answer["type"] != "error":
            return answer["data"]
        if answer["data"].get("code") == "VALIDATION_ERROR":
            raise InvalidAction(str(answer["data"].get("message", ""))[:SHOWN])
        raise EnvError(f"{self._url}: {json.dumps(answer['data'])[:SHOWN]}")


def _parameters(schema: JSON) -> JSON:
    """The schema of the tool: that of the action without what is the library's own."""
    properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
    rest = {name: schema[name] for name in ("required", "$defs") if name in schema}
    return {"type": "object", "properties": properties} | rest


def _text(seen: JSON) -> str:
    """An observation for the policy: its only text as it is, else JSON."""
    shown = {name: value for name, value in seen["observation"].items() if name not in BOOKKEEPING}
    values = list(shown.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(shown)
