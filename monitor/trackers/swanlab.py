"""SwanLab: a run in the project SWANLAB_PROJ_NAME, else `slipstream`, named after the run folder, its files in `<run>/swanlab`.

Invariants:
- Without SWANLAB_MODE and without a key it records offline. SWANLAB_WORKSPACE, SWANLAB_GROUP, SWANLAB_TAGS and the library's other
  variables are its own.
- It neither takes over the process's output nor lists what is installed on the host.
- SwanLab has no tables of text: each trajectory is a text of its own.
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

QUIET = {
    "terminal": {"proxy_type": "none"},
    "probe": {"hardware": False, "runtime": False, "requirements": False, "git": False, "monitor": False},
}


class Swanlab:
    def __init__(self, folder: Path, config: Config) -> None:
        swanlab = importlib.import_module("swanlab")
        local = folder.resolve() / "swanlab"
        local.mkdir(parents=True, exist_ok=True)
        settings = swanlab.Settings(**QUIET)
        self._text: Any = swanlab.Text
        self._run: Any = swanlab.init(
            project=os.environ.get("SWANLAB_PROJ_NAME") or PROJECT,
            name=os.environ.get("SWANLAB_EXP_NAME") or run_name(folder),
            id=run_id(folder, "swanlab"),
            resume="allow",
            mode=os.environ.get("SWANLAB_MODE") or ("online" if settings.api_key else "offline"),
            log_dir=os.environ.get("SWANLAB_LOGDIR") or str(local),
            config=msgspec.to_builtins(config),
            settings=settings,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        self.log(step, values)

    def sampled(self, step: int, rows: Sequence[TrajectorySample]) -> None:
        self._run.log({TABLE: [self._text(_text(row), caption=row.id) for row in rows]}, step=step)

    def close(self) -> None:
        self._run.finish()


def _text(row: TrajectorySample) -> str:
    facts = f"{row.env} {row.task}: {row.outcome}, reward {row.reward:g}, staleness {row.staleness:.2f}, {row.tokens} tokens"
    return f"{facts}\n\n--- prompt\n{row.prompt}\n\n--- response\n{row.response}"
