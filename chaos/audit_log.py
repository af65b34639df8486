"""The audit log: what workers and learners received and did, written by themselves, for `audit` to compare with the store.

    RUN/audit/worker-0.<process>.jsonl     LeaseGranted, TokensSampled, CancelReceived, EpisodeDelivered, DeliveryAcknowledged
              learner-0.<process>.jsonl    LearnerRecovered, BatchTaken, CommitStarted, CommitFinished

Invariants:
- A record is in the file before the request it announces is sent; the record of the answer follows the answer.
- Every process has its own file and writes each record in one write: only the last line of a file can be torn, by the end of its
  process, and is then ignored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..errors import StoreError

FOLDER = "audit"

Counts = dict[int, int]
"""Policy version -> tokens."""


class AuditRecord(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all records; `at` in seconds since the epoch."""

    at: float = msgspec.field(default_factory=time.time)


class LeaseGranted(AuditRecord, frozen=True):
    """The buffer granted a worker members of a group, see `buffer.messages.Lease`."""

    group: int
    attempt: int
    members: tuple[int, ...]
    env: int
    task: int


class TokensSampled(AuditRecord, frozen=True):
    """Running totals of episodes, about to be sent as report `number`; episodes without new tokens are omitted."""

    number: int
    generated: dict[str, Counts]


class CancelReceived(AuditRecord, frozen=True):
    """The buffer answered report `number`."""

    number: int


class EpisodeDelivered(AuditRecord, frozen=True):
    """An episode ended; its delivery is about to be sent.

    Attributes:
        outcome: its kind and the reason where it failed.
        trajectories: id -> sampled tokens by version.
    """

    episode: str
    outcome: tuple[str, str]
    generated: Counts
    trajectories: dict[str, Counts]


class DeliveryAcknowledged(AuditRecord, frozen=True):
    """The buffer acknowledged the delivery of an episode: it is durable."""

    episode: str


class LearnerRecovered(AuditRecord, frozen=True):
    """A learner started with weights that contain the commits up to `kept`; the buffer has it publish them as `version`."""

    kept: int
    version: int


class BatchTaken(AuditRecord, frozen=True):
    """The buffer handed a learner the batch of `version`.

    Attributes:
        oldest: no token of an older version carries loss.
        episodes: episode id -> sampled tokens by version.
        withheld: the episodes among them that carry no loss.
    """

    version: int
    oldest: int
    episodes: dict[str, Counts]
    withheld: tuple[str, ...]


class CommitStarted(AuditRecord, frozen=True):
    """A learner has stepped on the batch of `version`; its commit is about to be sent."""

    version: int


class CommitFinished(AuditRecord, frozen=True):
    """The buffer answered the commit of the batch of `version`."""

    version: int


AnyRecord = (
    LeaseGranted
    | TokensSampled
    | CancelReceived
    | EpisodeDelivered
    | DeliveryAcknowledged
    | LearnerRecovered
    | BatchTaken
    | CommitStarted
    | CommitFinished
)


class AuditLog:
    """The file of one process: buffer client `name` of the run in `run_dir`; `process` differs between restarts."""

    def __init__(self, run_dir: Path, name: str, process: str) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        self._file = os.open(folder / f"{name}.{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, record: AnyRecord) -> None:
        """Append a record. Raises StoreError where it cannot be written whole."""
        content = msgspec.json.encode(record) + b"\n"
        try:
            written = os.write(self._file, content)
        except OSError as error:
            raise StoreError(f"the audit log cannot be written: {error}") from None
        if written < len(content):
            raise StoreError("the audit log cannot be written: the disk is full")

    def close(self) -> None:
        os.close(self._file)


def read(run_dir: Path, kind: str) -> Iterator[list[AnyRecord]]:
    """The records of each process of `kind` (`worker`, `learner-0`), in the order of the processes' first records.

    Raises:
        StoreError: a line before the last is not a record.
    """
    files = []
    for path in (run_dir / FOLDER).glob(f"{kind}*.jsonl"):
        lines = path.read_bytes().split(b"\n")[:-1]
        try:
            files.append([msgspec.json.decode(line, type=AnyRecord) for line in lines])
        except msgspec.MsgspecError as error:
            raise StoreError(f"{path} is not an audit log: {error}") from None
    return iter(sorted((lines for lines in files if lines), key=lambda lines: lines[0].at))
