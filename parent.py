"""Processes that end with the one that started them, also when that one is killed. Linux only; elsewhere they live on.

`python -m slipstream.parent COMMAND...` runs a command that does not know of this.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as process `parent`, which started it, ends; end it if that has happened."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the kernel knew of our wish
        os._exit(1)


if __name__ == "__main__":
    die_with(os.getppid())
    os.execvp(sys.argv[1], sys.argv[1:])
