"""Interrupts environments and agents that block the event loop, which hundreds of other episodes share.

    watchdog thread ──the loop has not turned for BLOCK_S──> signal to the main thread ──in user code?──> raises EventLoopBlocked

Invariants:
- Only user code is interrupted, never ours: the signal handler inspects the stack.
- Time in which the whole process was stopped or starved does not count: the thread counts its own checks.
- Code that runs no Python and ignores signals, or holds the interpreter's lock, cannot be interrupted; the supervisor kills a
  worker whose loop does not turn for `launch.heartbeat_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

BLOCK_S = 5.0  # longest stretch without an `await`: it delays the tokens of all other episodes
CHECKS = 10  # checks in `BLOCK_S`; all of them must find that the loop has not turned
SIGNAL = signal.SIGURG  # ignored by processes without a handler; Go's runtime preempts with it for the same reason
PACKAGE = Path(__file__).parent.parent
UNINTERRUPTED = ("agents", "buffer", "launch", "learner", "monitor", "rollout", "weightsync")
_user_code_callers: set[CodeType] = set()


class EventLoopBlocked(BaseException):
    """Raised in user code that blocks the event loop."""


def calls_user_code(function: F) -> F:
    """Decorates a function that calls an environment or an agent: what it calls may be interrupted."""
    _user_code_callers.add(function.__code__)
    return function


class EventLoopWatchdog:
    """Context manager around an event loop in the main thread, while episodes run on it. In another thread, where no signal
    arrives, it does nothing."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._signals = threading.current_thread() is threading.main_thread()
        self._turned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop watchdog", daemon=True)

    async def __aenter__(self) -> EventLoopWatchdog:
        if self._signals:
            self._previous = signal.signal(SIGNAL, _interrupt_user_code)
            self._turning = asyncio.create_task(self._turn(), name="loop watchdog")
            self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._signals:
            self._stop.set()
            self._turning.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._turning
            self._thread.join()
            signal.signal(SIGNAL, self._previous)

    async def _turn(self) -> None:
        while True:
            self._turned = True
            await asyncio.sleep(BLOCK_S / CHECKS / 2)

    def _watch(self) -> None:
        checks = 0
        while not self._stop.wait(BLOCK_S / CHECKS):
            checks = 0 if self._turned else checks + 1
            self._turned = False
            if checks >= CHECKS:
                checks = 0
                signal.pthread_kill(self._main, SIGNAL)


def _interrupt_user_code(number: int, frame: FrameType | None) -> None:
    """Raise in the running code if the innermost frames up to one of our callers are not ours."""
    while frame is not None:
        if frame.f_code in _user_code_callers:
            raise EventLoopBlocked(
                f"held up the event loop, which has not turned for {BLOCK_S:g} s, by this call or by those just before it; "
                "use `await in_thread(function)` for what blocks"
            )
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] in UNINTERRUPTED:
            return
        frame = frame.f_back
