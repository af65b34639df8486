"""The workers of a run: they start when training does, may be added and removed, and move to other hosts.

    add ──> a name, a placement ──> process ──> leases
    remove ──> SIGTERM ──> its leases are returned, and others play them again ──> process ends ──> gone

Invariants:
- Every change of the set of workers is published: all know their share of `rollout.max_episodes`, which has room for a group in
  each.
- The last worker cannot be removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ...errors import ConfigError
from ...monitor.terminal import View
from ..launchers.local import Launcher, Placement
from .pool import RolePool, Spawn
from .processes import FINAL, ProcessManager, RoleProcess

KIND = "worker"
LEAVE_S = 10.0  # how long a leaving worker may take to return its leases; after that they expire


class WorkerListing(msgspec.Struct, frozen=True):
    """One worker as `slipstream workers RUN list` shows it."""

    name: str
    state: str
    pid: int | None
    host: str
    restarts: int


@dataclass(eq=False)
class WorkerManager(RolePool):
    processes: ProcessManager
    launcher: Launcher
    view: View
    environment: Callable[[str, Placement], dict[str, str]]  # of a role with a placement
    changed: Callable[[tuple[str, ...]], Awaitable[None]]  # is told the names of the workers
    require_slots: Callable[[int], None] = lambda count: None  # raises ConfigError where so many workers are too many
    gpus: int = 0
    placements: dict[str, Placement] = field(default_factory=dict)
    _next: int = 0
    _playing: bool = False

    def prepare(self, placements: dict[str, Placement]) -> None:
        """The first workers; `begin` starts them."""
        self.placements = placements
        self._next = len(placements)
        for name, placement in placements.items():
            self.processes.roles[name] = RoleProcess(name, self.environment(name, placement))

    async def begin(self, spawn: Spawn) -> None:
        self.spawn, self._playing = spawn, True
        for role in self.processes.of_kind(KIND):
            await self.processes.start(role)
            spawn(self.watch(role))

    async def end(self, seconds: float) -> None:
        """Training is over: end all, and add no more."""
        self._playing = False
        await asyncio.gather(*(self.processes.stop(role, seconds) for role in self.processes.of_kind(KIND)))

    def names(self, count: int) -> list[str]:
        first, self._next = self._next, self._next + count
        return [f"{KIND}-{i}" for i in range(first, self._next)]

    def others(self, name: str) -> Sequence[str]:
        return [role.name for role in self.processes.of_kind(KIND) if role.name != name and not role.stopping]

    def ends_run(self, role: RoleProcess) -> bool:
        return role.exit_status in (FINAL, ConfigError.exit_code)

    async def add(self, count: int) -> list[str]:
        if not self._playing:
            raise ConfigError(
                "workers can be added only while the run trains: after its first evaluation, before its last"
            )
        self.require_slots(len(self.placements) + count)
        return await super().add(count)

    async def start(self, name: str, placements: Mapping[str, Placement]) -> None:
        self.placements |= placements
        await self.changed((*self.placements,))
        role = self.processes.roles[name] = RoleProcess(name, self.environment(name, placements[name]))
        try:
            await self.processes.start(role)
        except BaseException:
            await self.forget(name)
            raise
        self.spawn(self.watch(role))

    async def left(self, name: str) -> None:
        self.placements.pop(name, None)
        await self.changed((*self.placements,))

    async def remove(self, name: str) -> None:
        """End a worker; others play again what it did not finish. Returns at once. Raises ConfigError where there is no such
        worker, or it is the last."""
        role = self.processes.roles.get(name)
        if role is None or role.kind != KIND:
            raise ConfigError(f"{name} is no worker of this run; there are {', '.join(self.placements) or 'none'}")
        if role.stopping:
            raise ConfigError(f"{name} is leaving already")
        if not self._playing or not self.others(name):
            raise ConfigError(f"{name} is the last worker; add another before it is removed")
        role.ending.set()
        self.spawn(self.processes.stop(role, LEAVE_S))

    def listed(self) -> list[WorkerListing]:
        rows = []
        for role in self.processes.of_kind(KIND):
            state = "playing" if role.ready.is_set() and role.running else "starting"
            if role.process is None:
                state = "waits for a place" if self._playing else "not started"
            state = "leaving" if role.stopping else state
            pid = role.process.pid if role.process and role.running else None
            rows.append(WorkerListing(role.name, state, pid, self.placements[role.name].host, role.restarts))
        return rows
