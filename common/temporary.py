"""Temporary folders of processes that do not clean up when they are killed: inference servers leave sockets and rendezvous files.

Invariants:
- A folder is removed only after every process that inherited its lock has ended: by the next process that makes one, or by a
  launcher that ends.
- The path is short: it holds Unix sockets, whose paths may have 107 characters.
"""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "slipstream-server-"
LOCK = ".lock"


def temporary_environment() -> dict[str, str]:
    """Environment variables that give the program that replaces this process a temporary folder of its own. Compiled kernels
    stay in torch's usual folder, for the next process to find."""
    kernels = f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    variables = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", kernels)}
    remove_abandoned_folders()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / LOCK).exists():
            break
        os.close(lock)  # another process took the folder for an abandoned one before it was locked
    os.set_inheritable(lock, True)  # held until this process, or the program that replaces it, ends
    return variables | {"TMPDIR": str(folder)}


def remove_abandoned_folders() -> None:
    """Remove the folders on this host whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder / LOCK, os.O_RDWR)
        except OSError:  # removed by another process, of another user, or none of ours
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
