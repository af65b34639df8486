"""The folders of checkpoints, for callers that load no tensor and import no torch: names, states, and which of them stay.

A folder named `step-*` with a state is a complete checkpoint; `checkpoint.py` writes it. Names that start with a dot are
leftovers of a crash: they are never read, and the next save or prune removes them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

STATE_FILE = "state.json"


class CheckpointState(msgspec.Struct, frozen=True):
    """What a checkpoint contains: optimizer batches done, the policy version that they made, and the numbers that the algorithm
    carries from step to step, by name."""

    step: int
    version: int
    algorithm: dict[str, float] = {}


def path_of(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def step_of(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))


def checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in root.glob("step-*") if (path / STATE_FILE).is_file())


def prune(root: Path, keep: int, retained: Callable[[Collection[int]], Collection[int]] = lambda steps: ()) -> None:
    """Remove all but the newest `keep` checkpoints, those that are `retained`, of all by their steps, and what crashes left behind.
    One rank calls it, between saves."""
    complete = checkpoints(root)
    older = complete[:-keep]
    stay = retained([step_of(path) for path in complete]) if older else ()
    for path in [*(path for path in older if step_of(path) not in stay), *root.glob(".step-*")]:
        shutil.rmtree(path)


def way_past(directory: Path) -> str:
    """What a user can do about the checkpoint in `directory`, which cannot be used."""
    before = [path.name for path in checkpoints(directory.parent) if path.name < directory.name]
    if not before:
        return "there is none before it to resume from: begin a new run"
    return f"move it out of {directory.parent}, or remove it, to resume from the one before, {before[-1]}"


def read_state(directory: Path) -> CheckpointState:
    return msgspec.json.decode((directory / STATE_FILE).read_bytes(), type=CheckpointState)
