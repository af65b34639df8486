"""The CPU, memory and GPUs that inference servers use: the supervisor reads them from the system, of servers that it started."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from typing import Any

import psutil

from ...monitor.gpus import VISIBLE, gpu_gauges
from .access import SERVERS
from .processes import ProcessManager, RoleProcess

TREE_S = 15.0  # between two looks for the processes that a server has started: a look at all processes of the host
Usage = dict[str, Any]


class ServerUsage:
    """Of the servers on this host; of none where roles may be on others. Those of the kinds `on_gpus` have GPUs of their own.
    `gauges` is for the thread of a `TimelineWriter`."""

    def __init__(self, processes: ProcessManager, on_gpus: Collection[str] = ()) -> None:
        self._processes = processes
        self._on_gpus = on_gpus
        self._trees: dict[int, tuple[float, list[psutil.Process]]] = {}

    def gauges(self) -> dict[str, dict[str, Usage]]:
        """`servers`: by name seconds of CPU since the start (`cpu_s`) and bytes of memory (`rss`), each with the processes that it
        started; pages that these share count for each. `gpus` as in `gpu_gauges`."""
        if self._processes.config.launch.hosts == "many":
            return {"servers": {}}
        roles = [role for role in self._processes.roles.copy().values() if role.kind in SERVERS]
        used = {role.name: self._usage(role) for role in roles}
        return {"servers": {name: one for name, one in used.items() if one}}

    def _usage(self, role: RoleProcess) -> Usage | None:
        if role.process is None or not role.running or role.external is not None:
            return None
        cpu_s = rss = 0.0
        for process in self._tree(role.process.pid):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied), process.oneshot():
                times = process.cpu_times()
                cpu_s += times.user + times.system + times.children_user + times.children_system
                rss += process.memory_info().rss
        if not rss:
            return None
        usage: Usage = {"cpu_s": round(cpu_s, 2), "rss": rss}
        return usage | gpu_gauges(self._visible(role.process.pid)) if role.kind in self._on_gpus else usage

    def _visible(self, pid: int) -> str | None:
        """The GPUs that the launcher gave a process."""
        try:
            return psutil.Process(pid).environ().get(VISIBLE)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return ""

    def _tree(self, pid: int) -> list[psutil.Process]:
        looked_at, tree = self._trees.get(pid, (0.0, []))
        if time.monotonic() - looked_at > TREE_S:
            tree = []
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                root = psutil.Process(pid)
                tree = [root, *root.children(recursive=True)]
            self._trees[pid] = time.monotonic(), tree
        return tree
