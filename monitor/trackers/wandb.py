"""Weights & Biases: a run in the project WANDB_PROJECT, else `slipstream`, named after the run folder, its files in `<run>/wandb`.

Invariants:
- Without WANDB_MODE and without a key it records offline.
- WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_NAME and the library's other variables are heeded.
"""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import msgspec

from ...configs import Config
from .base import PROJECT, TABLE, TrajectorySample, run_id, run_name

log = logging.getLogger(__name__)


class Wandb:
    def __init__(self, folder: Path, config: Config) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _logged_in(wandb.Settings().base_url) else "offline")
        log.info("wandb records %s in %s", mode, folder / "wandb")
        self._table = wandb.Table
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            entity=os.environ.get("WANDB_ENTITY"),
            group=os.environ.get("WANDB_RUN_GROUP"),
            name=os.environ.get("WANDB_NAME") or run_name(folder),
            id=run_id(folder, "wandb"),
            resume=None if mode == "offline" else "allow",  # `wandb sync --append` joins offline runs of one id
            dir=str(folder),
            mode=mode,
            config=msgspec.to_builtins(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("evaluation/step")
        self._run.define_metric("evaluation/*", step_metric="evaluation/step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """wandb takes no step below the last: the chart's axis is `evaluation/step`."""
        self._run.log({**values, "evaluation/step": step}, step=max(step, self._run.step))

    def sampled(self, step: int, rows: Sequence[TrajectorySample]) -> None:
        table = self._table(columns=list(TrajectorySample.__struct_fields__), data=[row.values for row in rows])
        self._run.log({TABLE: table}, step=max(step, self._run.step))

    def close(self) -> None:
        self._run.finish()


def _logged_in(base_url: str) -> bool:
    """Whether wandb has a key: in the environment or in the user's netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(base_url).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
