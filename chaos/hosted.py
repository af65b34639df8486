"""Faults on a run that spans several hosts of this machine: on its processes as on one host, and on whole hosts and links.

Invariants:
- A host whose Ray node has ended is started again: one that was lost, after the fault; one that Ray had given up, as soon as its
  node has heard so, which may be seconds after the fault.
- Every fault of a link and every freeze ends before the next fault begins.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from ..buffer.schema import process_names
from ..configs import Config
from ..errors import ConfigError, DeadlineExceeded, RoleDied
from ..launch.run_context import ROLE, VARIABLE
from ..launch.supervisor.control import REPLY_S
from ..launch.supervisor.factory import CLIENT_FACTORY
from ..launch.supervisor.processes import role_names
from .harness import AUDITED_CLIENT, FaultRunner
from .hosts import Hosts
from .plan import PlannedFault
from .switch import LinkState

ORPHANS_S = 60.0
"""Longest time for the processes of a killed supervisor to end: Ray has to see that it is gone, and tell the hosts."""

SET_S = REPLY_S + 60.0
"""Longest time for `slipstream set`, which has a deadline of its own once it has started."""

SLOW_S = 0.025
LOSS = 0.01
"""Delay and loss of a slow link, one way: between two hosts 50 ms and 2 %."""


def cpus_of(config: Config, hosts: int) -> list[int]:
    """Ray's CPUs of each host: room for the buffer with its shards and one more on that of the supervisor, and on each of the
    others for one role more than its share. Where one of them is lost, some roles find a place and some are missed."""
    first = len(process_names(config.buffer.shards)) + 1
    others = len(role_names(config)) - first
    return [first, *(-(-others // (hosts - 1)) + 1 for _ in range(hosts - 1))]


class HostedFaultRunner(FaultRunner):
    """See `FaultRunner`; the supervisor runs on host 0 of `hosts`."""

    def __init__(
        self, hosts: Hosts, arguments: Sequence[str], run_dir: Path, hang_s: float, report: Callable[[str], None]
    ) -> None:
        super().__init__(arguments, run_dir, hang_s, report)
        self._hosts = hosts
        self._orphans_s = ORPHANS_S

    def _command(self, *arguments: str) -> list[str]:
        return self._hosts.command(0, super()._command(*arguments))

    def _environment(self) -> dict[str, str]:
        return super()._environment() | self._hosts.environment

    def _roles(self) -> dict[str, psutil.Process]:
        found = {}
        for process in self._leftovers():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                role, parent = process.environ().get(ROLE), process.parent()
                if role and not (parent and str(self._dir) in parent.environ().get(VARIABLE, "")):
                    found[role] = process
        return found

    def _set(self, override: str) -> None:
        command = self._command("set", str(self._dir), override)
        try:
            done = subprocess.run(
                command, env=dict(os.environ), capture_output=True, text=True, timeout=SET_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            hint = f"see {self._dir}/logs/supervisor.log"
            raise DeadlineExceeded("slipstream chaos", f"`slipstream set` of {override}", SET_S, hint) from error
        if done.returncode:
            raise ConfigError(done.stderr.strip())

    def _inject(self, fault: PlannedFault) -> None:
        hosts, links = self._hosts, self._hosts.namespaces
        match fault.kind:
            case "lost":
                self._begin(fault)
                hosts.kill(fault.host)
                self._sleep(fault.seconds)
            case "frozen":
                self._begin(fault)
                with hosts.frozen(fault.host):
                    self._sleep(fault.seconds)
            case "cut" | "slow":
                assert links is not None
                self._begin(fault)
                slow = fault.kind == "slow"
                for host in range(len(hosts)) if slow else [fault.host]:
                    links.link(LinkState(host, up=slow, delay_s=SLOW_S, loss=LOSS))
                self._sleep(fault.seconds)
                for host in range(len(hosts)):
                    links.link(LinkState(host))
            case _:
                super()._inject(fault)
                return
        hosts.revive()
        self._end(fault, excused=False)

    def _revive_hosts(self) -> None:
        try:
            self._hosts.revive()
        except ConfigError as error:
            raise RoleDied(f"a host could not be started again: {error}") from error


def node_environments(hosts: int) -> dict[int, dict[str, str]]:
    """What the processes of a run under audit inherit from the Ray node of their host."""
    return {host: {CLIENT_FACTORY: AUDITED_CLIENT} for host in range(hosts)}
