"""What breaks off an environment or an agent that holds up the event loop, on which hundreds of other episodes wait.

    a thread of its own ──the loop has not turned for BLOCK_S──> signal to the main thread ──in user code?──> raises Blocked there

Invariants:
- Only code that `play` has called is broken off, never ours: the signal's handler looks at what runs.
- Time in which the whole process stood still, stopped or starved, does not count: the watching thread counts its own looks.
- What runs no Python and heeds no signal, or holds the interpreter's lock, cannot be broken off; a worker whose loop does not turn
  for `launch.heartbeat_s` is killed and started again.
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

BLOCK_S = 5.0
"""Longest stretch without an `await`: tokens of all other episodes arrive that much later."""

LOOKS = 10
"""Looks in `BLOCK_S`; all of them must find that the loop has not turned."""

SIGNAL = signal.SIGURG
"""Ignored by whoever has no handler for it; Go's runtime ends its loops with it for the same reason."""

PACKAGE = Path(__file__).parent.parent
OURS = ("agents", "buffer", "launch", "learner", "monitor", "rollout", "weightsync")
"""Folders whose code is not broken off."""

_user_code: set[CodeType] = set()
"""Functions whose callees are not ours."""


class Blocked(BaseException):
    """Raised in code that holds up the event loop."""


def calls_user_code(function: F) -> F:
    """Decorator of what calls an environment or an agent: what it calls may be broken off."""
    _user_code.add(function.__code__)
    return function


class LoopGuard:
    """Context manager around an event loop in the main thread, as long as episodes are played on it. In another thread, where no
    signal arrives, it does nothing."""

    def __init__(self) -> None:
        self._main = threading.get_ident()
        self._signals = threading.current_thread() is threading.main_thread()
        self._turned = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop guard", daemon=True)

    async def __aenter__(self) -> LoopGuard:
        if self._signals:
            self._before = signal.signal(SIGNAL, _break_off)
            self._turning = asyncio.create_task(self._turn(), name="loop guard")
            self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._signals:
            self._over.set()
            self._turning.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._turning
            self._thread.join()
            signal.signal(SIGNAL, self._before)

    async def _turn(self) -> None:
        while True:
            self._turned = True
            await asyncio.sleep(BLOCK_S / LOOKS / 2)

    def _watch(self) -> None:
        looks = 0
        while not self._over.wait(BLOCK_S / LOOKS):
            looks = 0 if self._turned else looks + 1
            self._turned = False
            if looks >= LOOKS:
                looks = 0
                signal.pthread_kill(self._main, SIGNAL)


def _break_off(number: int, frame: FrameType | None) -> None:
    """Raise in what runs now, if that is code which we called and did not write."""
    while frame is not None:
        if frame.f_code in _user_code:
            raise Blocked(f"held up the event loop for {BLOCK_S:g} s; use `await in_thread(function)` for what blocks")
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0] in OURS:
            return
        frame = frame.f_back
