"""Folders that go away with their process, also when it is killed: weights in shared memory, temporary files of inference servers,
private keys of roles.

Invariants:
- The process that makes a folder holds its lock, and so does every program and process that inherits the lock. `sweep` removes a
  folder whose lock is free.
- A folder gets the name that `sweep` looks for only once it is locked. A process that is killed before leaves an empty hidden one.
- The path of a temporary folder is short: it holds Unix sockets, whose paths may have 107 characters.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from pathlib import Path

from .users import user_name

SHARED_MEMORY = Path("/dev/shm")
WEIGHTS = "slipstream-weights-"  # prefix of a learner's folder in shared memory
SERVER_FILES = "slipstream-server-"  # prefix of a server's temporary folder
PRIVATE = "slipstream-private-"  # prefix of a folder with keys
PRIVATE_VARIABLE = "SLIPSTREAM_PRIVATE"  # names the one of a process
_LOCK = ".lock"


class OwnedFolder:
    """A new folder of this process in `root`. Making one removes those of dead processes.

    Args:
        inherited: a program that replaces this process holds the lock in its turn.

    Raises:
        OSError: `root` cannot be written.
    """

    def __init__(self, root: Path, prefix: str, *, inherited: bool = False) -> None:
        sweep(root, prefix)
        folder = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=root))
        (folder / _LOCK).touch()
        self._lock = _try_lock(folder)
        if inherited and self._lock is not None:
            os.set_inheritable(self._lock, True)
        self.path = folder.rename(root / folder.name.removeprefix("."))

    def close(self) -> None:
        """Remove it; processes that have mapped its files keep them."""
        _discard(self.path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def private_folder(*, inherited: bool = False) -> OwnedFolder:
    """A folder that only this user can read: in memory, where the host has a file system there. `inherited` as in `OwnedFolder`."""
    root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return OwnedFolder(root, PRIVATE, inherited=inherited)


def sweep(root: Path, prefix: str) -> None:
    """Remove the folders of dead processes."""
    for folder in root.glob(f"{prefix}*/"):
        with contextlib.suppress(OSError):  # of another user, or no owned folder: it has no lock
            if (lock := _try_lock(folder)) is not None:
                try:
                    _discard(folder)
                finally:
                    os.close(lock)


def remove_tree(folder: Path) -> None:
    """Remove a folder that its programs have nested as deep as they like, and closed: what is in its folders is moved up, until
    none has any. Raises OSError."""
    waiting = [folder]
    while waiting:
        inner = waiting.pop()
        os.chmod(inner, 0o700)
        for entry in list(os.scandir(inner)):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
            elif inner == folder:
                waiting.append(Path(entry.path))
            else:
                os.chmod(entry.path, 0o700)  # a folder that its owner may not write stays where it is
                moved = folder / uuid.uuid4().hex
                os.rename(entry.path, moved)
                waiting.append(moved)
        if inner != folder:
            os.rmdir(inner)
    os.rmdir(folder)


def _discard(folder: Path) -> None:
    """As far as it can be: a program that is ending may still make and remove files in it."""
    try:
        remove_tree(folder)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)


def temporary_environment() -> dict[str, str]:
    """Environment variables that give the program that replaces this process a temporary folder of its own. Compiled kernels
    stay in torch's usual folder, for the next process to find."""
    root = tempfile.gettempdir()
    kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{root}/torchinductor_{user_name()}")
    folder = OwnedFolder(Path(root), SERVER_FILES, inherited=True)
    return {"TMPDIR": str(folder.path), "TORCHINDUCTOR_CACHE_DIR": kernels}


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None when another process holds it."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
