"""How long a process as a whole has waited for a core, which is no fault of what runs in it."""

from __future__ import annotations

import threading
import time

TURN_S = 0.001
LATE_S = 0.02  # by which a turn may be late where the process has its core


class IdleProcess:
    """How long another thread, which needs a core for moments only, has had none: the process was stopped, or others had all cores,
    or a thread of it computed and kept the interpreter's lock. Use as a context manager."""

    def __init__(self) -> None:
        self._so_far = 0.0, time.perf_counter()  # in one: another thread reads it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="idle process", daemon=True)

    def __enter__(self) -> IdleProcess:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def seconds(self) -> float:
        """So far, from when it was made."""
        seconds, seen = self._so_far
        return seconds + max(0.0, time.perf_counter() - seen - LATE_S)

    def _look(self) -> None:
        while not self._over.wait(TURN_S):
            self._so_far = self.seconds(), time.perf_counter()
