"""What survives a power cut, not only the end of a process."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Return when the file or folder is on the disk as it is now. A new or renamed file is there only when its folder is, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
