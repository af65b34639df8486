"""TensorBoard and Weights & Biases, in addition to `metrics.jsonl`.

Invariants:
- `check_trackers` finds a missing package before a process starts.
- No network is needed: without WANDB_MODE and without a wandb key, wandb records offline.
- A resumed run continues the same wandb run, whose id is in the run folder.
"""

from __future__ import annotations

import importlib.util
import logging
import netrc
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import msgspec

from ..configs import Config
from ..errors import ConfigError

log = logging.getLogger(__name__)


class TensorBoard:
    """Event files in `<run>/tensorboard`."""

    def __init__(self, folder: Path, config: Config) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), flush_secs=10)
        self._writer.add_text("config", f"```json\n{msgspec.json.format(msgspec.json.encode(config)).decode()}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def evaluated(self, version: int, values: Mapping[str, float]) -> None:
        """The values of an evaluation of `version`, which may be older than the last that was logged."""
        self.log(version, values)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A wandb run in the project `slipstream`, named after the run folder, its files in `<run>/wandb`."""

    def __init__(self, folder: Path, config: Config) -> None:
        import wandb

        folder.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _logged_in(wandb.Settings().base_url) else "offline")
        log.info("wandb records %s in %s", mode, folder / "wandb")
        identity = folder / "wandb-id"
        if not identity.exists():
            identity.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project="slipstream",
            name=folder.resolve().name,
            id=identity.read_text().strip(),
            resume=None if mode == "offline" else "allow",  # `wandb sync --append` joins offline runs of one id
            dir=str(folder),
            mode=mode,
            config=msgspec.to_builtins(config),
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("evaluation/version")
        self._run.define_metric("evaluation/*", step_metric="evaluation/version")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def evaluated(self, version: int, values: Mapping[str, float]) -> None:
        """As for TensorBoard. wandb takes no step below the last: the chart's axis is `evaluation/version`."""
        self._run.log({**values, "evaluation/version": version}, step=max(version, self._run.step))

    def close(self) -> None:
        self._run.finish()


Tracker = TensorBoard | Wandb
_TRACKERS = {"tensorboard": TensorBoard, "wandb": Wandb}  # by name, which is also that of the package


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError where a tracker is unknown or its package is missing."""
    for name in names:
        if name not in _TRACKERS:
            raise ConfigError(f"run.trackers: {name!r} is unknown; allowed: {', '.join(_TRACKERS)}")
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"run.trackers: {name} needs the package {name}; run pip install -e .[trackers], or remove it"
            )


def open_trackers(names: Sequence[str], folder: Path, config: Config) -> list[Tracker]:
    """Open the named trackers in the run folder. Raises ConfigError as `check_trackers`."""
    check_trackers(names)
    return [_TRACKERS[name](folder, config) for name in names]


def _logged_in(base_url: str) -> bool:
    """Whether wandb has a key: in the environment or in the user's netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(base_url).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
