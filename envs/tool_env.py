"""An environment of plain functions: the policy calls them as tools, and its first message without a call is the answer.

Invariants:
- A function's schema is made from its signature and its docstring; arguments that do not fit it are told to the policy and the
  function is not called.
- A function that raises fails the episode by `tool`, a score that raises by `environment`; InvalidCall is told to the policy.
"""

from __future__ import annotations

import functools
import inspect
import typing
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from ..common.unawaited import without_await
from .base import JSON, Image, Message, Observation, StepResult, Task, ToolSpec
from .simple import SimpleEnv
from .tools import InvalidCall, Result, Tool, ToolUse, in_thread

Function = Callable[..., Any]


class ToolEnv(SimpleEnv):
    """Base of environments with tools. A subclass has `task`, `question`, `score` and `tools`."""

    turns = 8
    """Most messages of the policy; an episode without an answer by then ends truncated, with the reward 0."""

    @abstractmethod
    def question(self, task: Task) -> str | Sequence[Message]:
        """What opens the episode: a message of the user, or messages."""

    @abstractmethod
    def score(self, task: Task, answer: str) -> float | Awaitable[float]:
        """The reward of an answer. A plain function is called in a thread, and may block."""

    def tools(self) -> Sequence[Function | Tool]:
        """What the policy may call: functions, methods of this object above all, or tools."""
        return ()

    def opening(self, task: Task) -> Observation:
        """The question and the tools, as `reset` returns them and demonstrations begin."""
        return self._opening(task, [as_tool(one) for one in self.tools()])

    async def reset(self, task: Task) -> Observation:
        self._task, self._turn = task, 0
        tools = [as_tool(one) for one in self.tools()]
        self._use = ToolUse({tool.spec.name: tool for tool in tools})
        return self._opening(task, tools)

    async def step(self, message: Message) -> StepResult:
        self._turn += 1
        if not message.tool_calls and not message.malformed:
            return StepResult(reward=await self._scored(message.content), done=True, metrics=self._use.metrics)
        if self._turn == self.turns:
            return StepResult(done=True, truncated=True, metrics=self._use.metrics)
        return StepResult(await self._use.answers(message), metrics=self._use.metrics)

    def _opening(self, task: Task, tools: Sequence[Tool]) -> Observation:
        asked = self.question(task)
        messages = (Message("user", asked),) if isinstance(asked, str) else tuple(asked)
        return Observation(messages, tuple(tool.spec for tool in tools))

    async def _scored(self, answer: str) -> float:
        score: Any = self.score
        made = score(self._task, answer) if inspect.iscoroutinefunction(score) else in_thread(score, self._task, answer)
        return await made


def as_tool(function: Function | Tool) -> Tool:
    """The tool of a function: of its name, its parameters with their types, and the first paragraph of its docstring. What it
    returns is shown to the policy: text and an `Image` as they are, a list with images item by item, anything else as JSON. Raises
    TypeError: it is no function, or a parameter has no type, or one that JSON has not."""
    if isinstance(function, Tool):
        return function
    if not inspect.isroutine(function):
        raise TypeError(
            f"`tools` returned {function!r:.60}, which is no function; name one without calling it: self.look"
        )
    spec, parameters = _described(getattr(function, "__func__", function), inspect.ismethod(function))

    def arguments_of(sent: JSON) -> dict[str, Any]:
        try:
            return msgspec.structs.asdict(msgspec.convert(sent, parameters))
        except msgspec.ValidationError as error:
            raise InvalidCall(str(error)) from None

    async def awaited(sent: JSON) -> Result:
        return _tool_result(await function(**arguments_of(sent)))

    def called(sent: JSON) -> Result:
        return _tool_result(function(**arguments_of(sent)))

    return Tool(spec, awaited if inspect.iscoroutinefunction(function) else called)


def _tool_result(value: Any) -> Result:
    parts = value if isinstance(value, list) else [value]
    if any(isinstance(part, Image) for part in parts):
        return [part if isinstance(part, Image) else _text(part) for part in parts]
    return _text(value)


def _text(value: Any) -> str:
    try:
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    except TypeError as error:
        raise TypeError(without_await(value) or str(error)) from error


@functools.lru_cache(maxsize=1024)
def _described(function: Function, is_method: bool) -> tuple[ToolSpec, type[msgspec.Struct]]:
    name = function.__name__
    try:
        types = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise TypeError(f"the tool {name}: {error}, which is the type of a parameter or of what it returns") from None
    fields = list[tuple[str, Any, Any]]()
    for one in list(inspect.signature(function).parameters.values())[is_method:]:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise TypeError(f"the tool {name}: {one} is no parameter that a policy can name")
        if one.name not in types:
            raise TypeError(
                f"the tool {name}: its parameter {one.name} has no type; write {one.name}: str, for example"
            )
        try:
            msgspec.json.schema(types[one.name])
        except TypeError:
            raise TypeError(
                f"the tool {name}: its parameter {one.name} has the type {types[one.name]}, which JSON has not; take str, int, "
                "float, bool, list, dict, Literal or a dataclass"
            ) from None
        default = msgspec.NODEFAULT if one.default is one.empty else one.default
        fields.append((one.name, types[one.name], msgspec.field(default=default)))
    parameters = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
    schema = msgspec.json.schema(parameters)
    components = schema.pop("$defs")
    top = components.pop(name)
    del top["title"]
    if components:
        top["$defs"] = components
    description = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
    return ToolSpec(name, description, top), parameters
