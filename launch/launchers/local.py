"""The launcher contract, and the local launcher: roles as child processes.

Invariants:
- A role leads its own process group: killing it kills the processes that it started.
- A role dies with the process that launched it, also when that one is killed (`set_parent_death_signal`).
- Each process of a role has a new key pair, made on its host before it starts, in a private folder that is removed when it ends.
- A launcher only places, starts and ends processes; the supervisor decides which are restarted, and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import random
import signal
import socket
import tempfile
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ...common.owned_folders import SERVER_FILES, OwnedFolder, private_folder, sweep
from ...common.process import PARENT
from ...errors import ConfigError, DeadlineExceeded, RoleDied, with_deadline
from ...rpc.security import VARIABLE, write_pair
from ..resources import GpuAssignment, free_gpus

log = logging.getLogger(__name__)

PLACE_S = 120.0  # longest wait for room for roles: for all at the start of a run, for one that lost its host
LOWEST_PORT = 10_000  # of those that are chosen: well-known services are below
RAY_WORKER_PORTS = range(10_002, 20_000)  # Ray gives them to its workers, one after the other
KEPT_PORTS = 256  # that this process keeps from others: the newest, at which a server may not listen yet
KILL_S = 10.0  # how long a process may take to end after SIGKILL, while the kernel or a device driver frees its memory


class PlacementLost(RoleDied):
    """The host of a role is gone, or what starts its processes there; or there is no other place for the role."""


class ProcessHandle(Protocol):
    pid: int
    lost: bool
    """Whether its host, or what started it there, was lost: `wait` returned for that reason."""

    async def wait(self) -> int:
        """Return the exit status, negative for a signal, as soon as the process has ended."""
        ...

    async def terminate(self) -> None:
        """Send SIGTERM. Does not raise where the process has ended or cannot be reached."""

    async def kill(self) -> None:
        """Send SIGKILL to its process group. Does not raise where it has ended, cannot be reached, or is alive after `KILL_S`."""


class Placement(msgspec.Struct, frozen=True):
    """Where a role runs: an address that it may listen on, and its GPUs; none where the launcher chooses them itself."""

    host: str
    port: int
    gpus: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Launcher(Protocol):
    """Starts roles. `place` comes first; `close` ends every process that is left. `host` is this process's address for the roles,
    known once the first roles are placed. `authorize` gets the name and the public key of each process before it starts."""

    host: str
    authorize: Callable[[str, str], None]

    async def place(self, roles: Mapping[str, int]) -> dict[str, Placement]:
        """Reserve a placement for each of `roles`, name -> number of GPUs; also for more roles later. Raises ConfigError where
        resources are missing."""
        ...

    async def reserve_port(self, role: str) -> int:
        """A second port on the host of `role`. Raises ConfigError where the port is in use, PlacementLost: its host is lost."""
        ...

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        """Start `command` as `role`. Raises PlacementLost where the placement is lost; `move` finds another."""
        ...

    async def move(self, role: str) -> Placement:
        """Another placement for a role whose placement is lost, on the same host where that is back. Raises PlacementLost where
        there was no room for it within `PLACE_S`, or the role cannot move."""
        ...

    async def check_links(self) -> None:
        """Connect every pair of hosts whose roles will talk. Raises ConfigError naming a pair that cannot."""

    async def release(self, role: str) -> None:
        """Free the placement of a role that has ended for good; a second call does nothing."""

    async def close(self) -> None: ...


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that are free now, and that no other process is given while this one keeps them. They are below those that the kernel
    gives to outgoing connections, of which any may take one before its server has bound it; and those that Ray gives to its workers
    come last. Raises ConfigError: there are not so many."""
    above = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates, found = list(range(LOWEST_PORT, above)), list[int]()
    random.SystemRandom().shuffle(candidates)
    candidates.sort(key=lambda port: port not in RAY_WORKER_PORTS)  # the last is taken first
    with contextlib.ExitStack() as stack:
        while candidates and len(found) < count:
            port, bound = candidates.pop(), stack.enter_context(socket.socket())
            try:
                bound.bind((host, port))
            except OSError:
                continue
            if keep_port(port):
                found.append(port)
    if len(found) == count:
        return found
    raise ConfigError(
        f"launch.ports.first: {host} has no {count} free ports from {LOWEST_PORT} to {above - 1}; set the first one"
    )


_kept = deque[int]()
"""Descriptors of sockets whose names are those of ports."""


