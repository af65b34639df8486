"""CPU starvation of a process that plays environments: for how long other processes had the cores, or it was stopped."""

from __future__ import annotations

import threading
import time

TURN_S = 0.001
LATE_S = 0.02  # by which a turn may be late where the process has its core


class CpuStarvation:
    """How long a thread that needs a core for moments only could not run, less the process's CPU time meanwhile: the process was
    stopped, or others had all cores. A thread of its own that computes and keeps the interpreter's lock takes CPU time, which does
    not count. Use as a context manager."""

    def __init__(self) -> None:
        self._so_far = 0.0, time.perf_counter(), time.process_time()  # in one: another thread reads it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="cpu starvation", daemon=True)

    def __enter__(self) -> CpuStarvation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def seconds(self) -> float:
        """So far, from when it was made."""
        seconds, seen, computed = self._so_far
        late = time.perf_counter() - seen - LATE_S
        return seconds + max(0.0, late - (time.process_time() - computed))

    def _sample(self) -> None:
        while not self._over.wait(TURN_S):
            self._so_far = self.seconds(), time.perf_counter(), time.process_time()
