"""The launcher contract, and the local launcher: roles as child processes.

Invariants:
- A role leads its own process group: ending it ends whatever it started.
- A role dies with the process that launched it, also when that one is killed (`die_with_parent`).
- A launcher only places, starts and ends processes; who is restarted, and when, is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ..errors import ConfigError, DeadlineExceeded, within
from ..parent import die_with
from .resources import Placement, spare

log = logging.getLogger(__name__)

KILL_S = 10.0
"""How long a process may take to end after SIGKILL: the kernel frees its memory, or a device driver holds it."""

PARENT = "SLIPSTREAM_PARENT"
"""Variable that tells a role which process started it."""


class Process(Protocol):
    """A started role."""

    pid: int

    async def wait(self) -> int:
        """Return its exit status, negative for a signal, as soon as it has ended."""
        ...

    async def terminate(self) -> None:
        """Ask it to stop in good order. Does not raise where it has ended or cannot be reached."""
        ...

    async def kill(self) -> None:
        """End it and all it started. Does not raise where it has ended, cannot be reached, or does not end within `KILL_S`."""
        ...


class Spot(msgspec.Struct, frozen=True):
    """Where a role runs: an address it may listen on, and its GPUs; none where the launcher itself shows it those."""

    host: str
    port: int
    gpus: tuple[int, ...] = ()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


class Launcher(Protocol):
    """Starts roles. `place` comes first and says where each will run; `close` ends everything that is left.

    `host` is where the roles can reach this process, known once the first are placed.
    """

    host: str

    async def place(self, roles: Mapping[str, int]) -> dict[str, Spot]:
        """Reserve a place for each of `roles`, name -> GPUs it needs. May be called again, for roles that come later.

        Raises:
            ConfigError: there is no room.
        """
        ...

    async def another_port(self, role: str) -> int:
        """One more port at the place of `role`, for those that need two.

        Raises:
            ConfigError: it is taken.
        """
        ...

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> Process:
        """Start `command` at the role's place.

        Raises:
            RoleDied: the place is lost, and there is no other.
        """
        ...

    async def release(self, role: str) -> None:
        """Give back the place of a role that has ended for good; nothing where that was done before."""
        ...

    async def close(self) -> None: ...


def die_with_parent() -> None:
    """End with whoever launched this process, or else started it."""
    die_with(int(os.environ.get(PARENT) or os.getppid()))


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Port numbers that nobody listens on now, picked by the kernel."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind((host, 0))
        return [s.getsockname()[1] for s in sockets]


def claim_ports(first: int, count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` consecutive ports from `first`. Raises ConfigError naming the one that is taken."""
    ports = list(range(first, first + count))
    for port in ports:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind((host, port))
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"launch.port: {first} needs the ports {first} to {first + count - 1}, but {port} cannot be used "
                    f"({getattr(error, 'strerror', None) or error}); choose another, or 0 for any free ones"
                ) from None
    return ports


class LocalProcess:
    """A child process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    async def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        waits_for, hint = f"process {self.pid} to end after SIGKILL", "it is stuck in the kernel, see its /proc entry"
        try:
            await within(KILL_S, self._process.wait(), who="the launcher", waits_for=waits_for, hint=hint)
        except DeadlineExceeded as error:
            log.error("%s", error)


class LocalLauncher:
    """Child processes on this machine; their output goes to `logs/<role>.log`.

    Args:
        logs: folder of the roles' logs.
        first_port: 0 for any free ports, or the first of consecutive ones.
        placement: who has which of the `available` GPUs from the beginning; others get what is left.
    """

    host = "127.0.0.1"

    def __init__(self, logs: Path, first_port: int, placement: Placement | None = None, available: int = 0) -> None:
        self._logs = logs
        self._next_port = first_port
        self._given: set[int] = set()
        self._gpus = dict(placement.gpus) if placement else {}
        self._available = available
        self._started: defaultdict[str, list[LocalProcess]] = defaultdict(list)

    async def place(self, roles: Mapping[str, int]) -> dict[str, Spot]:
        gpus = dict(self._gpus)
        for role, count in roles.items():
            if role not in gpus:
                gpus[role] = spare(gpus, count, self._available)
        ports = self._ports(len(roles))
        self._gpus = gpus
        return {role: Spot(self.host, port, gpus[role]) for role, port in zip(roles, ports, strict=True)}

    async def another_port(self, role: str) -> int:
        return self._ports(1)[0]

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> Process:
        with (self._logs / f"{role}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment, PARENT: str(os.getpid())},
                start_new_session=True,
            )
        self._started[role].append(LocalProcess(process))
        return self._started[role][-1]

    async def release(self, role: str) -> None:
        await asyncio.gather(*(process.kill() for process in self._started.pop(role, ())))
        self._gpus.pop(role, None)  # nobody computes there any more

    async def close(self) -> None:
        await asyncio.gather(*(process.kill() for started in self._started.values() for process in started))

    def _ports(self, count: int) -> list[int]:
        """The next ones, where the first was named, or any that are free and were not given out before: who has one may not listen
        yet."""
        if not self._next_port:
            ports = [port for port in free_ports(count + len(self._given)) if port not in self._given][:count]
            self._given.update(ports)
            return ports
        ports = claim_ports(self._next_port, count)
        self._next_port += count
        return ports
