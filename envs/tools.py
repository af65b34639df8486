"""Tools: their specification for the policy, and the functions behind them; and how an environment runs what blocks.

Invariants:
- `in_thread` returns control to the event loop at once: hundreds of episodes share it.
- When its caller is cancelled, a function is interrupted at its next Python instruction; one that runs none, because it sleeps or
  is C code, is abandoned. It does not keep the process alive, and its result is dropped.
- A wrong call of the policy raises `InvalidCall`; the policy receives its message as the tool's result.
- A tool that fails, or exceeds its deadline, raises a plain ToolError; the policy never sees it, and it never becomes a reward.
- The calculator cannot hang or exhaust memory: length, depth and the size of every number are bounded before it computes.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import contextvars
import functools
import inspect
import operator
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from ..common import tasks
from ..common.spans import Stopwatch
from ..common.unawaited import traced, without_await
from ..errors import DeadlineExceeded, ToolError, describe_user_error, with_deadline
from .base import JSON, Image, Message, ToolCall, ToolSpec

T = TypeVar("T")

MAX_EXPRESSION = 200  # characters: more than any arithmetic task needs, and shallow enough for the recursive parser
MAX_BITS = 256  # bits of the largest integer (77 digits): a result must not flood the policy's context
PARSES = 10  # of one expression, before CPython is believed that it cannot build the tree
TIMES_KEPT = 1000  # calls of one step whose times are kept: an environment may make any number
NAME_KEPT = 200  # characters of a tool's name there
TOOL_S = 60.0  # longest tool call outside a run


class ToolTime(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call of a tool that has ended, in seconds since the epoch. `error`: `invalid` by the policy, `tool`, `cancelled`, or ""."""

    tool: str
    begin: float
    end: float
    error: Literal["", "invalid", "tool", "cancelled"] = ""


class ToolCallTracker:
    """The tool calls of one episode: `tool_s` is the longest call in seconds, `tool` the name of the running tool or "", `ended`
    those that ended since `take_ended`. Entered, it is the tracker of this context, and of tasks and threads that start in it."""

    def __init__(self, tool_s: float = TOOL_S) -> None:
        self.tool_s = tool_s
        self.tool = ""
        self.ended: list[ToolTime] = []

    def take_ended(self) -> tuple[ToolTime, ...]:
        ended, self.ended = self.ended, []
        return tuple(ended)

    @contextlib.contextmanager
    def timed(self, tool: str) -> Iterator[None]:
        """A call of `tool`."""
        watch = Stopwatch()
        error: Literal["", "invalid", "tool", "cancelled"] = ""
        try:
            yield
        except InvalidCall:
            error = "invalid"
            raise
        except ToolError:
            error = "tool"
            raise
        except BaseException:
            error = "cancelled"
            raise
        finally:
            if len(self.ended) < TIMES_KEPT:
                self.ended.append(ToolTime(tool[:NAME_KEPT], watch.began, watch.now(), error))

    def __enter__(self) -> None:
        self._token = _TRACKER.set(self)

    def __exit__(self, *_: object) -> None:
        _TRACKER.reset(self._token)


_TRACKER: contextvars.ContextVar[ToolCallTracker] = contextvars.ContextVar("tool calls")


def current_tools() -> ToolCallTracker:
    """The tracker of this context; a new one outside a run."""
    return _TRACKER.get(None) or ToolCallTracker()


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """`function(*arguments)` in a thread of its own; raises what it raises. For everything that blocks or computes for long:
    verifiers, task generators, clients that are not asynchronous. When the caller is cancelled, or its deadline passes, the
    function is interrupted. Threads share the interpreter's lock: a function that holds it for minutes, such as a pathological
    regular expression, belongs in a process."""
    work = functools.partial(contextvars.copy_context().run, traced, function, *arguments)
    return await tasks.in_thread(work, getattr(function, "__qualname__", type(function).__name__), interrupt=True)


class InvalidCall(ToolError):
    """The policy called the tool wrongly; the message is one line that says how to call it."""


Result = str | list[str | Image]
"""What the policy is shown of a call: text, or texts and images one after the other; the `at` of an image is not used."""


class Tool(msgspec.Struct, frozen=True):
    """A tool: its specification, and the function or coroutine function from arguments to the text that the policy reads, and the
    images that it sees. `run` raises InvalidCall for wrong arguments. A plain function is called in a thread, and may block."""

    spec: ToolSpec
    run: Callable[[JSON], Result] | Callable[[JSON], Awaitable[Result]]


