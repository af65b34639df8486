"""Work that blocks, kept away from the event loop, and the deadline of a tool's call.

Invariants:
- `in_thread` gives the event loop back at once: hundreds of episodes share it.
- A function that nobody waits for any more is broken off at its next line of Python; one that runs none, because it sleeps or is
  C code, is left behind and told of. It keeps no process from ending, and what it returns is dropped.
- A tool that is called by `call_tool` is waited for no longer than the episode's limit, and is known while it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

TOOL_S = 60.0
"""Longest call of a tool outside of a run."""


class Calls:
    """The tools that one episode calls.

    Attributes:
        tool_s: longest call, in seconds (`rollout.tool_s`).
        tool: the one that was called last, until it has answered.
    """

    def __init__(self, tool_s: float = TOOL_S) -> None:
        self.tool_s = tool_s
        self.tool = ""


_CALLS: contextvars.ContextVar[Calls] = contextvars.ContextVar("calls")


def current_calls() -> Calls:
    """Those of the episode that runs in this context."""
    return _CALLS.get(None) or Calls()


@contextlib.contextmanager
def counting(calls: Calls) -> Iterator[None]:
    """What is called in this context, and by tasks and threads that begin in it, is of `calls`."""
    token = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(token)


class BrokenOff(BaseException):
    """Raised in a thread whose result nobody waits for any more."""


class _Work:
    """A function in a thread of its own."""

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._function = function
        self._lock = threading.Lock()
        self._over = False
        self.done: asyncio.Future[tuple[object, BaseException | None]] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(BrokenOff):
            result, error = None, None
            try:
                result = self._function()
            except BaseException as raised:  # the caller's own code is told of it, whatever it is
                error = raised
            with self._lock:
                self._over = True
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: object, error: BaseException | None) -> None:
        if not self.done.done():
            self.done.set_result((result, error))

    def break_off(self) -> None:
        with self._lock:
            if self._over:
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(BrokenOff)
            )
        log.warning("%s is broken off, or left behind if it heeds nothing", self._thread.name)


async def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """`function(*arguments)`, in a thread of its own; raises what it raises. For everything that blocks or computes for long:
    verifiers, generators of tasks, clients that are not asynchronous.

    When the caller is cancelled, or its deadline passes, the function is broken off. The threads share the interpreter's lock: a
    function that holds it for minutes, such as a regular expression that runs away, belongs into a process.
    """
    work = _Work(functools.partial(contextvars.copy_context().run, function, *arguments), _name(function))
    try:
        result, error = await work.done
    except asyncio.CancelledError:
        work.break_off()
        raise
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
