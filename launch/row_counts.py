"""The number of rows of a run's data sets, kept in its folder: the buffer counts which rows were given out by their place among so
many, so a resumed run needs as many.

Invariants:
- The number is recorded once, at the first start.
- Rows that are held out, and rows that are too long, follow from it and the config.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ..common.fsio import write_atomic
from ..configs import Config
from ..configs.environments import DataSection, parts_by_key
from ..errors import ConfigError

FILE = "rows.json"  # in the folder of a run: section of the config -> rows to train on


def check_row_counts(config: Config, run_dir: Path) -> None:
    """Compare with the numbers that the run began with; record them where there are none. Raises ConfigError in one line."""
    from ..envs.dataset.source import DatasetSource

    sections = {key: part for key, part in parts_by_key(config.env).items() if isinstance(part, DataSection)}
    if not sections:
        return
    found = {key: len(DatasetSource(part, "train", config.seed, key)) for key, part in sections.items()}
    path = run_dir / FILE
    if not path.exists():
        write_atomic(path, msgspec.json.encode(found))
        return
    for key, began in msgspec.json.decode(path.read_bytes(), type=dict[str, int]).items():
        if (now := found.get(key, began)) != began:
            raise ConfigError(
                f"{key}.path: {sections[key].path} has {now} rows to train on, and the run began with {began}: rows would be "
                "repeated and left out; restore the file, or start a new run"
            )
