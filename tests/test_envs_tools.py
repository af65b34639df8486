import gc
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.envs import CALCULATOR, InvalidCall, Tool, ToolCall, ToolSpec, call_tool
from slipstream.envs.tools import calculate
from slipstream.errors import ToolError

TOOLS = {"calculator": CALCULATOR}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("728 - 871", "-143"),
        ("-(2 + 3) * 4", "-20"),
        ("6 / 3", "2"),
        ("7 / 2", "3.5"),
        ("7 // 2", "3"),
        ("-7 % 3", "2"),
        ("2 ** 10", "1024"),
        ("2 ** -1", "0.5"),
        (" 1.5 + 1 ", "2.5"),
    ],
)
def test_arithmetic(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("", "not arithmetic"),
        ("2 +", "not arithmetic"),
        ("2 + 3 = 5", "not arithmetic"),
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("9.9 ** 999", "too large"),
        ("1e999 - 1", "too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("x + 1", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("True + 1", "only numbers"),
        ("1, 000", "only numbers"),
        ("1 << 9", "only numbers"),
        ("1" * 201, "characters"),
        ("(" * 100 + "1" + ")" * 100, "not arithmetic|characters"),
    ],
)
def test_what_is_refused_is_refused_in_one_line(expression, complaint):
    with pytest.raises(InvalidCall, match=complaint) as error:
        calculate(expression)
    assert "\n" not in str(error.value)


def test_expressions_are_read_in_several_threads_at_once():
    """CPython 3.11 raises SystemError where a thread's reading of an expression is interrupted by another's: in a collection of
    garbage, which runs Python code while the tree is built."""

    class Cycle:
        def __init__(self):
            self.own = self

        def __del__(self):
            time.sleep(0)  # other threads run

    def read():
        for _ in range(1000):
            for _ in range(3):
                Cycle()
            yield calculate("(1 + 2) * (3 + (4 * 5)) - 7 * (8 - 9) ** 2")

    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(3) as threads:
            values = list(chain.from_iterable(threads.map(lambda _: list(read()), range(3))))
    finally:
        gc.set_threshold(*before)
    assert values == ["62"] * 3000


def test_an_error_of_a_tool_takes_any_values_as_exceptions_do():
    assert InvalidCall("no such row", 3).args == ("no such row", 3)
    assert InvalidCall().args == ()


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-*/%(). e", max_size=200))
def test_no_expression_hangs_or_raises_anything_else(expression):
    began = time.process_time()
    try:
        assert len(calculate(expression)) < 100
    except InvalidCall:
        pass
    assert time.process_time() - began < 1.0


async def test_the_policy_receives_the_error_of_a_wrong_call():
    message, valid = await call_tool(TOOLS, ToolCall("calculator", {"expression": "1 / 0"}, id="c1"))
    assert (message.role, message.content, message.tool_call_id, valid) == (
        "tool",
        "error: division by zero",
        "c1",
        False,
    )
    message, valid = await call_tool(TOOLS, ToolCall("search", {}))
    assert message.content == "error: there is no tool 'search'; use calculator"
    assert not valid
    for arguments in ({}, {"expression": 3}, {"expression": "1", "precision": 2}):
        assert "the calculator takes" in (await call_tool(TOOLS, ToolCall("calculator", arguments)))[0].content


async def test_the_policy_never_receives_the_error_of_a_failed_tool():
    def broken(arguments):
        raise ToolError("the sandbox is gone")

    tools = {"broken": Tool(ToolSpec("broken", "", {}), broken)}
    with pytest.raises(ToolError, match="sandbox"):
        await call_tool(tools, ToolCall("broken", {}))
