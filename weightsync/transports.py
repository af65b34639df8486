"""Transports that write a file, and the transport that a config names.

    shared   one file in this host's shared memory, mapped by all its replicas
    disk     one file in the run's folder
    delta    what changed, for replicas that kept the version before; the whole file for the others

Invariants:
- A file is written once per version; after a replica refuses it, the retry writes it anew.
- A file appears whole, by a rename, and is never modified: a process that has mapped it keeps its bytes after its removal.
- `latest.json` names only existing files, and never returns to an earlier version.
- Concurrent writers are safe: one that was abandoned because its disk was stuck may go on in its thread while another writes the
  same version, or the next.
- A delta is relative to the version published before, and only for replicas whose ack confirmed that version.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from ..common.fsio import write_atomic
from ..common.tasks import in_thread
from ..configs.schema import TransportKind
from ..errors import WeightSyncError
from . import delta
from .broadcast import BroadcastTransport, Sender
from .plan import AckCollector, DeltaSource, FileSource, Source
from .replica import PushTarget, TransferResult, Transport, await_reply, failures
from .shared_folder import SharedFolder
from .snapshot import WeightSnapshot

KEPT_ON_DISK = 2
"""Versions. A reader elsewhere that has just read `latest.json` has time to open the files it names."""


def make_transport(
    kind: TransportKind, sender: Sender, acks: AckCollector, *, bucket_bytes: int, folder: Path
) -> Transport:
    """The transport that `weightsync.transport` names; `folder` is where files on disk go.

    Raises:
        WeightSyncError: the folder, or shared memory, cannot be used.
    """
    if kind == "broadcast":
        return BroadcastTransport(sender, acks, bucket_bytes)
    if kind == "shared":
        shared = SharedFolder()
        return FileTransport(WeightFolder(shared.path, keep=1), acks, on_close=shared.close)
    return FileTransport(WeightFolder(folder, KEPT_ON_DISK), acks, deltas=kind == "delta")


class Manifest(msgspec.Struct, frozen=True):
    """`latest.json`: the version published last, for readers that get no pushes, such as another cluster.

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
        """Replace `latest.json`; its entry for another file of the same version stays. Does nothing if a later version was
        written."""
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
        write_atomic(self.path / "latest.json", msgspec.json.encode(manifest))

    def _prune(self) -> None:
        for path in self.path.glob("v*"):
            if path.name.partition(".")[0] not in {f"v{version}" for version in self._versions}:
                path.unlink(missing_ok=True)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of `folder`; None where there is none, or it cannot be read."""
    try:
        return msgspec.json.decode((folder / "latest.json").read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


class WrittenVersions:
    """Files of the newest snapshot in a folder, each written at its first use."""

    def __init__(self, folder: WeightFolder) -> None:
        self.folder = folder
        self._snapshot: WeightSnapshot | None = None
        self._paths: dict[str, Path | None] = {}
        self._lock = asyncio.Lock()

    async def file(
        self, snapshot: WeightSnapshot, kind: str, write: Callable[[], Path | None], seconds: float
    ) -> tuple[Path | None, int]:
        """The file that `write` makes of `snapshot`, None if it declines; and the bytes written by this call.

        Raises:
            WeightSyncError, DeadlineExceeded: it cannot be written, or not in time.
        """
        async with self._lock:
            if self._snapshot is not snapshot:
                self._snapshot, self._paths = snapshot, {}
            if kind in self._paths:
                return self._paths[kind], 0
            what = f"version {snapshot.version} to be written to {self.folder.path}"
            path = await await_reply(seconds, in_thread(write, what), what, "is the disk stuck?")
            self._paths[kind] = path
            return path, path.stat().st_size if path else 0

    def invalidate(self, snapshot: WeightSnapshot) -> None:
        """Write the files of `snapshot` anew at their next use."""
        if self._snapshot is snapshot:
            self._paths = {}


class FileTransport:
    """Files that the replicas read.

    Args:
        deltas: replicas that kept the version before get a file of what changed since, where that is smaller.
        on_close: called at the end.
    """

    def __init__(
        self,
        folder: WeightFolder,
        acks: AckCollector,
        *,
        deltas: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._written = WrittenVersions(folder)
        self._acks = acks
        self._deltas = deltas
        self._on_close = on_close
        self._kept: dict[str, WeightSnapshot] = {}
        self._before: WeightSnapshot | None = None
        self._newest: WeightSnapshot | None = None

    async def transfer(
        self, snapshot: WeightSnapshot, targets: Sequence[PushTarget], seconds: float, *, retry: bool
    ) -> TransferResult:
        """See `Transport`. With `retry` every target gets the whole file."""
        began, result = time.perf_counter(), TransferResult()

        async def write(kind: str, work: Callable[[], Path | None]) -> Path | None:
            left = seconds - (time.perf_counter() - began)
            path, wrote = await self._written.file(snapshot, kind, work, left)
            result.sent_bytes += wrote
            return path

        if self._deltas and snapshot is not self._newest:
            self._before, self._newest = self._newest, snapshot
        before, sources = self._before, dict[PushTarget, Source]()
        if before is not None and not retry and _same_layout(before, snapshot):
            kept = [t for t in targets if self._kept.get(t.name) is before]
            path = await write("delta", lambda: self._write_delta(snapshot, before)) if kept else None
            if path is not None:
                sources |= {t: DeltaSource(str(path), before.version) for t in kept}
        if others := [t for t in targets if t not in sources]:
            path = await write("full", lambda: write_full(self._written.folder, snapshot))
            sources |= {t: FileSource(str(path)) for t in others}
        for target in targets:
            self._kept.pop(target.name, None)  # until its ack is in
        left = seconds - (time.perf_counter() - began)
        result.failed = await _stage_files(self._acks, snapshot, sources, left, keep=self._deltas)
        if self._deltas:
            self._kept |= {t.name: snapshot for t in targets if t.name not in result.failed and not t.left}
        if result.failed:
            self._written.invalidate(snapshot)
        result.seconds = time.perf_counter() - began
        return result

    def forget(self, name: str) -> None:
        """The base that it keeps is unknown."""
        self._kept.pop(name, None)

    def close(self) -> None:
        """Remove what does not outlive the learner."""
        self._before = self._newest = None
        self._kept.clear()
        if self._on_close is not None:
            self._on_close()

    def _write_delta(self, snapshot: WeightSnapshot, before: WeightSnapshot) -> Path | None:
        parts = delta.differences(snapshot.names, before.tensors, snapshot.tensors)
        if sum(part.nbytes for part in parts.values()) >= snapshot.nbytes:
            return None
        folder = self._written.folder
        path = folder.write(snapshot.version, "delta", parts)
        folder.publish(
            Manifest(snapshot.version, snapshot.checksum, snapshot.names, delta=path.name, base=before.version)
        )
        return path


async def _stage_files(
    acks: AckCollector, snapshot: WeightSnapshot, sources: Mapping[PushTarget, Source], seconds: float, *, keep: bool
) -> dict[str, str]:
    """Have each target stage `snapshot` from its file; replica name -> why it does not hold it."""

    async def stage(target: PushTarget, source: Source) -> None:
        with acks.expect(target.name, snapshot.version, target.replica.ranks) as expected:
            plan = snapshot.plan(source, bucket_bytes=0, keep=keep, acks=acks.address, receiver=expected.receiver)

            async def staged() -> None:
                await target.request(target.replica.receive_weights(plan))
                await target.request(expected.complete())

            await await_reply(seconds, staged(), str(expected))

    return failures(
        [target.name for target in sources],
        await asyncio.gather(*(stage(t, s) for t, s in sources.items()), return_exceptions=True),
    )


def write_full(folder: WeightFolder, snapshot: WeightSnapshot) -> Path:
    """Write all tensors of a snapshot, and name the file in the folder's manifest."""
    path = folder.write(snapshot.version, "full", dict(zip(snapshot.names, snapshot.tensors, strict=True)))
    folder.publish(Manifest(snapshot.version, snapshot.checksum, snapshot.names, full=path.name))
    return path


def _same_layout(one: WeightSnapshot, other: WeightSnapshot) -> bool:
    """Whether names, shapes and dtypes are equal, so that a delta between the two exists."""
    return one.names == other.names and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(one.tensors, other.tensors, strict=True)
    )
