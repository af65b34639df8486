"""The number of tasks that a run trains on in an epoch, kept in its folder for each environment that has so many and no more: the
buffer counts which tasks were given out by their place among so many, so a resumed run needs as many.

Invariants:
- The number is recorded once, at the first start.
- Tasks that are held out, and rows that are too long, follow from it and the config.
"""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path

import msgspec

from ..common.fsio import write_atomic
from ..configs import Config
from ..configs.environments import DataSection, EnvironmentKind, LibraryTasks, parts_by_key
from ..errors import ConfigError

FILE = "rows.json"  # in the folder of a run: section of the config -> rows or tasks to train on


def check_row_counts(config: Config, run_dir: Path) -> None:
    """Compare with the numbers that the run began with; record them where there are none. Raises ConfigError in one line."""
    kinds = (DataSection, LibraryTasks)
    sections = {key: part for key, part in parts_by_key(config.env).items() if isinstance(part, kinds)}
    if not sections:
        return
    found = {key: _count(part, config.seed, key) for key, part in sections.items()}
    path = run_dir / FILE
    if not path.exists():
        write_atomic(path, msgspec.json.encode(found))
        return
    for key, began in msgspec.json.decode(path.read_bytes(), type=dict[str, int]).items():
        if (now := found.get(key, began)) != began:
            path = getattr(sections[key], "path", "")
            what = "rows" if isinstance(sections[key], DataSection) else "tasks"
            named = f"{key}.path: {path}" if path else f"{key}: it"
            raise ConfigError(
                f"{named} has {now} {what} to train on, and the run began with {began}: some would be repeated and others left "
                "out; restore what it was, or start a new run"
            )


def _count(part: EnvironmentKind, seed: int, key: str) -> int:
    from ..envs.dataset.source import DatasetSource
    from ..envs.registry import task_source

    # The rows of a data set are read here also where its episodes run elsewhere.
    source = (
        DatasetSource(part, "train", seed, key)
        if isinstance(part, DataSection)
        else task_source(part, "train", seed, key)
    )
    assert isinstance(source, Sized)
    return len(source)
