"""Token annotations on disk, what the learner computed at each token: a file for each step and each rank that has rows of its own.

    RUN/annotations/ROLE.VERSION     format byte, uint32 length of the header, header; of each trajectory float16[4, T], uint8[T]

Invariants:
- `VERSION` is the one that the batch made. A version is never made twice, so a step that was rolled back is told from the one that
  replaced it.
- Recording never blocks, slows or ends a step: a thread writes, and what finds its queue full or the disk refusing is dropped and
  counted.
- A file is whole or absent. A process keeps its newest files, as many as fit into its bytes; the oldest go first.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

import msgspec
import numpy as np

from ..common.annotations import TOKEN_BYTES, VALUES, TokenAnnotations
from ..common.fsio import write_atomic
from ..errors import StoreError

log = logging.getLogger(__name__)

ANNOTATIONS = "annotations"  # folder of a run
STEP_BYTES = 4 << 20  # of a learner step, all processes together: half a million tokens
KEPT_BYTES = 256 << 20  # on disk, of all processes of a run together
FORMAT = b"\x01"
STEPS_WAITING = 4  # steps whose annotations wait for the disk
END_S = 10.0  # longest wait for them at the end


class AnnotatedRow(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory of a file, and how many of its tokens are there."""

    id: str
    tokens: int


class AnnotationsHeader(msgspec.Struct, frozen=True):
    version: int  # the policy version that the step made
    rows: tuple[AnnotatedRow, ...]


class AnnotationWriter:
    """Records what the process `role` saw, in the run's `folder`, while the context lasts; without a folder, nothing. At most
    `limit` bytes stay there."""

    def __init__(self, folder: Path | None, role: str, limit: int) -> None:
        self._folder = None if folder is None else folder / ANNOTATIONS
        self._role, self._limit = role, limit
        self._queue: queue.Queue[tuple[int, Sequence[TokenAnnotations]] | None] = queue.Queue(STEPS_WAITING)
        self._overflowed = self._refused = 0
        self._thread = threading.Thread(target=self._run, name="annotations", daemon=True)

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            try:
                self._queue.put(None, timeout=END_S)
            except queue.Full:  # the disk hangs; the thread is a daemon
                return
            self._thread.join(END_S)

    def record(self, version: int, rows: Sequence[TokenAnnotations]) -> None:
        """See `RecordAnnotations`."""
        if self._folder is None or not rows:
            return
        try:
            self._queue.put_nowait((version, rows))
        except queue.Full:
            self._overflowed += len(rows)

    @property
    def dropped(self) -> int:
        """Trajectories that were recorded and are in no file."""
        return self._overflowed + self._refused

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            version, rows = step
            try:
                self._write(version, rows)
            except OSError as error:
                if not self._refused:
                    log.warning("%s: annotations of version %d are not recorded: %s", self._folder, version, error)
                self._refused += len(rows)

    def _write(self, version: int, rows: Sequence[TokenAnnotations]) -> None:
        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self._folder / f"{self._role}.{version}", _encode(version, rows))
        left = self._limit
        for newest, path in enumerate(reversed(self._files())):
            left -= path.stat().st_size
            if newest and left < 0:
                path.unlink()

    def _files(self) -> list[Path]:
        """The oldest first."""
        assert self._folder is not None
        found = (path for path in self._folder.glob(f"{self._role}.*") if path.suffix[1:].isdecimal())
        return sorted(found, key=lambda path: int(path.suffix[1:]))


def _encode(version: int, rows: Sequence[TokenAnnotations]) -> bytes:
    header = msgspec.msgpack.encode(AnnotationsHeader(version, tuple(AnnotatedRow(row.id, len(row)) for row in rows)))
    arrays = (array for row in rows for array in (row.values.tobytes(), row.flags.tobytes()))
    return b"".join((FORMAT, len(header).to_bytes(4, "little"), header, *arrays))


def read_annotations(folder: Path, version: int, id: str) -> TokenAnnotations | None:
    """Those of the trajectory `id` from the step that made `version`; None where there are none. `folder` is the run's. Raises
    StoreError where a file is damaged or of another version of this program."""
    return next(read_step_annotations(folder, version, id), None)


def read_step_annotations(folder: Path, version: int, id: str = "") -> Iterator[TokenAnnotations]:
    """Those of every trajectory, or of `id` alone. Raises as `read_annotations`."""
    for path in sorted((folder / ANNOTATIONS).glob(f"*.{version}")):
        try:
            yield from _read(path, id)
        except FileNotFoundError:  # removed meanwhile
            continue
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            raise StoreError(f"{path} is damaged: {error}") from None


def annotated_versions(folder: Path) -> list[int]:
    """The versions whose steps have annotations, the oldest first."""
    return sorted({int(path.suffix[1:]) for path in (folder / ANNOTATIONS).glob("*.*") if path.suffix[1:].isdecimal()})


def _read(path: Path, id: str) -> Iterator[TokenAnnotations]:
    with path.open("rb") as file:
        if (found := file.read(1)) != FORMAT:
            raise ValueError(f"format {found.hex()!r}, this program knows {FORMAT.hex()}")
        size = int.from_bytes(file.read(4), "little")
        header = msgspec.msgpack.decode(file.read(size), type=AnnotationsHeader)
        at = 5 + size
        for row in header.rows:
            if id in ("", row.id):
                file.seek(at)
                data = file.read(TOKEN_BYTES * row.tokens)
                if len(data) < TOKEN_BYTES * row.tokens:
                    raise ValueError(f"{len(data)} bytes are left of trajectory {row.id}")
                values, flags = np.split(np.frombuffer(data, dtype=np.uint8), [2 * len(VALUES) * row.tokens])
                yield TokenAnnotations(row.id, values.view(np.float16).reshape(len(VALUES), row.tokens), flags)
            at += TOKEN_BYTES * row.tokens
