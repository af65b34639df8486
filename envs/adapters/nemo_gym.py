"""Environments of a NeMo-Gym resources server, over its own HTTP; the package nemo-gym is not needed here.

    POST /seed_session   a row of the data set; the answer's cookies name the session
    POST /TOOL           the arguments of a call; the answer's text is its result
    POST /verify         the row, and `response`: items of OpenAI's Responses API, by the policy; the answer has the reward

Invariants:
- Each episode has a session of its own, its cookies.
- Only tools that the row lists are called: a policy that names another path of the server, such as /verify, is told that there is
  none. What the server finds invalid (404, 422) is told, too. Every other error, and a lost connection, fails the episode by
  `environment`.
- A message without a call ends the episode, as `max_turns` does: both are verified.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from ...configs.environments import NemoGym
from ...errors import ConfigError, EnvError, describe
from ..base import JSON, Message, Observation, StepResult, Task, ToolCall, ToolSpec, as_number
from ..dataset.rows import open_rows
from ..epochs import EpochOrder, numbers_of_split
from ..simple import SimpleEnv, Split
from .turns import turn_metrics

CONNECT_S = 30.0  # until the server has accepted a connection; how long it computes is the step's deadline
SHOWN = 300  # most characters of a server's error that the policy reads
REFUSED = (404, 422)  # statuses of calls that are the policy's fault
PARAMETERS = "responses_create_params"  # column of a row: the request that its conversation begins with
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class RefusedCall(Exception):
    """The server refuses a call; the message says why."""


class NemoGymEnv(SimpleEnv):
    """One server; each row of its data is a task."""

    def __init__(self, config: NemoGym, split: Split, seed: int, key: str = "env") -> None:
        """Raises ConfigError naming a key below `key`: the address is no URL, the data cannot be read, or a row of this split is
        none of NeMo-Gym's."""
        super().__init__(split=split, seed=seed)
        self.config, self.name = config, config.name or "nemo_gym"
        self._url = config.url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise ConfigError(f"{key}.url: {config.url!r} is not of the form http://HOST:PORT")
        other = config.evaluation if split == "eval" and isinstance(config.evaluation, str) else ""
        self._key = f"{key}.{'evaluation' if other else 'path'}"
        self._rows = open_rows(self._key, other or config.path)
        numbers = numbers_of_split(
            len(self._rows), config.evaluation, split, key=key, what=f"rows of {Path(config.path).name}"
        )
        self._order = EpochOrder(numbers, split, seed)
        self._http: aiohttp.ClientSession | None = None

    def __len__(self) -> int:
        """Rows in an epoch."""
        return len(self._order.numbers)

    def check(self) -> None:
        """Read every row of this split. Raises ConfigError naming the file and the line of the first that cannot be used."""
        for number in self._order.numbers.tolist():
            try:
                read_prompt(self._rows.row(number))
            except ValueError as error:
                raise ConfigError(f"{self._key}: {self._rows.place(number)}: {error}") from None

    def task(self, index: int) -> Task:
        number = self._order.number(index)
        try:
            row = self._rows.row(number)
            read_prompt(row)
        except ValueError as error:
            raise EnvError(f"{self._rows.place(number)}: {error}") from None
        return Task(f"{self.name}-{self.split}-{number}", {"row": row})

    async def reset(self, task: Task) -> Observation:
        self._row: JSON = task.payload["row"]
        self._output: list[JSON] = []  # what the policy said and called, as items of OpenAI's Responses API
        self._turns = self._invalid_calls = 0
        messages, tools = read_prompt(self._row)
        self._names = {tool.name for tool in tools}
        # The host in `env.url` may be an IP address, whose cookies a jar that is not `unsafe` drops.
        jar = aiohttp.CookieJar(unsafe=True)
        self._http = aiohttp.ClientSession(cookie_jar=jar, timeout=aiohttp.ClientTimeout(None, sock_connect=CONNECT_S))
        await self._post("/seed_session", self._row)
        return Observation(messages, tools)

    async def step(self, message: Message) -> StepResult:
        self._turns += 1
        if message.malformed:
            self._invalid_calls += 1
            replies = (Message("user", f"error: {message.malformed}"),)
        else:
            if message.content or not message.tool_calls:
                self._output.append(_output_message(f"msg_{self._turns}", message.content))
            replies = tuple([await self._call(call) for call in message.tool_calls])
        goes_on = bool(message.malformed or message.tool_calls)
        if goes_on and self._turns < self.config.max_turns:
            return StepResult(replies, metrics=turn_metrics(self._turns, self._invalid_calls))
        verdict = await self._verify()
        reward = as_number(verdict.get("reward"))
        if reward is None:
            raise EnvError(f"{self._url}/verify answered without a reward: {json.dumps(verdict)[:SHOWN]}")
        metrics = {
            name: value
            for name in verdict
            if name not in self._row and (value := as_number(verdict[name])) is not None and math.isfinite(value)
        }
        metrics.pop("reward", None)
        return StepResult(
            replies,
            reward,
            done=True,
            truncated=goes_on,
            metrics=metrics | turn_metrics(self._turns, self._invalid_calls),
        )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def _call(self, call: ToolCall) -> Message:
        # Also in the record where the policy called wrongly: verifiers may count it.
        call_id = call.id or f"call_{len(self._output)}"
        arguments = json.dumps(call.arguments)
        self._output.append({"type": "function_call", "call_id": call_id, "name": call.name, "arguments": arguments})
        try:
            if call.name not in self._names:
                raise RefusedCall(f"there is no tool {call.name!r}; use {', '.join(sorted(self._names)) or 'none'}")
            text = await self._post(f"/{call.name}", call.arguments, refused=REFUSED)
        except RefusedCall as error:
            self._invalid_calls += 1
            text = f"error: {error}"
        self._output.append({"type": "function_call_output", "call_id": call_id, "output": text})
        return Message("tool", text, tool_call_id=call.id, name=call.name)

    async def _verify(self) -> JSON:
        parameters = self._row[PARAMETERS]
        response = {
            "id": "response",
            "object": "response",
            "created_at": 0,
            "model": "policy",
            "output": self._output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": parameters.get("tools") or [],
        }
        text = await self._post("/verify", self._row | {"response": response})
        try:
            verdict = json.loads(text)
        except ValueError:
            verdict = None
        if not isinstance(verdict, dict):
            raise EnvError(f"{self._url}/verify answered what is no JSON object: {text[:SHOWN]}")
        return verdict

    async def _post(self, path: str, body: JSON, refused: tuple[int, ...] = ()) -> str:
        """The text of the resources server's answer. Raises RefusedCall for a status in `refused`, EnvError."""
        assert self._http is not None  # reset has made it
        try:
            async with self._http.post(f"{self._url}{path}", json=body) as response:
                text = (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, OSError) as error:
            raise EnvError(f"the NeMo-Gym server at {self._url} cannot be used: {describe(error)}") from error
        if response.status in refused:
            raise RefusedCall(text[:SHOWN])
        if response.status >= 300:
            raise EnvError(f"{self._url}{path} answered {response.status}: {text[:SHOWN]}")
        return text


