"""Pools of roles of one kind, which come and go while the run goes on: replicas (`replicas.py`) and workers (`workers.py`).

Invariants:
- A role whose restarts are spent leaves while another of its kind is left; the last one ends the run.
- A role is forgotten once, by the task that watches its process, whatever ended it. Its placement is free then.
- A server that spans hosts has a process for each; they are started, watched and forgotten together.
"""

from __future__ import annotations

from asyncio import Task
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from ...errors import ConfigError, DeadlineExceeded, RoleDied
from ...monitor.terminal import View
from ..launchers.local import Launcher, Placement
from .processes import ProcessManager, RoleProcess

Spawn = Callable[[Coroutine[Any, Any, None]], Task[None]]
"""Starts background work that lasts as long as the run; its failure ends the run."""


class RolePool:
    """What the pools share. `processes` has all roles of the run; each process of this pool needs `gpus`."""

    processes: ProcessManager
    launcher: Launcher
    view: View
    gpus: int
    spawn: Spawn

    def names(self, count: int) -> list[str]:
        """Names that were never used before."""
        raise NotImplementedError

    def others(self, name: str) -> Sequence[str]:
        """Roles besides `name` that work or may come to."""
        raise NotImplementedError

    def ends_run(self, role: RoleProcess) -> bool:
        """Whether the run must end with the process of `role`, as others would end like it."""
        return False

    def processes_of(self, name: str) -> list[str]:
        """The roles that `name` consists of, itself the first."""
        return [name]

    async def start(self, name: str, placements: Mapping[str, Placement]) -> None:
        """Start the role, with a placement for each of `processes_of`, and watch it from now on."""
        raise NotImplementedError

    async def left(self, name: str) -> None:
        """The role is no part of the run any more."""
        raise NotImplementedError

    async def add(self, count: int) -> list[str]:
        """Start `count` more; their names. Raises ConfigError, DeadlineExceeded where there is no room for them."""
        names = self.names(count)
        parts = {name: self.processes_of(name) for name in names}
        placements = await self.launcher.place({part: self.gpus for name in names for part in parts[name]})
        try:
            for name in names:
                await self.start(name, {part: placements.pop(part) for part in parts[name]})
        finally:
            for part in placements:  # one before them could not be started
                await self.launcher.release(part)
        self.view.event(f"{', '.join(names)} added")
        return names

    async def watch(self, role: RoleProcess) -> None:
        try:
            await self.processes.watch([self.processes.roles[part] for part in self.processes_of(role.name)])
        except (RoleDied, ConfigError, DeadlineExceeded) as error:
            if self.ends_run(role) or not (others := self.others(role.name)):
                raise
            self.view.event(f"{error}; the run goes on with {', '.join(others)}")
        else:
            self.view.event(f"{role.name} removed")
        await self.forget(role.name)

    async def forget(self, name: str) -> None:
        """Remove it from the run, and release its placements."""
        parts = [part for part in self.processes_of(name) if self.processes.roles.pop(part, None)]
        if not parts:
            return
        await self.left(name)
        for part in parts:
            self.processes.revoke(part)
            self.view.status(part, "gone")
            await self.launcher.release(part)
