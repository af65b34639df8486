"""What workers and learners note on their own of what they were given and what they did, for an audit to hold against the store.

    RUN/journal/worker-0.<process>.jsonl     Leased, Sampled and Heard, Delivered and Acknowledged
                learner-0.<process>.jsonl    Recovered, Took, Committed

Invariants:
- A line is in the file before what it announces is sent, and the line that says it was answered comes after the answer.
- A process has a file of its own and writes each line in one write: only the last line of a file can be torn, by the end of its
  process, and that is left out.
- Nothing is noted unless `NOTE` is set, which `slipstream chaos` does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ..errors import StoreError

NOTE = "SLIPSTREAM_JOURNAL"
"""Variable whose presence turns the journal on."""

FOLDER = "journal"

Counts = dict[int, int]
"""Policy version -> tokens."""


class Line(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of all lines; `at` in seconds since the epoch."""

    at: float = msgspec.field(default_factory=time.time)


class Leased(Line, frozen=True):
    """A worker was given members of a group, see `buffer.messages.Lease`."""

    group: int
    attempt: int
    members: tuple[int, ...]
    env: int
    task: int


class Sampled(Line, frozen=True):
    """Running totals of episodes, before they are reported as report `number`; episodes that sampled nothing new are left out."""

    number: int
    generated: dict[str, Counts]


class Heard(Line, frozen=True):
    """Report `number` was answered."""

    number: int


class Delivered(Line, frozen=True):
    """An episode ended and is about to be delivered.

    Attributes:
        outcome: its kind and the reason where it failed.
        trajectories: id -> sampled tokens by version.
    """

    episode: str
    outcome: tuple[str, str]
    generated: Counts
    trajectories: dict[str, Counts]


class Acknowledged(Line, frozen=True):
    """The delivery of an episode was answered: it is durable."""

    episode: str


class Recovered(Line, frozen=True):
    """A learner began with weights that contain the commits up to `kept`, and was told to publish them as `version`."""

    kept: int
    version: int


class Took(Line, frozen=True):
    """A learner was given the batch of `version`.

    Attributes:
        oldest: no token of an older version was to carry loss.
        episodes: episode id -> sampled tokens by version.
        withheld: those among them that were to carry no loss at all.
    """

    version: int
    oldest: int
    episodes: dict[str, Counts]
    withheld: tuple[str, ...]


class Committing(Line, frozen=True):
    """A learner has stepped on the batch of `version` and is about to say so."""

    version: int


class Committed(Line, frozen=True):
    """The commit of the batch of `version` was answered."""

    version: int


AnyLine = Leased | Sampled | Heard | Delivered | Acknowledged | Recovered | Took | Committing | Committed


class Journal:
    """The file of this process, a client `name` of the run in `run_dir`; `process` tells it from others of the same name."""

    def __init__(self, run_dir: Path, name: str, process: str) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        self._file = os.open(folder / f"{name}.{process}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(self, line: AnyLine) -> None:
        """Append a line; it outlives this process. Raises StoreError where it cannot be written whole."""
        content = msgspec.json.encode(line) + b"\n"
        try:
            written = os.write(self._file, content)
        except OSError as error:
            raise StoreError(f"the journal cannot be written: {error}") from None
        if written < len(content):
            raise StoreError("the journal cannot be written: the disk is full")

    def close(self) -> None:
        os.close(self._file)


def read(run_dir: Path, kind: str) -> Iterator[list[AnyLine]]:
    """The lines of each process of `kind` (`worker`, `learner-0`), in the order in which the processes began to write.

    Raises:
        StoreError: a line in the middle of a file is none.
    """
    files = []
    for path in (run_dir / FOLDER).glob(f"{kind}*.jsonl"):
        lines = path.read_bytes().split(b"\n")[:-1]
        try:
            files.append([msgspec.json.decode(line, type=AnyLine) for line in lines])
        except msgspec.MsgspecError as error:
            raise StoreError(f"{path} is no journal: {error}") from None
    return iter(sorted((lines for lines in files if lines), key=lambda lines: lines[0].at))
