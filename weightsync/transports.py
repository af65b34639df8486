"""Transports of weight pushes that write a file, which replicas on this host map (`shared`) or any replica reads (`disk`, `delta`).

Invariants:
- A file is written once per version; after a replica refuses it, the retry writes it anew.
- A file appears whole, by a rename, and is never modified: a process that has mapped it keeps its bytes after its removal.
- `latest.json` names only existing files, and never returns to an earlier version.
- Concurrent writers are safe: one that was abandoned because its disk was stuck may go on in its thread.
- A delta is relative to the version published before, and only for replicas whose ack confirmed that version.
"""

from __future__ import annotations

import asyncio
import functools
import json
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from ..common.fsio import write_atomic
from ..common.owned_folders import SHARED_MEMORY, WEIGHTS, OwnedFolder
from ..common.tasks import in_thread
from ..configs.schema import TransportKind
from ..errors import WeightSyncError
from . import delta
from .plan import AckCollector, DeltaSource, FileSource, Source, TransferPlan
from .replica import PushResult, PushTarget, await_reply, each
from .snapshot import WeightSnapshot, as_bytes, layout_of

KEPT_ON_DISK = 2  # versions. A reader elsewhere that has just read `latest.json` has time to open the files it names.
HEADER_ALIGNMENT = 8  # bytes; of the data in a safetensors file
SAFETENSORS_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""What safetensors calls the dtypes."""


class Manifest(msgspec.Struct, frozen=True):
    """`latest.json`: the version published last, for readers that get no pushes, such as another cluster. `checksum` is that of
    `TransferPlan`; `full` names the file with all tensors, `delta` that with what differs from version `base`, "" where there is
    none."""

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

    def write(self, version: int, kind: str, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Path:
        """Write a file of `version`; files of versions before the last `keep` are removed. Raises WeightSyncError: no space, no
        permission; or it took so long that later versions have been written."""
        path = self.path / f"v{version}.{kind}.safetensors"
        part = path.with_suffix(f".{uuid.uuid4().hex}.part")
        with self._lock:
            self._versions = [*(v for v in self._versions if v != version), version][-self._keep :]
            kept = {f"v{version}" for version in self._versions}
            for old in self.path.glob("v*"):
                if old.name.partition(".")[0] not in kept:
                    old.unlink(missing_ok=True)
        try:
            write_safetensors(part, names, tensors, {"version": str(version)})
            with self._lock:
                if version not in self._versions:
                    raise WeightSyncError("later versions have been written meanwhile")
                part.replace(path)
        except (OSError, WeightSyncError) as error:
            part.unlink(missing_ok=True)
            raise WeightSyncError(f"cannot write version {version} to {path}: {error}") from error
        return path

    def publish(self, manifest: Manifest) -> None:
        """Replace `latest.json`, unless a later version was written; its entry for another file of the same version stays."""
        with self._lock:
            if manifest.version != self._versions[-1]:
                return
            latest = read_manifest(self.path)
            if latest is not None and (latest.version, latest.checksum) == (manifest.version, manifest.checksum):
                full, delta, base = latest.full, latest.delta, latest.base
                if manifest.delta:
                    delta, base = manifest.delta, manifest.base
                manifest = msgspec.structs.replace(manifest, full=manifest.full or full, delta=delta, base=base)
            write_atomic(self.path / "latest.json", msgspec.json.encode(manifest))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of `folder`; None where there is none, or it cannot be read."""
    try:
        return msgspec.json.decode((folder / "latest.json").read_bytes(), type=Manifest)
    except (OSError, msgspec.MsgspecError):
        return None


