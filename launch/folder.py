"""The lock of a run folder: one command at a time, and everybody else can see whether there is one.

Invariants:
- The kernel releases the lock with the process that holds it, however that ends: it never lies, as a pid in a file may.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError

LOCK = "lock"


@contextlib.contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Hold the run folder. Raises ConfigError while another command does."""
    with (run_dir / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.dir: {run_dir} is in use by another slipstream command; stop that one first"
            ) from None
        yield


def in_use(run_dir: Path) -> bool:
    """Whether a command holds the run folder now."""
    try:
        with (run_dir / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # there is no such folder, or no run has begun in it
        return False