async def call_tool(tools: Mapping[str, Tool], call: ToolCall) -> tuple[Message, bool]:
    """The `tool` message that answers `call`, and whether the call was valid. Raises ToolError: the tool failed, or did not return
    within `rollout.tool_s`."""
    tracker = current_tools()
    try:
        if call.name not in tools:
            raise InvalidCall(f"there is no tool {call.name!r}; use {', '.join(sorted(tools)) or 'none'}")
        tracker.tool = call.name  # stays set when the caller's own deadline passes first
        with tracker.timed(call.name):
            result, valid = await _run(tools[call.name], call.arguments, tracker.tool_s), True
    except InvalidCall as error:
        result, valid = f"error: {error}", False
    tracker.tool = ""
    content, images = "", list[Image]()
    for part in [result] if isinstance(result, str) else result:
        if isinstance(part, Image):
            images.append(Image(part.data, at=len(content)))
        else:
            content += part
    return Message("tool", content, tool_call_id=call.id, name=call.name, images=tuple(images)), valid


class ToolUse:
    """Answers the calls of one episode, and counts them."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._calls = self._errors = 0

    async def answers(self, message: Message) -> tuple[Message, ...]:
        """What follows a message of the policy that calls tools, or that cannot be read. Raises ToolError as `call_tool`."""
        if message.malformed:
            self._errors += 1
            return (Message("user", f"error: {message.malformed}"),)
        answered = [await call_tool(self._tools, call) for call in message.tool_calls]
        self._calls += len(answered)
        self._errors += sum(not valid for _, valid in answered)
        return tuple(reply for reply, _ in answered)

    @property
    def metrics(self) -> dict[str, float]:
        return {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}


async def _run(tool: Tool, arguments: JSON, seconds: float) -> Result:
    run, name = tool.run, tool.spec.name
    work = run(arguments) if inspect.iscoroutinefunction(run) else in_thread(run, arguments)
    hint = "look at the tool, or raise rollout.episode_s, which limits a call, too"
    try:
        content = await with_deadline(seconds, work, who="an episode", waits_for=f"the tool {name!r}", hint=hint)
    except ToolError:
        raise
    except DeadlineExceeded as error:
        raise ToolError(str(error)) from error
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and tasks.being_cancelled():
            raise
        raise ToolError(f"the tool {name!r} failed: {describe_user_error(error)}") from error
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, str | Image) for part in content):
        return content
    why = without_await(content)
    raise ToolError(
        f"the tool {name!r}: {why}" if why else f"the tool {name!r} returned {type(content).__name__}, not text"
    )


def calculate(expression: str) -> str:
    """The value of an arithmetic expression over + - * / // % ** and parentheses, exact for integers. Raises InvalidCall: not
    arithmetic, too long, too large, or undefined such as a division by zero."""
    if len(expression) > MAX_EXPRESSION:
        raise InvalidCall(f"the expression has {len(expression)} characters; at most {MAX_EXPRESSION}")
    try:
        return str(_value(_parse(expression.strip())))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidCall(f"{expression!r} is not arithmetic") from None
    except ZeroDivisionError:
        raise InvalidCall("division by zero") from None
    except OverflowError:
        raise InvalidCall("the result is too large") from None


def _parse(expression: str) -> ast.expr:
    """The tree of `expression`. CPython 3.11 counts the depth of the trees of all threads in one variable, and raises SystemError
    where two threads parse at once (cpython issue 106905); the second reading is right."""
    for _ in range(PARSES - 1):
        with contextlib.suppress(SystemError):
            return ast.parse(expression, mode="eval").body
    return ast.parse(expression, mode="eval").body


def _divide(a: int | float, b: int | float) -> int | float:
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return a / b


def _power(a: int | float, b: int | float) -> Any:
    """Bounded before it is computed: for integers |a| ** b has at most bits(a) * b bits."""
    if isinstance(a, int) and isinstance(b, int) and a.bit_length() * b > 2 * MAX_BITS:
        raise OverflowError
    return a**b


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def _value(node: ast.expr) -> int | float:
    result: Any
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            result = value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            result = _UNARY[type(op)](_value(operand))
        case _:
            raise InvalidCall("only numbers, + - * / // % ** and parentheses are allowed")
    if isinstance(result, complex) or result != result:
        raise InvalidCall("the result is not a real number")
    if abs(result) >= 1 << MAX_BITS:
        raise OverflowError
    return result


def _run_calculator(arguments: JSON) -> str:
    expression = arguments.get("expression")
    if not isinstance(expression, str) or len(arguments) != 1:
        raise InvalidCall('the calculator takes {"expression": "<arithmetic>"}')
    return calculate(expression)


# Exact arithmetic. The description is short because it is part of every prompt.
CALCULATOR = Tool(
    ToolSpec(
        "calculator",
        "Evaluate arithmetic.",
        {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    ),
    _run_calculator,
)
