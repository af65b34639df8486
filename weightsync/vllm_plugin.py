"""vLLM's door to us: the entry point of group `vllm.general_plugins`, called in every process of a server.

Invariants:
- Importing this module imports neither torch nor vLLM; registering names a class that is imported when a server asks for it.
- An engine process never outlives the server that started it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys

BACKEND = "slipstream"
"""What `--weight-transfer-config '{"backend": ...}'` calls our receiver."""

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Make our weight receiver known, and tie a child process's life to its parent's. Safe to call twice."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "slipstream.weightsync.vllm_receiver", "Receiver")
    _die_with_parent()


def _die_with_parent() -> None:
    """Engine and worker processes survive a server that was SIGKILLed; ask the kernel to end them with it (Linux)."""
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent.pid:  # it died before the kernel knew of our wish
        os.kill(os.getpid(), signal.SIGKILL)
