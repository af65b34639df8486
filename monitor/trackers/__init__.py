"""Experiment trackers, in addition to `metrics.jsonl`: TensorBoard, Weights & Biases, MLflow, SwanLab, Trackio.

Invariants:
- `check_trackers` finds a missing package before a process starts.
- A tracker that fails or hangs costs the run nothing (`thread.py`).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from ...configs import Config
from ...errors import ConfigError
from .base import Tracker
from .mlflow import Mlflow
from .swanlab import Swanlab
from .tensorboard import TensorBoard
from .thread import TrackerThread
from .trackio import Trackio
from .wandb import Wandb

TRACKERS: dict[str, Callable[[Path, Config], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "swanlab": Swanlab,
    "trackio": Trackio,
}
"""By name, which is also that of the package."""


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError where a tracker is unknown or its package is missing."""
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(f"run.trackers: {name!r} is unknown; allowed: {', '.join(TRACKERS)}")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder ./wandb is a namespace package, which has no origin
            raise ConfigError(f"run.trackers: {name} needs the package {name}; run pip install {name}, or remove it")


def open_trackers(names: Sequence[str], folder: Path, config: Config) -> list[TrackerThread]:
    """Open the named trackers in the run folder. Raises ConfigError as `check_trackers`."""
    check_trackers(names)
    return [TrackerThread(name, functools.partial(TRACKERS[name], folder, config)) for name in names]
