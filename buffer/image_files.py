"""The files of images beside the store: each is kept once, by the digest of its bytes, however many trajectories name it.

    buffer.sqlite: a header names digest 3fa0...png ──> images/3f/3fa0...png

Invariants:
- A file is on the disk before a row that names it, and is never changed.
- Files stay as long as the run's folder: retention drops trajectories, and no image.
- Several processes may write the same file: it is made whole beside its place.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..common.fsio import fsync_directory
from ..common.images import BYTES_LIMIT, digest_of
from ..errors import StateError, WireError
from .trajectory import Trajectory

FOLDER = "images"
NO_IMAGES: Mapping[str, bytes] = {}
REPLY_BYTES = 64 << 20  # of the files in one reply


class ImageFiles:
    """Those of the run in `run`; their folder is made with the first of them."""

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER

    def path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def write(self, files: Mapping[str, bytes]) -> None:
        """Keep files, by name; returns when they are on the disk. Raises OSError."""
        new = [name for name in files if not self.path(name).exists()]
        folders = {self.path(name).parent for name in files}
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for name in new:
            part = self.path(name).with_name(f".{name}.{os.getpid()}")
            with part.open("wb") as file:
                file.write(files[name])
                file.flush()
                os.fsync(file.fileno())
            part.replace(self.path(name))
        # Also those of files that are there: another process may have renamed one just now, and not synced its folder yet.
        for folder in (*folders, *((self._folder, self._folder.parent) if folders else ())):
            fsync_directory(folder)

    def sizes(self) -> tuple[int, int]:
        """How many files there are, and their bytes."""
        found = [path.stat().st_size for path in self._folder.glob("*/[!.]*")]
        return len(found), sum(found)

    def read(self, name: str) -> bytes:
        """Raises StateError where there is none."""
        try:
            return self.path(name).read_bytes()
        except OSError as error:
            raise StateError(f"the image {name} is not in {self._folder}: {error.strerror or error}") from None

    def first(self, names: Iterable[str]) -> tuple[NDArray[np.uint8], ...]:
        """As many of the first files as have `REPLY_BYTES` together, at least one. Raises StateError where one is missing."""
        found, size = list[NDArray[np.uint8]](), 0
        for name in names:
            data = self.read(name)
            size += len(data)
            if found and size > REPLY_BYTES:
                break
            found.append(np.frombuffer(data, dtype=np.uint8))
        return tuple(found)


def named_files(images: Mapping[str, bytes], trajectories: Iterable[Trajectory]) -> dict[str, bytes]:
    """The files by name of the images that `trajectories` name, of `images` by digest. Raises WireError where one is missing."""
    named = {image.digest: image.name for one in trajectories for image in one.images}
    if missing := named.keys() - images.keys():
        raise WireError(f"the image {min(missing)} is named and did not come")
    return {name: images[digest] for digest, name in named.items()}


def received(arrays: Sequence[NDArray[np.uint8]]) -> dict[str, bytes]:
    """Files as they came, by digest. Raises WireError for one that is too large."""
    if any(len(array) > BYTES_LIMIT for array in arrays):
        raise WireError(f"an image has more than {BYTES_LIMIT} bytes")
    return {digest_of(data): data for data in map(np.ndarray.tobytes, arrays)}
