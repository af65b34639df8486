"""The dashboard's page of the processes of a run: as they were a second ago, and the ends of their logs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..monitor.prometheus import FRESH_S
from .gauges import GaugeTable

LOGS = "logs"  # folder of a run
TAIL = 64 << 10  # bytes of a log that are shown
RECENT_S = 10.0  # mean of the share of a core


def processes(gauges: GaugeTable) -> list[dict[str, Any]]:
    """By role: the newest line of each, its age in seconds, and the share of a core that it had. Raises OSError."""
    now, found, roles = time.time(), [], gauges.roles()
    last = max((one.times[-1] for role, one in roles.items() if role.startswith("worker-")), default=0.0)
    for role, one in sorted(roles.items()):
        newest = one.times[-1]
        cores = one.between(newest - RECENT_S, newest, 1).get("cpu_s", [None])[0]
        shown = {
            name: value
            for name, value in one.last.items()
            if name not in ("t", "cpu_s", "rss", "gpus", "dropped", "replicas")
        }
        found.append({
            "role": role, "pid": one.pid, "age_s": max(0.0, now - newest), "cores": cores, "rss": one.last.get("rss"),
            "dropped": one.last.get("dropped"), "gauges": shown,
            "replicas": (last - newest < FRESH_S and one.last.get("replicas")) or {},
            "gpus": _gpus(role, one.last),
        })  # fmt: skip
    return found


def _gpus(role: str, line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those of the process, and of the servers that it knows."""
    holders = {role: line, **(line.get("servers") or {})}
    return [
        {"role": name, "gpu": gpu, **usage}
        for name, holder in holders.items()
        for gpu, usage in (holder.get("gpus") or {}).items()
    ]


def logs(folder: Path) -> list[dict[str, Any]]:
    """Names and sizes, the newest first."""
    paths = [(path, path.stat()) for path in (folder / LOGS).glob("*.log*") if path.is_file()]
    paths.sort(key=lambda pair: -pair[1].st_mtime)
    return [{"name": path.name, "bytes": status.st_size, "time": status.st_mtime} for path, status in paths]


def log_tail(folder: Path, name: str) -> dict[str, Any]:
    """The last `TAIL` bytes of a log, from the beginning of a line, without the colors of terminals. Raises ConfigError where there
    is none of that name."""
    if name not in {path.name for path in (folder / LOGS).glob("*.log*")}:
        raise ConfigError(f"{folder.name} has no log {name!r}")
    with (folder / LOGS / name).open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL))
        data = file.read(TAIL)
    text = data.decode(errors="replace")
    text = text.partition("\n")[2] if size > TAIL else text
    return {"name": name, "bytes": size, "text": re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)}
