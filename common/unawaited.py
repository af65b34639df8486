"""Coroutines of user code that are not awaited, named with the user's line that made them.

    reply = policy.chat(messages)     handed on where a message is expected: `without_await` names it
    env.step(reply)                   dropped: Python warns when it is collected, `UnawaitedLog` names it

Invariants:
- Only coroutines that a line of the user made count, no library's and none of ours.
- One that is dropped is told to the log that was entered in the context in which it was dropped, and to no other. One that the
  collector of cycles finds is told to none: it may be of another context.
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar, Token
from pathlib import Path
from typing import TextIO, TypeVar

import msgspec

from ..errors import is_user_file

T = TypeVar("T")

DROPPED = re.compile(r"coroutine '(?P<name>[^']*)' was never awaited")  # Python's own warning
ORIGIN = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+), in (?P<function>.*)$', re.MULTILINE)  # its traceback
DEPTH = 2  # frames that a coroutine remembers: the line that made it, and, where a library wraps it, who called that
_LOG: ContextVar[UnawaitedLog | None] = ContextVar("unawaited coroutines", default=None)


class UnawaitedLog:
    """Enter it around user code: `lines` are then its coroutines that were dropped, one line each. Coroutines of this thread
    remember from then on where they were made; for other threads see `traced`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._tokens: list[Token[UnawaitedLog | None]] = []

    def __enter__(self) -> UnawaitedLog:
        _watch()
        self._tokens.append(_LOG.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _LOG.reset(self._tokens.pop())


def without_await(value: object) -> str:
    """What the first coroutine in a value is, and the user's line that made it; "" where there is none. It is closed: Python does
    not warn of it, too."""
    if not inspect.iscoroutine(value):
        return next(filter(None, map(without_await, _members(value))), "")
    code, origin = value.cr_code, value.cr_origin or ()
    made = next((_place(*frame) for frame in origin if is_user_file(frame[0])), "")
    if not made and is_user_file(code.co_filename):
        made = f"defined at {Path(code.co_filename).name}:{code.co_firstlineno}"
    value.close()
    return _text(value.__qualname__, made)


def traced(function: Callable[..., T], *arguments: object) -> T:
    """`function(*arguments)`, whose coroutines remember where they were made, also in another thread."""
    _trace()
    return function(*arguments)


def _members(value: object) -> Iterable[object]:
    if isinstance(value, msgspec.Struct):
        return [getattr(value, name) for name in value.__struct_fields__]
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list | tuple) else ()


def _text(qualname: str, made: str) -> str:
    return f"`{qualname.rpartition('.')[2]}(...)` was called without `await`{made and f' ({made})'}"


def _place(file: str, line: int | str, function: str) -> str:
    return f"{Path(file).name}:{line} in {function}"


def _watch() -> None:
    """Have Python tell us, each time, of a coroutine that is dropped, and where it was made."""
    global _others
    _trace()
    if _follow_collector not in gc.callbacks:
        gc.callbacks.append(_follow_collector)
    if warnings.showwarning is not _show:
        warnings.filterwarnings("always", DROPPED.pattern, RuntimeWarning)
        _others, warnings.showwarning = warnings.showwarning, _show


def _follow_collector(phase: str, info: object) -> None:
    global _collecting
    _collecting = phase == "start"


def _trace() -> None:
    if not sys.get_coroutine_origin_tracking_depth():
        sys.set_coroutine_origin_tracking_depth(DEPTH)


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """In place of `warnings.showwarning`."""
    log, text = _LOG.get(), str(message)
    dropped, origin = DROPPED.match(text), list(ORIGIN.finditer(text))
    if log is not None and not _collecting and dropped and origin and is_user_file(origin[-1]["file"]):
        log.lines.append(_text(dropped["name"], _place(*origin[-1].group("file", "line", "function"))))
        return
    _others(message, category, filename, lineno, file, line)


_others: Callable[..., None] = warnings.showwarning  # shows all other warnings
_collecting = False  # while cycles are collected
