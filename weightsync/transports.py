"""Transports that write a file, and which transport a config names.

    shared   one file in this host's shared memory, mapped by all its replicas
    disk     one file in the run's folder
    delta    what changed, for those who kept the version before; the whole file for the others

Invariants:
- A file is written once per version, whoever needs it and when; should a replica refuse it, the next try writes it anew.
- A delta is relative to the version published before, and only for replicas whose receipt says that they kept that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..configs.schema import TransportKind
from ..errors import within
from . import delta
from .broadcast import BroadcastTransport, Sender
from .files import Manifest, SharedFolder, WeightFolder
from .plan import Delta, File, Source
from .receipts import Receipts
from .replica import Member, in_thread
from .snapshot import Snapshot
from .transport import Carried, Transport, tell

KEPT_ON_DISK = 2
"""Versions. A reader elsewhere that has just read `latest.json` has time to open what it names."""


def make_transport(
    kind: TransportKind, sender: Sender, receipts: Receipts, *, bucket_bytes: int, folder: Path
) -> Transport:
    """The transport that `weightsync.transport` names; `folder` is where files on disk go.

    Raises:
        WeightSyncError: the folder, or shared memory, cannot be used.
    """
    if kind == "broadcast":
        return BroadcastTransport(sender, receipts, bucket_bytes)
    if kind == "shared":
        shared = SharedFolder()
        return FileTransport(WeightFolder(shared.path, keep=1), receipts, shared.close)
    if kind == "disk":
        return FileTransport(WeightFolder(folder, KEPT_ON_DISK), receipts)
    return DeltaTransport(WeightFolder(folder, KEPT_ON_DISK), receipts)


class Written:
    """Files of the newest snapshot in a folder, each written when somebody first needs it."""

    def __init__(self, folder: WeightFolder) -> None:
        self.folder = folder
        self._snapshot: Snapshot | None = None
        self._paths: dict[str, Path | None] = {}
        self._lock = asyncio.Lock()

    async def file(
        self, snapshot: Snapshot, kind: str, write: Callable[[], Path | None], seconds: float
    ) -> tuple[Path | None, int]:
        """The file that `write` makes of `snapshot`, None if it finds none worth it; and the bytes written just now.

        Raises:
            WeightSyncError, DeadlineExceeded: it cannot be written, or not in time.
        """
        async with self._lock:
            if self._snapshot is not snapshot:
                self._snapshot, self._paths = snapshot, {}
            if kind in self._paths:
                return self._paths[kind], 0
            who, what = "publisher", f"version {snapshot.version} to be written to {self.folder.path}"
            path = await within(seconds, in_thread(write, what), who=who, waits_for=what, hint="is the disk stuck?")
            self._paths[kind] = path
            return path, path.stat().st_size if path else 0

    def path(self, kind: str) -> Path | None:
        """The file of the newest snapshot, None while nobody needed it."""
        return self._paths.get(kind)

    def distrust(self) -> None:
        """Write anew what is needed next."""
        self._paths = {}


class FileTransport:
    """One whole file for everybody; `on_close` is called in the end."""

    def __init__(self, folder: WeightFolder, receipts: Receipts, on_close: Callable[[], None] | None = None) -> None:
        self._written = Written(folder)
        self._receipts = receipts
        self._on_close = on_close

    async def carry(self, snapshot: Snapshot, members: Sequence[Member], seconds: float, *, again: bool) -> Carried:
        """See `Transport`."""
        began, carried = time.perf_counter(), Carried()
        path, carried.sent_bytes = await self._written.file(snapshot, "full", lambda: self._write(snapshot), seconds)
        left = seconds - (time.perf_counter() - began)
        sources: dict[Member, Source] = {member: File(str(path)) for member in members}
        carried.failed = await tell(self._receipts, snapshot, sources, left, keep=False)
        if carried.failed and self._written.path("full") == path:
            self._written.distrust()
        carried.seconds = time.perf_counter() - began
        return carried

    def forget(self, name: str) -> None:
        """Nothing is known of anybody."""

    def close(self) -> None:
        """Remove what does not outlive the learner."""
        if self._on_close is not None:
            self._on_close()

    def _write(self, snapshot: Snapshot) -> Path:
        return write_full(self._written.folder, snapshot)


class DeltaTransport:
    """What changed since the version before, where that is smaller and the replica kept it; else the whole file."""

    def __init__(self, folder: WeightFolder, receipts: Receipts) -> None:
        self._written = Written(folder)
        self._receipts = receipts
        self._kept: dict[str, Snapshot] = {}
        self._before: Snapshot | None = None
        self._newest: Snapshot | None = None

    async def carry(self, snapshot: Snapshot, members: Sequence[Member], seconds: float, *, again: bool) -> Carried:
        """See `Transport`. With `again` everybody gets the whole file."""
        began, carried = time.perf_counter(), Carried()
        if snapshot is not self._newest:
            self._before, self._newest = self._newest, snapshot
        before = self._before
        sources: dict[Member, Source] = {}
        if before is not None and not again and alike(before, snapshot):
            near = [m for m in members if self._kept.get(m.name) is before]
            if near:
                path, wrote = await self._written.file(
                    snapshot, "delta", lambda: self._write_delta(snapshot, before), seconds
                )
                carried.sent_bytes += wrote
                if path is not None:
                    sources |= {m: Delta(str(path), before.version) for m in near}
        far = [m for m in members if m not in sources]
        if far:
            left = seconds - (time.perf_counter() - began)
            path, wrote = await self._written.file(snapshot, "full", lambda: self._write_full(snapshot), left)
            carried.sent_bytes += wrote
            sources |= {m: File(str(path)) for m in far}
        for member in members:
            self._kept.pop(member.name, None)  # until its receipt is in
        left = seconds - (time.perf_counter() - began)
        carried.failed = await tell(self._receipts, snapshot, sources, left, keep=True)
        self._kept |= {m.name: snapshot for m in members if m.name not in carried.failed and not m.left}
        if carried.failed:
            self._written.distrust()
        carried.seconds = time.perf_counter() - began
        return carried

    def forget(self, name: str) -> None:
        """It keeps no base that we know of."""
        self._kept.pop(name, None)

    def close(self) -> None:
        """Drop the snapshots."""
        self._before = self._newest = None
        self._kept.clear()

    def _write_full(self, snapshot: Snapshot) -> Path:
        return write_full(self._written.folder, snapshot)

    def _write_delta(self, snapshot: Snapshot, before: Snapshot) -> Path | None:
        parts = delta.differences(snapshot.names, before.tensors, snapshot.tensors)
        if sum(part.nbytes for part in parts.values()) >= snapshot.nbytes:
            return None
        folder = self._written.folder
        path = folder.write(snapshot.version, "delta", parts)
        folder.publish(
            Manifest(snapshot.version, snapshot.checksum, snapshot.names, delta=path.name, base=before.version)
        )
        return path


def write_full(folder: WeightFolder, snapshot: Snapshot) -> Path:
    """Write all tensors of a snapshot, and say so in the folder's manifest."""
    path = folder.write(snapshot.version, "full", dict(zip(snapshot.names, snapshot.tensors, strict=True)))
    folder.publish(Manifest(snapshot.version, snapshot.checksum, snapshot.names, full=path.name))
    return path


def alike(one: Snapshot, other: Snapshot) -> bool:
    """Whether both hold the same names, shapes and dtypes, so that one can be told as a difference to the other."""
    return one.names == other.names and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(one.tensors, other.tensors, strict=True)
    )
