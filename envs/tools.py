"""Tools: what a policy is told of them, and the functions behind them.

Invariants:
- A call that the policy got wrong raises `InvalidCall` and is told to the policy as the tool's result.
- A tool that itself fails, or does not answer in time, raises a plain ToolError; that is never told to the policy and never
  becomes a reward.
- A tool runs beside the event loop: as a coroutine, or else in a thread.
- The calculator cannot hang or eat memory: length, depth and the size of every number are bounded before it computes.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import operator
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from ..errors import DeadlineExceeded, ToolError, within
from .base import JSON, Message, ToolCall, ToolSpec
from .calls import current_calls, in_thread

MAX_EXPRESSION = 200
"""Characters in one expression: beyond any arithmetic task, and shallow enough for the parser's recursion."""

MAX_BITS = 256
"""Bits of the largest integer (77 digits): a result must not flood the policy's context."""


class InvalidCall(ToolError):
    """The policy called the tool wrongly; the message is one line that tells it how."""


class Tool(msgspec.Struct, frozen=True):
    """A tool on offer: its description, and the function, or coroutine function, from arguments to the text the policy reads.

    `run` raises InvalidCall where the arguments are wrong. A plain function is called in a thread, and may block.
    """

    spec: ToolSpec
    run: Callable[[JSON], str] | Callable[[JSON], Awaitable[str]]


async def call_tool(tools: Mapping[str, Tool], call: ToolCall) -> tuple[Message, bool]:
    """The `tool` message that answers `call`, and whether the call was a valid one.

    Raises:
        ToolError: the tool itself failed, or did not answer within `rollout.tool_s`.
    """
    calls = current_calls()
    try:
        if call.name not in tools:
            raise InvalidCall(f"there is no tool {call.name!r}; use {', '.join(sorted(tools)) or 'none'}")
        calls.tool = call.name  # stays where the caller's own deadline passes first
        content, valid = await _answer(tools[call.name], call.arguments, calls.tool_s), True
    except InvalidCall as error:
        content, valid = f"error: {error}", False
    calls.tool = ""
    return Message("tool", content, tool_call_id=call.id, name=call.name), valid


async def _answer(tool: Tool, arguments: JSON, seconds: float) -> str:
    run, name = tool.run, tool.spec.name
    work = run(arguments) if inspect.iscoroutinefunction(run) else in_thread(run, arguments)
    hint = "look at the tool, or raise rollout.tool_s"
    try:
        content = await within(seconds, work, who="an episode", waits_for=f"the tool {name!r}", hint=hint)
    except ToolError:
        raise
    except DeadlineExceeded as error:
        raise ToolError(str(error)) from error
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and cancelled():
            raise
        raise ToolError(f"the tool {name!r} failed: {line(error)}") from error
    if not isinstance(content, str):
        raise ToolError(f"the tool {name!r} returned {type(content).__name__}, not text")
    return content


def cancelled() -> bool:
    """Whether somebody cancelled the task that runs now. A CancelledError in one that nobody did is the user's code's own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def line(error: BaseException) -> str:
    """An exception's name, and what it says if it says something."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def calculate(expression: str) -> str:
    """The value of an arithmetic expression over + - * / // % ** and parentheses, exact for integers.

    Raises:
        InvalidCall: not arithmetic, too long, too large, or undefined such as a division by zero.
    """
    if len(expression) > MAX_EXPRESSION:
        raise InvalidCall(f"the expression has {len(expression)} characters; at most {MAX_EXPRESSION}")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return str(_value(tree.body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise InvalidCall(f"{expression!r} is not arithmetic") from None
    except ZeroDivisionError:
        raise InvalidCall("division by zero") from None
    except OverflowError:
        raise InvalidCall("the result is too large") from None


def _divide(a: int | float, b: int | float) -> int | float:
    if isinstance(a, int) and isinstance(b, int) and a % b == 0:
        return a // b
    return a / b


def _power(a: int | float, b: int | float) -> Any:
    """Bounded before it is computed: |a| ** b of integers has at most bits(a) * b bits."""
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


CALCULATOR = Tool(
    ToolSpec(
        "calculator",
        "Evaluate arithmetic.",
        {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    ),
    _run_calculator,
)
"""Exact arithmetic. Its description is short because every episode's prompt carries it."""
