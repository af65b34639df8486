"""Processes that end with the process that started them, also when that one is killed. Linux only; elsewhere they survive it.

`python -m slipstream.common.process COMMAND...` does this for a command that is not ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PARENT = "SLIPSTREAM_PARENT"  # variable with the id of the process that started a role


def set_parent_death_signal(parent: int | None = None) -> None:
    """Have the kernel kill this process as soon as process `parent`, which started it, ends; exit if it has ended already.

    Without `parent` it is the process that `PARENT` names, else the parent of now.
    """
    if sys.platform != "linux":
        return
    if parent is None:
        parent = int(os.environ.get(PARENT) or os.getppid())
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


if __name__ == "__main__":
    set_parent_death_signal(os.getppid())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and a command would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.execvp(sys.argv[1], sys.argv[1:])
