"""The runs that the dashboard shows: a run's folder, or every run in a folder."""

from __future__ import annotations

import functools
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from ..buffer.run_stores import shard_paths
from ..buffer.schema import DATABASE, EVALUATION_DATABASE
from ..configs import RUN_CONFIG, Config, load
from ..errors import ConfigError, SlipstreamError
from ..monitor.alerts import ALERTS, Alert, read_alerts
from ..monitor.metrics import METRICS
from ..monitor.settings import SETTINGS, largest_bound, read_changes
from ..planner.explain.findings import Explanation
from .accounts import TokenAccounts
from .curves import MetricsTable
from .gauges import GaugeTable
from .index import TABLES, TrajectoryIndex
from .store import StoreReader
from .texts import TokenTexts
from .timeline import Timeline
from .trajectory import TrajectoryReader

RUNS_LIMIT = 200  # runs of a folder that are shown; more are no comparison


class RunAccess(msgspec.Struct, frozen=True):
    """What only the room of launches knows of a run's folder."""

    is_active: Callable[[Path], bool]  # whether a process writes to the run now
    status: Callable[[Path], Awaitable[Any]]  # replicas and waits of an active run; raises SlipstreamError
    explain: Callable[
        [Path], Awaitable[Explanation]
    ]  # takes seconds, in another process; raises SlipstreamError or OSError


async def _is_over(_: Path) -> Any:
    raise ConfigError("the run is over")


ENDED = RunAccess(lambda _: False, _is_over, _is_over)
"""To a run of which only files are left."""


class WatchedRun:
    """A run and what was read of it so far."""

    def __init__(self, name: str, folder: Path, access: RunAccess) -> None:
        self.name = name
        self.folder = folder
        self.access = access
        self.store = StoreReader(folder, self.is_active)
        self.metrics = MetricsTable(folder)
        self.gauges = GaugeTable(folder)
        self.timeline = Timeline(folder, self.gauges, self.store)
        self.accounts = TokenAccounts(self.store)
        self.evaluated = StoreReader(folder, self.is_active, EVALUATION_DATABASE)
        self.indexes = {source: TrajectoryIndex(self.store_of(source), source) for source in TABLES}
        self.index = self.indexes["training"]
        self.explained = 0  # explanations that were found
        self._lock = threading.Lock()
        self._config: tuple[int, Config | None, str] = (
            0,
            None,
            "",
        )  # when its file was changed, what is in it, or why not

    def is_active(self) -> bool:
        return self.access.is_active(self.folder)

    def store_of(self, source: str) -> StoreReader:
        """The file that has the trajectories of a `Source`."""
        return self.evaluated if source.startswith("evaluation") else self.store

    @property
    def reader(self) -> TrajectoryReader:
        """Of what was played to be trained on."""
        return self.reader_of("training")

    def reader_of(self, source: str) -> TrajectoryReader:
        """Of a `Source`."""
        return TrajectoryReader(self.store_of(source), self._texts)

    @functools.cached_property
    def _texts(self) -> TokenTexts:
        config, _ = self.config()
        return TokenTexts(self.folder, config.model.path if config else "")

    def config(self) -> tuple[Config | None, str]:
        """The run's config, and why there is none: it may be of another version of the program."""
        path = self.folder / RUN_CONFIG
        with self._lock:
            changed = 0  # read again
            try:
                changed = path.stat().st_mtime_ns
                if changed != self._config[0]:
                    self._config = changed, load(str(path)), ""
            except (SlipstreamError, OSError) as error:
                self._config = changed, None, str(error)
            return self._config[1:]

    def yaml(self) -> str:
        """The text of the run's config. Raises OSError."""
        return (self.folder / RUN_CONFIG).read_text(errors="replace")

    def summary(self) -> dict[str, Any]:
        """For the list of runs, and the view of the present."""
        config, error = self.config()
        settings = None
        if config is not None:
            settings = {
                "max_staleness": config.buffer.max_staleness,
                "groups_per_batch": config.buffer.groups_per_batch,
                "group_size": config.buffer.group_size,
                "engine": config.rollout.engine.__struct_config__.tag,
                "replicas": config.rollout.engine.count,
                "model": config.model.path,
            }
        found = {"name": self.name, "folder": str(self.folder), "active": self.is_active(), "error": error}
        return {**found, "settings": settings, "now": self.metrics.present(config)}

    def largest_bound(self) -> int | None:
        """The largest `buffer.max_staleness` that was in force; None without a config. Raises StoreError."""
        config, _ = self.config()
        return largest_bound(read_changes(self.folder / SETTINGS), config.buffer.max_staleness) if config else None

    def alerts(self) -> list[Alert]:
        """The newest line of each rule, those that are active first. Raises StoreError."""
        last = {alert.rule: alert for alert in read_alerts(self.folder / ALERTS)}
        return sorted(last.values(), key=lambda alert: (not alert.active, -alert.time))

    def changes(self) -> tuple[tuple[int, int], ...]:
        """What differs after the run has written something that a page shows, or was explained again."""
        shards = [path.name for path in shard_paths(self.folder / DATABASE)]
        stores = (name + end for name in (*{DATABASE, *shards}, EVALUATION_DATABASE) for end in ("", "-wal"))
        names = (*stores, METRICS, "evaluations.json", "control.json", ALERTS, SETTINGS, RUN_CONFIG)
        return ((self.explained, 0), *(_changed(self.folder / name) for name in names))


class RunFolder:
    """`root` is a run's folder, or a folder that has some. Raises ConfigError where there is no run."""

    def __init__(self, root: Path, access: RunAccess) -> None:
        self.root = root
        self._access = access
        self._runs: dict[str, WatchedRun] = {}
        self._lock = threading.Lock()
        if not self.runs():
            raise ConfigError(f"{root} holds no run: there is no {RUN_CONFIG} in it, nor in a folder in it")

    def runs(self) -> list[WatchedRun]:
        """The newest, at most `RUNS_LIMIT`, by name; those that began since the last call included."""
        return [self._watched(folder) for folder in sorted(self._newest()[:RUNS_LIMIT])]

    @property
    def left_out(self) -> int:
        """Older runs than those."""
        return max(0, len(self._newest()) - RUNS_LIMIT)

    def run(self, name: str) -> WatchedRun:
        """Also one that is left out. Raises ConfigError where there is none of that name."""
        with self._lock:
            known = self._runs.get(name)
        if known is not None and (known.folder / RUN_CONFIG).is_file():
            return known
        found = next((folder for folder in self._newest() if folder.name == name), None)
        if found is None:
            raise ConfigError(f"{self.root} holds no run {name!r}")
        return self._watched(found)

    def _newest(self) -> list[Path]:
        """The folders of runs, by when their configs were written, the newest first."""
        if (self.root / RUN_CONFIG).is_file():
            return [self.root]
        return [path.parent for path in sorted(self.root.glob(f"*/{RUN_CONFIG}"), key=_changed, reverse=True)]

    def _watched(self, folder: Path) -> WatchedRun:
        with self._lock:
            if folder.name not in self._runs:
                self._runs[folder.name] = WatchedRun(folder.name, folder, self._access)
            return self._runs[folder.name]


def _changed(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
