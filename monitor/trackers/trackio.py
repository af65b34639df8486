"""Trackio: a run in the project TRACKIO_PROJECT, else `slipstream`; its database is in TRACKIO_DIR, else in `<run>/trackio`.

Invariants:
- TRACKIO_SPACE_ID sends it to a Hugging Face Space, and TRACKIO_GROUP puts it into a group.
- Projects are shared by runs of all folders, so that the name of a run ends with a part of its id.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ...configs import Config
from .base import PROJECT, TABLE, TrajectorySample, run_id, run_name


class Trackio:
    def __init__(self, folder: Path, config: Config) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(folder.resolve() / "trackio"))  # read by the import
        trackio = importlib.import_module("trackio")
        self._table = trackio.Table
        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=f"{run_name(folder)}-{run_id(folder, 'trackio')[:8]}",
            group=os.environ.get("TRACKIO_GROUP"),
            space_id=os.environ.get("TRACKIO_SPACE_ID"),
            config=msgspec.to_builtins(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self.log(step, values)

    def sampled(self, step: int, rows: Sequence[TrajectorySample]) -> None:
        self._run.log({TABLE: self._table(data=msgspec.to_builtins(rows))}, step=step)

    def close(self) -> None:
        self._run.finish()
