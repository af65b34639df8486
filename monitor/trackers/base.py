"""What every tracker does, and what it is given. Trackers call their libraries in the thread of a `TrackerThread` only.

Invariants:
- A tracker imports its library when it is opened.
- Without variables of its own a library needs no network, and its files are in the run folder.
- A run that is resumed goes on in the tracker's same run, whose id is in the run folder.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

PROJECT = "slipstream"  # where the library's own variable names no other
TABLE = "trajectories"  # what the table of sampled trajectories is called everywhere
TEXT_TOKENS = 1000  # of a prompt or a response that are shown: half of them from its beginning, half from its end
Decode = Callable[[Sequence[int]], str]


class TrajectorySample(msgspec.Struct, frozen=True):
    """A row of the table: a trajectory that was trained on."""

    step: int  # the version that was trained on it
    id: str
    env: str
    task: str
    outcome: str
    reward: float
    staleness: float  # mean over its sampled tokens
    tokens: int
    prompt: str
    response: str  # from the first sampled token on, what the environment said between included

    @property
    def values(self) -> list[int | float | str]:
        return list(msgspec.structs.astuple(self))


class SampledTokens(msgspec.Struct, frozen=True):
    """A trajectory before it is decoded: `row` without its texts, and the tokens of these."""

    row: TrajectorySample
    prompt: NDArray[np.int32]
    response: NDArray[np.int32]


class Samples:
    """Rows of the trackers' table; they are decoded once, in the thread of the first tracker that wants them."""

    def __init__(self, tokens: Sequence[SampledTokens], decode: Decode) -> None:
        self._tokens, self._decode = tokens, decode
        self._rows: list[TrajectorySample] | None = None
        self._lock = threading.Lock()

    def rows(self) -> list[TrajectorySample]:
        with self._lock:
            if self._rows is None:
                self._rows = [
                    msgspec.structs.replace(one.row, prompt=self._text(one.prompt), response=self._text(one.response))
                    for one in self._tokens
                ]
            return self._rows

    def _text(self, ids: NDArray[np.int32]) -> str:
        half = TEXT_TOKENS // 2
        if len(ids) <= TEXT_TOKENS:
            return self._decode(ids.tolist())
        left_out = f"\n[... {len(ids) - 2 * half} tokens ...]\n"
        return self._decode(ids[:half].tolist()) + left_out + self._decode(ids[-half:].tolist())


class Tracker(Protocol):
    """`step` is the policy version that a step made, counted on from the steps of a critic's warm-up."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a step."""

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """The values of an evaluation, at the `step` that made its version, which may be older than the last that was logged."""

    def sampled(self, step: int, rows: Sequence[TrajectorySample]) -> None:
        """Some of the trajectories that the step was trained on."""

    def close(self) -> None:
        """Write what is left; the run has ended."""


def run_id(folder: Path, tracker: str) -> str:
    """The id of the tracker's run, made when it is first asked for."""
    path = folder / f"{tracker}-id"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(uuid.uuid4().hex)
    return path.read_text().strip()


def run_name(folder: Path) -> str:
    return folder.resolve().name
