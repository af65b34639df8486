"""Weights as safetensors files, for replicas that map them: on disk, or in memory that all processes of a host share.

Invariants:
- A file appears whole, by a rename, and is never written again: whoever has mapped it keeps its bytes, even once it is removed.
- `latest.json` names only files that are there, and never goes back to an earlier version.
- Writers do not disturb each other: one that was given up, because its disk was stuck, may go on in its thread while another writes
  the same version, or the next.
- Shared memory outlives processes, so each folder there is locked by its owner; one that nobody has locked is swept: by who saw
  its owner die, or by the next start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from ..errors import WeightSyncError

SHARED = Path("/dev/shm")
PREFIX = "slipstream-weights-"

LOCK_S = 10.0
"""Longest wait for other processes to sweep shared memory: it takes milliseconds, unless one of them is stopped."""

LOCK_LOOK_S = 0.05
"""Between two looks at that lock: the kernel can wait for it, but not with a deadline."""


class Manifest(msgspec.Struct, frozen=True):
    """`latest.json`: the version published last, for readers that nobody pushes to, such as another cluster.

    Attributes:
        checksum: xxh3 over the tensors in the order of `names`, see `TransferPlan`.
        full: name of the file with all tensors, "" when only a delta was written.
        delta: name of the file with what differs from version `base`, "" when there is none.
    """

    version: int
    checksum: str
    names: tuple[str, ...]
    full: str = ""
    delta: str = ""
    base: int = -1


class WeightFolder:
    """Files of the last `keep` versions in `path`."""

    def __init__(self, path: Path, keep: int) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WeightSyncError(f"cannot make {path}: {error.strerror}") from error
        self.path = path.resolve()
        self._keep = keep
        latest = read_manifest(path)
        self._versions = [latest.version] if latest else []
        self._lock = threading.Lock()

    def write(self, version: int, kind: str, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Write a file of `version`; files of versions before the last `keep` are removed.

        Raises:
            WeightSyncError: no space, no permission; or it took so long that later versions have been written.
        """
        path = self.path / f"v{version}.{kind}.safetensors"
        part = path.with_suffix(f".{uuid.uuid4().hex}.part")
        with self._lock:
            self._versions = [*(v for v in self._versions if v != version), version][-self._keep :]
            self._prune()
        try:
            save_file(dict(tensors), part, metadata={"version": str(version)})
            with self._lock:
                if version not in self._versions:
                    raise WeightSyncError("later versions have been written meanwhile")
                part.replace(path)
        except Exception as error:  # safetensors has its own for a full disk
            part.unlink(missing_ok=True)
            raise WeightSyncError(f"cannot write version {version} to {path}: {error}") from error
        return path

    def publish(self, manifest: Manifest) -> None:
        """Replace `latest.json`; what it says of another file of the same version stays. Does nothing for a version that a later
        one has overtaken."""
        with self._lock:
            if manifest.version == self._versions[-1]:
                self._publish(manifest)

    def _publish(self, manifest: Manifest) -> None:
        latest = read_manifest(self.path)
        if latest is not None and (latest.version, latest.checksum) == (manifest.version, manifest.checksum):
            full, delta, base = latest.full, latest.delta, latest.base
            if manifest.delta:
                delta, base = manifest.delta, manifest.base
            manifest = msgspec.structs.replace(manifest, full=manifest.full or full, delta=delta, base=base)
        part = self.path / "latest.part"
        part.write_bytes(msgspec.json.encode(manifest))
        part.replace(self.path / "latest.json")

    def _prune(self) -> None:
        for path in self.path.glob("v*"):
            if path.name.partition(".")[0] not in {f"v{version}" for version in self._versions}:
                path.unlink(missing_ok=True)


def read_manifest(folder: Path) -> Manifest | None:
    """What `folder` says was published last; None when nothing readable was."""
    try:
        return msgspec.json.decode((folder / "latest.json").read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


class SharedFolder:
    """A folder of this process in shared memory. Opening one removes those whose owners have died."""

    def __init__(self, root: Path = SHARED) -> None:
        try:
            with _locked(root / f"{PREFIX}{os.getuid()}.lock"):
                _sweep(root)
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
                self._owned = _try_lock(self.path)
        except OSError as error:
            raise WeightSyncError(f"weightsync.transport=shared: {root} cannot be used: {error}; take disk") from error

    def close(self) -> None:
        """Remove it; mapped files live on in those who mapped them."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._owned is not None:
            os.close(self._owned)
            self._owned = None


def sweep(root: Path = SHARED) -> None:
    """Remove what processes that died without closing it have left in shared memory. For who saw them die."""
    with contextlib.suppress(OSError, WeightSyncError), _locked(root / f"{PREFIX}{os.getuid()}.lock"):
        _sweep(root)


def _sweep(root: Path) -> None:
    """Remove our folders under `root` that no living process has locked."""
    for path in root.glob(f"{PREFIX}*/"):
        with contextlib.suppress(OSError):  # another user's
            if (lock := _try_lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None when another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    if _try(descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _try(descriptor: int) -> bool:
    """Whether the lock of an open file is ours now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_S
        while not _try(descriptor):
            if time.monotonic() > deadline:
                raise WeightSyncError(
                    f"another process has held {path} for {LOCK_S:g} s; is one of your learners stopped?"
                )
            time.sleep(LOCK_LOOK_S)
        yield
    finally:
        os.close(descriptor)
