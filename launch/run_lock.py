"""The lock of a run folder: one command at a time, and other commands can see whether there is one.
The kernel releases it when the process that holds it ends, for whatever reason. A pid in a file could be stale.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError

LOCK = "lock"
CONTROL = "control.json"  # where the supervisor of an active run takes commands; it removes the file when it ends


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the lock. Raises ConfigError while another command holds it. An address that a killed supervisor left is removed: while
    the lock is held, `control.json` is of the process that holds it."""
    with (run_dir / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.dir: {run_dir} is in use by another slipstream command; stop that one first"
            ) from None
        (run_dir / CONTROL).unlink(missing_ok=True)
        yield


def is_locked(run_dir: Path) -> bool:
    try:
        with (run_dir / LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except BlockingIOError:
        return True
    except OSError:  # no such folder, or no run was started in it
        return False