def read_prompt(row: JSON) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
    """The messages and tools that the conversation of a data set's row begins with. Raises ValueError: the row is not one of
    NeMo-Gym's, or has what cannot be played."""
    parameters = row.get(PARAMETERS)
    if not isinstance(parameters, Mapping):
        raise ValueError(f"it has no {PARAMETERS!r}; it has {', '.join(row) or 'no columns'}")
    given = parameters.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError(f"its {PARAMETERS}.input is {given!r:.60}; allowed are text and a list of messages")
    messages = tuple(_message(item) for item in given)
    if instructions := parameters.get("instructions"):
        messages = (Message("system", str(instructions)), *messages)
    if messages[-1].role == "assistant":
        raise ValueError(f"its {PARAMETERS}.input ends with the assistant, which leaves nothing to answer")
    return messages, tuple(_tool(tool) for tool in parameters.get("tools") or ())


def _message(item: Any) -> Message:
    role = ROLES.get(item.get("role", "")) if isinstance(item, Mapping) else None
    if role is None:
        raise ValueError(f"its {PARAMETERS}.input has {item!r:.60}; allowed are messages of {', '.join(ROLES)}")
    content = item.get("content")
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    if not isinstance(content, str):
        raise ValueError(f"its {PARAMETERS}.input has a message that is not text: {item!r:.60}")
    return Message(role, content)  # pyright: ignore[reportArgumentType]  (one of ROLES)


def _tool(tool: Any) -> ToolSpec:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ValueError(f"its {PARAMETERS}.tools has {tool!r:.60}; allowed are functions, which have a name")
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    return ToolSpec(tool["name"], tool.get("description") or "", dict(parameters))


def _output_message(name: str, text: str) -> JSON:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": name, "role": "assistant", "status": "completed", "content": [part]}
