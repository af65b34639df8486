"""A folder of a learner in memory that all processes of a host share.

Invariants:
- Shared memory outlives processes, so each folder is locked by its owner. An unlocked one is removed by the supervisor, when the
  owner's process has ended, or at the next start.
- A folder gets the name by which others find it only once it is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from ..errors import WeightSyncError

SHARED = Path("/dev/shm")
PREFIX = "slipstream-weights-"


class SharedFolder:
    """A folder of this process in shared memory. Opening one removes those whose owners have died."""

    def __init__(self, root: Path = SHARED) -> None:
        sweep(root)
        try:
            folder = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))
            self._owned = _try_lock(folder)
            self.path = folder.rename(root / folder.name.removeprefix("."))
        except OSError as error:
            raise WeightSyncError(f"weightsync.transport=shared: {root} cannot be used: {error}; take disk") from error

    def close(self) -> None:
        """Remove it; processes that have mapped its files keep them."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owned is not None:
            os.close(self._owned)
            self._owned = None


def sweep(root: Path = SHARED) -> None:
    """Remove the folders of dead processes from shared memory. The supervisor calls it after a process has ended."""
    for path in root.glob(f"{PREFIX}*/"):
        with contextlib.suppress(OSError):  # another user's
            if (lock := _try_lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None when another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
