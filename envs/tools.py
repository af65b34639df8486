"""Tools: what a policy is told of them, and the functions behind them.

Invariants:
- A call that the policy got wrong raises `InvalidCall` and is told to the policy as the tool's result.
- A tool that itself fails raises a plain ToolError; that is never told to the policy and never becomes a reward.
- The calculator cannot hang or eat memory: length, depth and the size of every number are bounded before it computes.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..errors import ToolError
from .base import JSON, Message, ToolCall, ToolSpec

MAX_EXPRESSION = 200
"""Characters in one expression: beyond any arithmetic task, and shallow enough for the parser's recursion."""

MAX_BITS = 256
"""Bits of the largest integer (77 digits): a result must not flood the policy's context."""


class InvalidCall(ToolError):
    """The policy called the tool wrongly; the message is one line that tells it how."""


class Tool(msgspec.Struct, frozen=True):
    """A tool on offer: its description, and the function from arguments to the text the policy reads.

    `run` raises InvalidCall where the arguments are wrong.
    """

    spec: ToolSpec
    run: Callable[[JSON], str]


def call_tool(tools: Mapping[str, Tool], call: ToolCall) -> tuple[Message, bool]:
    """The `tool` message that answers `call`, and whether the call was a valid one.

    Raises:
        ToolError: the tool itself failed.
    """
    try:
        if call.name not in tools:
            raise InvalidCall(f"there is no tool {call.name!r}; use {', '.join(sorted(tools)) or 'none'}")
        content, valid = tools[call.name].run(call.arguments), True
    except InvalidCall as error:
        content, valid = f"error: {error}", False
    return Message("tool", content, tool_call_id=call.id, name=call.name), valid


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
