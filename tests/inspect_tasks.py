"""Tasks of Inspect for tests, loaded by the interpreter that has it."""

import os

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, match, scorer
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one
            b: two
        """
        if a == 99:
            os.abort()
        return a + b

    return execute


@scorer(metrics={"length": [accuracy()], "calls": [accuracy()]})
def shape():
    async def score(state, target):
        calls = sum(len(message.tool_calls or ()) for message in state.messages if message.role == "assistant")
        return Score(value={"length": len(state.output.completion), "calls": calls})

    return score


@task
def doubles(count: int = 40):
    samples = [Sample(input=f"{number} + {number}?", target=str(2 * number)) for number in range(count)]
    return Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=[match(numeric=True), shape()])
