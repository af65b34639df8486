"""Files that are whole or absent, and files that survive a power cut."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from ..errors import ConfigError, StoreError

T = TypeVar("T")


def is_file(path: str | Path) -> bool:
    """Whether there is such a file. Raises ConfigError where that cannot be found out, for example without permission."""
    return _looked(path, Path.is_file)


def is_folder(path: str | Path) -> bool:
    """Whether there is such a folder. Raises as `is_file`."""
    return _looked(path, Path.is_dir)


def _looked(path: str | Path, look: Callable[[Path], bool]) -> bool:
    try:
        return look(Path(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def fsync_directory(path: Path) -> None:
    """Return when the file or folder `path` is on the disk. A new or renamed file survives only if its folder is synced, too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, data: bytes, *, mode: int = 0o666, durable: bool = False) -> None:
    """Replace the file `path` by `data`: a reader sees the old file or the new one, never a part. One writer at a time.

    Args:
        mode: permissions, less the umask.
        durable: return only when the file is on the disk.

    Raises:
        OSError: the disk refused; the old file is unchanged.
    """
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # of a process that was killed
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    if durable:
        fsync_directory(path.parent)


def read_json(path: Path, kind: type[T], default: T, what: str, advice: str = "") -> T:
    """The value of `kind` in the JSON file `path`; `default` where there is no file. Raises StoreError: it is not `what`; the
    line ends with `advice`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return default
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(f"{path}: not {what}: {error}{advice and '; '}{advice}") from None


@contextlib.contextmanager
def part_of(path: Path) -> Iterator[Path]:
    """A file beside `path` to write piece by piece. It becomes `path` when the block ends, and is removed where it raises."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)  # of a process that was killed
    try:
        yield part
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def replace_directory(directory: Path, written: Path) -> None:
    """Replace `directory`, if there is one, by its sibling `written`, which is flushed first: a reader sees the old, none, or the
    new folder, never a part. A process that was killed leaves `.{name}.replaced`, which the next call removes.

    Raises:
        OSError: the disk refused.
    """
    replaced = directory.with_name(f".{directory.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    for path in [*written.rglob("*"), written]:
        fsync_directory(path)
    if directory.exists():
        directory.rename(replaced)
    written.rename(directory)
    fsync_directory(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def apply_umask(folder: Path) -> None:
    """Give every file directly in `folder` the mode that the umask allows; safetensors writes 0600."""
    mask = os.umask(0o077)
    os.umask(mask)
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(0o666 & ~mask)
