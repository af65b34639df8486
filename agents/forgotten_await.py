"""Calls of `env` and `policy` that an agent forgets to await, as far as its source shows: before the first episode.

Invariants:
- Only what cannot be right is named. A coroutine that is kept, handed to another function or awaited later is not judged here: the
  first episode tells.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

METHODS = ("reset", "step", "chat", "generate")  # coroutines of an environment and a policy


def forgotten_await(agent: Callable[..., Any]) -> str:
    """What an agent (env, policy, task) calls without `await`, with its line; "" where its source shows nothing."""
    try:
        lines, first = inspect.getsourcelines(agent)
        body = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError):  # made without a file
        return ""
    if not isinstance(body, ast.AsyncFunctionDef):
        return ""
    given = {argument.arg for argument in (*body.args.posonlyargs, *body.args.args)[:2]}
    parents = {child: node for node in ast.walk(body) for child in ast.iter_child_nodes(node)}
    for call in _calls(body, given):
        if _is_forgotten(call, body, parents, given):
            place = f"{Path(inspect.getfile(agent)).name}:{first + call.lineno - 1} in {agent.__name__}"
            return f"`{ast.unparse(call.func)}(...)` is called without `await` ({place})"
    return ""


def _calls(body: ast.AST, given: set[str]) -> Iterator[ast.Call]:
    return (node for node in ast.walk(body) if _is_call(node, given))


def _is_call(node: ast.AST, given: set[str]) -> TypeGuard[ast.Call]:
    """Whether it is a call of one of the methods of what the agent was given."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in METHODS and isinstance(node.func.value, ast.Name) and node.func.value.id in given


def _is_forgotten(call: ast.Call, body: ast.AsyncFunctionDef, parents: dict[ast.AST, ast.AST], given: set[str]) -> bool:
    above = parents[call]
    if isinstance(above, ast.Return):  # of a function inside of the agent it may be awaited by the caller
        return _function_of(above, parents) is body
    if isinstance(above, ast.Assign) and len(above.targets) == 1 and isinstance(above.targets[0], ast.Name):
        name = above.targets[0].id
        uses = [n for n in ast.walk(body) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        return all(_takes_a_value(use, parents, given) for use in uses)
    return isinstance(above, ast.Expr) or _takes_a_value(call, parents, given)


def _takes_a_value(node: ast.expr, parents: dict[ast.AST, ast.AST], given: set[str]) -> bool:
    """Whether it stands where only the result of a coroutine can."""
    above = parents[node]
    return isinstance(above, ast.Attribute | ast.Subscript) or (_is_call(above, given) and node in above.args)


def _function_of(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> ast.AST:
    while not isinstance(node, ast.AsyncFunctionDef | ast.FunctionDef | ast.Lambda):
        node = parents[node]
    return node
