"""Folders that are expensive to make and always come out the same, made once for all processes of a test run."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

VARIABLE = "SLIPSTREAM_TESTS_CACHE"
"""Names the folder of the cache. The first process of a run sets it, and removes the folder at the end."""


def open_cache() -> Path | None:
    """Make the cache, unless a process above this one has; returns the folder if it is this process that must remove it."""
    if VARIABLE in os.environ:
        return None
    os.environ[VARIABLE] = tempfile.mkdtemp(prefix="slipstream-tests-")
    return Path(os.environ[VARIABLE])


def cached(folder: Path, key: str, make: Callable[[Path], object]) -> Path:
    """Fill `folder` with what `make` writes for `key`, which says all that it depends on; returns `folder`."""
    root = os.environ.get(VARIABLE)
    if root is None:
        make(folder)
        return folder
    kept = Path(root) / hashlib.sha256(key.encode()).hexdigest()
    if not kept.exists():
        making = Path(tempfile.mkdtemp(dir=root))
        make(making)
        try:
            making.rename(kept)
        except OSError:  # another process was first
            shutil.rmtree(making)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    return folder