def write_safetensors(
    path: Path, names: Sequence[str], tensors: Sequence[torch.Tensor], metadata: dict[str, str]
) -> None:
    """Write a safetensors file, one tensor after the other. Raises OSError."""
    layout = layout_of(tensors)
    # Large elements first: with a header of whole words every tensor lies at a multiple of its element's size.
    order = sorted(range(len(names)), key=lambda i: -layout[i].element_size())
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for i in order:
        start, end = end, end + layout[i].nbytes
        header[names[i]] = {
            "dtype": SAFETENSORS_NAMES[layout[i].dtype],
            "shape": list(layout[i].shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for i in order:
            file.write(as_bytes(tensors[i]).numpy().data)


class FileTransport:
    """Files of the newest snapshot that the replicas read, each written at its first use. With `deltas` replicas that kept the
    version before get a file of what changed since, where that is smaller."""

    def __init__(
        self,
        folder: WeightFolder,
        acks: AckCollector,
        *,
        deltas: bool = False,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._acks = acks
        self._deltas = deltas
        self._on_close = on_close
        self._kept: dict[str, WeightSnapshot] = {}
        self._before: WeightSnapshot | None = None
        self._newest: WeightSnapshot | None = None
        self._paths: dict[str, Path | None] = {}
        self._writing = asyncio.Lock()

    async def transfer(
        self, snapshot: WeightSnapshot, targets: Sequence[PushTarget], seconds: float, *, retry: bool
    ) -> PushResult:
        """See `Transport`. With `retry` every target gets the whole file."""
        began, result, plans = time.perf_counter(), PushResult(), dict[PushTarget, TransferPlan]()
        if snapshot is not self._newest:
            self._before, self._newest, self._paths = self._newest if self._deltas else None, snapshot, {}
        before = self._before
        if before is not None and not retry and _same_layout(before, snapshot):
            kept = [t for t in targets if self._kept.get(t.name) is before]
            work = functools.partial(self._write_delta, snapshot, before)
            if kept and (path := await self._file(snapshot, "delta", work, began + seconds, result)) is not None:
                plans |= dict.fromkeys(kept, self._plan(snapshot, DeltaSource(str(path), before.version)))
        if others := [t for t in targets if t not in plans]:
            path = await self._file(
                snapshot, "full", functools.partial(self._write_full, snapshot), began + seconds, result
            )
            plans |= dict.fromkeys(others, self._plan(snapshot, FileSource(str(path))))
        for target in targets:
            self._kept.pop(target.name, None)  # until its ack is in
        left = began + seconds - time.perf_counter()
        result.failed = await each({t.name: self._stage(t, plan, left) for t, plan in plans.items()})
        if self._deltas:
            self._kept |= {t.name: snapshot for t in targets if t.name not in result.failed and not t.left}
        if result.failed and snapshot is self._newest:
            self._paths = {}
        result.transfer_s = time.perf_counter() - began
        return result

    def forget(self, name: str) -> None:
        self._kept.pop(name, None)

    def close(self) -> None:
        self._before = self._newest = None
        self._kept.clear()
        self._on_close()

    async def _file(
        self,
        snapshot: WeightSnapshot,
        kind: str,
        write: Callable[[], Path | None],
        deadline: float,
        result: PushResult,
    ) -> Path | None:
        """The file that `write` makes of `snapshot`, None if it declines. Raises DeadlineExceeded, and WeightSyncError also where a
        transfer of another snapshot has begun."""
        async with self._writing:
            paths = self._paths
            if snapshot is not self._newest:
                raise WeightSyncError(f"version {snapshot.version} is no longer the newest")
            if kind not in paths:
                what = f"version {snapshot.version} to be written to {self._folder.path}"
                left = deadline - time.perf_counter()
                path = await await_reply(left, in_thread(write, what), what, "is the disk stuck?")
                paths[kind] = path  # of this snapshot, also if another one is the newest by now
                result.sent_bytes += path.stat().st_size if path else 0
            return paths[kind]

    def _plan(self, snapshot: WeightSnapshot, source: Source) -> TransferPlan:
        """For all replicas that get `source`; their receivers differ."""
        return snapshot.plan(source, bucket_bytes=0, keep=self._deltas, acks=self._acks.address, receiver="")

    async def _stage(self, target: PushTarget, plan: TransferPlan, seconds: float) -> None:
        with self._acks.expect(target.name, plan.version, target.replica.ranks) as expected:
            plan = msgspec.structs.replace(plan, receiver=expected.receiver)

            async def staged() -> None:
                await target.request(target.replica.receive_weights(plan))
                await target.request(expected.complete())

            await await_reply(seconds, staged(), f"{target.name} to hold version {plan.version}", expected.missing)

    def _write_full(self, snapshot: WeightSnapshot) -> Path:
        path = self._folder.write(snapshot.version, "full", snapshot.names, snapshot.tensors)
        self._folder.publish(Manifest(snapshot.version, snapshot.checksum, snapshot.names, full=path.name))
        return path

    def _write_delta(self, snapshot: WeightSnapshot, before: WeightSnapshot) -> Path | None:
        parts = delta.differences(snapshot.names, before.tensors, snapshot.tensors)
        if sum(part.nbytes for part in parts.values()) >= snapshot.nbytes:
            return None
        path = self._folder.write(snapshot.version, "delta", list(parts), list(parts.values()))
        self._folder.publish(
            Manifest(snapshot.version, snapshot.checksum, snapshot.names, delta=path.name, base=before.version)
        )
        return path


def file_transport(kind: TransportKind, folder: Path, acks: AckCollector) -> FileTransport:
    """Transport `shared`, `disk` or `delta`. Raises WeightSyncError: `folder`, or shared memory, cannot be used."""
    if kind == "shared":
        try:
            shared = OwnedFolder(SHARED_MEMORY, WEIGHTS)
        except OSError as error:
            message = f"weightsync.transport=shared: {SHARED_MEMORY} cannot be used: {error}; take disk"
            raise WeightSyncError(message) from error
        return FileTransport(WeightFolder(shared.path, keep=1), acks, on_close=shared.close)
    return FileTransport(WeightFolder(folder, KEPT_ON_DISK), acks, deltas=kind == "delta")


def _same_layout(one: WeightSnapshot, other: WeightSnapshot) -> bool:
    """Whether names, shapes and dtypes are equal, so that a delta between the two exists."""
    return one.names == other.names and all(
        a.shape == b.shape and a.dtype == b.dtype
        for a, b in zip(layout_of(one.tensors), layout_of(other.tensors), strict=True)
    )
