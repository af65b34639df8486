"""The number of tasks that a run trains on in an epoch, kept in its folder for each environment that has so many and no more: the
buffer counts which tasks were given out by their place among so many, so a resumed run needs as many.

Invariants:
- The number is recorded once, at the first start.
- Tasks that are held out, and rows that are too long, follow from it and the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from ..common.fsio import read_json, write_atomic
from ..configs.environments import DataSection, parts_by_key
from ..errors import ConfigError
from .run_inputs import RunInputs

FILE = "rows.json"  # in the folder of a run: section of the config -> rows or tasks to train on


def recorded_counts(run_dir: Path) -> dict[str, int]:
    """What a run began with; empty where nothing was recorded. Raises StoreError: the file is damaged."""
    what = "the numbers of tasks that the run began with"
    return read_json(run_dir / FILE, dict[str, int], {}, what, "restore it, or start a new run")


def record_counts(run_dir: Path, counts: Mapping[str, int]) -> None:
    """Record what the run begins with, unless that was done."""
    path = run_dir / FILE
    if counts and not path.exists():
        write_atomic(path, msgspec.json.encode(counts))


def check_row_counts(inputs: RunInputs) -> None:
    """Compare with the numbers that the run began with. Raises ConfigError in one line."""
    sections = parts_by_key(inputs.config.env)
    for key, began in inputs.began.items():
        if (now := inputs.counts.get(key, began)) != began:
            path = getattr(sections[key], "path", "")
            what = "rows" if isinstance(sections[key], DataSection) else "tasks"
            named = f"{key}.path: {path}" if path else f"{key}: it"
            raise ConfigError(
                f"{named} has {now} {what} to train on, and the run began with {began}: some would be repeated and others left "
                "out; restore what it was, or start a new run"
            )