def keep_port(port: int) -> bool:
    """Keep a port from all that ask, this process included, until it ends or has kept `KEPT_PORTS` more; False where it is kept
    already. Its name is an abstract one, of which Linux has one in a network namespace, and which goes with its process however
    that ends."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0slipstream port {port}")
    except OSError as error:
        name.close()
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    _kept.append(name.detach())
    if len(_kept) > KEPT_PORTS:
        os.close(_kept.popleft())
    return True


def claim_ports(first: int, count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` consecutive ports from `first`. Raises ConfigError naming the one that is in use."""
    ports = list(range(first, first + count))
    for port in ports:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind((host, port))
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"launch.ports.first: {first} needs the ports {first} to {first + count - 1}, but {port} cannot be used "
                    f"({getattr(error, 'strerror', None) or error}); choose another, or 0 for any free ones"
                ) from None
    return ports


class LocalProcess:
    lost = False

    def __init__(self, process: asyncio.subprocess.Process, private: OwnedFolder) -> None:
        self._process = process
        self._private = private
        self._ended = False
        self.pid = process.pid

    async def wait(self) -> int:
        """The exit status. What the process has left of its group is killed once, when it has ended: later its number may be that
        of a group of others."""
        status = await self._process.wait()
        if not self._ended:
            self._ended = True
            _kill_group(self.pid)
            self._private.close()
        return status

    async def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def kill(self) -> None:
        if not self._ended:
            await kill_group(self.pid, self.wait(), who="the launcher")


async def kill_group(pid: int, ended: Awaitable[object], who: str) -> None:
    """Kill what is left of the process group of `pid`, and await `ended`, its end; one that does not come in `KILL_S` is
    logged, also where it may not be killed."""
    _kill_group(pid)
    waits_for, hint = f"process {pid} to end after SIGKILL", "it is stuck in the kernel, see its /proc entry"
    try:
        await with_deadline(KILL_S, ended, who=who, waits_for=waits_for, hint=hint)
    except DeadlineExceeded as error:
        log.error("%s", error)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


class LocalLauncher:
    """Child processes on this machine; their output goes to `<logs>/<role>.log`. They listen on consecutive ports from
    `first_port`, or on any free ones for 0. `placement` has the first roles' GPUs, of `available` ones; roles that are placed
    later get those that are left."""

    host = "127.0.0.1"

    def __init__(self, logs: Path, first_port: int, placement: GpuAssignment | None = None, available: int = 0) -> None:
        self._logs = logs
        self._next_port = first_port
        self._gpus = dict(placement.gpus) if placement else {}
        self._available = available
        self._started: defaultdict[str, list[ProcessHandle]] = defaultdict(list)
        self._private: dict[str, OwnedFolder] = {}  # of processes that are about to start
        self.authorize: Callable[[str, str], None] = lambda role, key: None

    async def place(self, roles: Mapping[str, int]) -> dict[str, Placement]:
        gpus = dict(self._gpus)
        for role, count in roles.items():
            if role not in gpus:
                gpus[role] = free_gpus(gpus, count, self._available)
        ports = self._ports(len(roles))
        self._gpus = gpus
        return {role: Placement(self.host, port, gpus[role]) for role, port in zip(roles, ports, strict=True)}

    async def reserve_port(self, role: str) -> int:
        return self._ports(1)[0]

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        self.authorize(role, self.make_pair(role))
        return await self.execute(role, command, environment)

    def make_pair(self, role: str) -> str:
        """A new key pair for the next process of `role`; the public key."""
        if (unused := self._private.pop(role, None)) is not None:
            unused.close()
        self._private[role] = folder = private_folder()
        return write_pair(folder.path).public

    async def execute(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        """Start `command` as `role`, with the pair that was made for it."""
        env, no_input = {**os.environ, **environment, **self.own_variables(role)}, asyncio.subprocess.DEVNULL
        with (self._logs / f"{role}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=no_input, stdout=log, stderr=log, env=env, start_new_session=True
            )
        self._started[role].append(LocalProcess(process, self._private.pop(role)))
        return self._started[role][-1]

    def own_variables(self, role: str) -> dict[str, str]:
        """Environment variables of the next process of `role`: its parent, and where its keys are."""
        return {PARENT: str(os.getpid()), VARIABLE: str(self._private[role].path)}

    async def move(self, role: str) -> Placement:
        raise PlacementLost(f"there is one host, and {role} cannot run on it any more")

    async def check_links(self) -> None:
        """There is one host."""

    async def release(self, role: str) -> None:
        await asyncio.gather(*(process.kill() for process in self._started.pop(role, ())))
        self._gpus.pop(role, None)

    async def close(self) -> None:
        await asyncio.gather(*(process.kill() for started in self._started.values() for process in started))
        for folder in self._private.values():
            folder.close()
        self._private.clear()
        sweep(Path(tempfile.gettempdir()), SERVER_FILES)

    def _ports(self, count: int) -> list[int]:
        """The next ports after the configured first one; without one, free ports."""
        if not self._next_port:
            return free_ports(count)
        ports = claim_ports(self._next_port, count)
        self._next_port += count
        return ports
