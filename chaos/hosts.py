"""Hosts for fault injection: several on one machine, each its own Ray node; a fault kills or freezes processes, or cuts links.

As root each host is a network namespace (`switch.py`), with an address, ports and a link of its own. Other users get the nodes of
one Ray cluster on addresses of loopback: their processes can be killed and frozen, they have no links.

Invariants:
- Host 0 has Ray's head; a run is started there, by `command`. Its loss is the loss of the run's supervisor.
- `close` ends every process of every host, and so does the end of this process, however it ends.
- Nothing is left behind but Ray's logs, in `folder`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from ..common.process import set_parent_death_signal
from ..errors import ConfigError, DeadlineExceeded
from ..launch.launchers.local import free_ports
from .switch import LinkState, SwitchStarted, address_of, kill_all, processes_of

RAY_PORT = 6379

START_S = 120.0
"""Longest time for a Ray node to start and to be known to its head."""

FREEZE_S = 10.0
"""Longest time for the processes of a host to stop."""

RAY_SESSIONS = "/tmp/ray"
"""Where Ray keeps its sockets; each namespace has a folder of its own there."""

RESOLVER = "/etc/resolv.conf"
"""Names the servers that know names, which no namespace reaches: a question would wait for them for seconds."""

SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 4000,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,
}
"""Ray takes a host that does not answer for lost after about fifteen seconds; by default after about a minute. It starts processes
for actors when there are any, not as many as it has CPUs as soon as a program connects."""

STARTED = b"Ray runtime started."
"""What `ray start` prints once the cluster knows its node."""

STORE_BYTES = 80_000_000
"""Ray's object store, which a run does not use."""


def may_make_namespaces() -> bool:
    """Whether this process may make network namespaces with interfaces."""
    return (
        os.geteuid() == 0
        and os.access("/dev/net/tun", os.W_OK)
        and all(map(shutil.which, ("ip", "nsenter", "unshare")))
    )


class Namespaces:
    """`count` hosts, joined by a switch, without anything that runs on them. Use as a context manager. Raises ConfigError where
    this process may not make them."""

    def __init__(self, count: int) -> None:
        if not may_make_namespaces():
            raise ConfigError(
                "hosts: network namespaces need root, /dev/net/tun, and the programs ip, nsenter and unshare"
            )
        command = [sys.executable, "-m", "slipstream.chaos.switch", str(count)]
        self._switch = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.paths = msgspec.json.decode(self._reply(), type=SwitchStarted).namespaces

    def __enter__(self) -> Namespaces:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        assert self._switch.stdin is not None
        self._switch.stdin.close()
        self._switch.wait()

    def address(self, host: int) -> str:
        return address_of(host)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` on `host`. The process that executes it has the id of the one that was started."""
        return ["nsenter", f"--net={self.paths[host]}", *command]

    def processes(self, host: int) -> list[psutil.Process]:
        return list(processes_of(self.paths[host]))

    def link(self, state: LinkState) -> None:
        """From now on the host's link is like that; `LinkState(host)` is one without faults."""
        assert self._switch.stdin is not None
        self._switch.stdin.write(msgspec.json.encode(state) + b"\n")
        self._switch.stdin.flush()
        self._reply()

    def _reply(self) -> bytes:
        assert self._switch.stdout is not None
        if line := self._switch.stdout.readline():
            return line
        raise ConfigError("hosts: the switch between them ended; may this process make network namespaces?")


class Hosts:
    """`len(cpus)` hosts with so many CPUs for Ray, their Ray nodes started. Use as a context manager. `environments` are variables
    of a host's Ray node, and so of all processes that it starts.

    Raises ConfigError where a cluster cannot be made here, DeadlineExceeded where a node does not start.
    """

    def __init__(
        self, cpus: Sequence[int], folder: Path, environments: Mapping[int, Mapping[str, str]] | None = None
    ) -> None:
        self.namespaces: Namespaces | None = None  # where this user may make any
        self.cpus = list(cpus)  # a host that starts again has as many as are here then
        self._folder = folder
        self._environments = environments or {}
        self._port = RAY_PORT
        self._token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # only this cluster's
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._logs = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            if may_make_namespaces():
                self.namespaces = Namespaces(len(self.cpus))
            else:
                (self._port,) = free_ports(1)
            self.start(*range(len(self.cpus)))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for host in sorted(self._nodes, reverse=True):
            self.kill(host)
        if self.namespaces is not None:
            self.namespaces.close()
        self._logs.close()

    def __len__(self) -> int:
        return len(self.cpus)

    def address(self, host: int) -> str:
        return (
            self.namespaces.address(host) if self.namespaces else f"127.0.0.{host + 2}"
        )  # Ray takes 127.0.0.1 for another

    @property
    def environment(self) -> dict[str, str]:
        """Of a command that joins the cluster."""
        return {"RAY_ADDRESS": f"{self.address(0)}:{self._port}", **self._token}

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` on `host`. The process that executes it has the id of the one that was started."""
        if self.namespaces is None:
            return list(command)
        sessions = self._folder / f"ray-{host}"
        sessions.mkdir(exist_ok=True)
        Path(RAY_SESSIONS).mkdir(exist_ok=True)
        resolver = self._folder / "resolv.conf"
        resolver.write_text("# These hosts have addresses and no names: whoever asks for one is answered at once.\n")
        own = f'mount --bind "$0" {RAY_SESSIONS} && mount --bind "$1" {RESOLVER} && shift && exec "$@"'
        mounted = [
            *("unshare", "--mount", "--propagation=private", "sh", "-c", own, str(sessions), str(resolver)),
            *command,
        ]
        return self.namespaces.command(host, mounted)

    def start(self, *hosts: int) -> None:
        """Start the Ray nodes of `hosts`, and wait until the cluster has them."""
        until, missing = time.monotonic() + START_S, {host: self._start(host) for host in hosts}
        while missing := {host: begin for host, begin in missing.items() if not self._has_joined(host, begin)}:
            for host in hosts:
                if (status := self._nodes[host].poll()) is not None:
                    raise ConfigError(f"Ray's node on host {host} ended with {status}; see {self._log(host)}")
            if time.monotonic() > until:
                nodes, logs = ", ".join(map(self.address, missing)), ", ".join(map(str, map(self._log, missing)))
                raise DeadlineExceeded("the harness", f"Ray's nodes at {nodes}", START_S, f"see {logs}")
            time.sleep(0.05)  # a file offers nothing to await

    def _has_joined(self, host: int, begin: int) -> bool:
        """Whether the node whose log begins at that byte says that its cluster knows it."""
        with self._log(host).open("rb") as log:
            log.seek(begin)
            return STARTED in log.read()

    def _start(self, host: int) -> int:
        """Where its log begins."""
        head = [
            *("--head", f"--port={self._port}", f"--system-config={json.dumps(SYSTEM)}", "--include-dashboard=false"),
            "--no-monitor",  # it would add nodes where a cloud has them
        ]
        command = [
            sys.executable, "-m", "slipstream.chaos.ray_node", "start", "--block", "--disable-usage-stats",
            "--include-log-monitor=false",  # it sends logs to programs that ask for them: none of a run does
            *([f"--address={self.address(0)}:{self._port}"] if host else head), f"--node-ip-address={self.address(host)}",
            f"--num-cpus={self.cpus[host]}", "--num-gpus=0", f"--object-store-memory={STORE_BYTES}",
        ]  # fmt: skip
        log = self._logs.enter_context(self._log(host).open("ab"))
        begin = log.tell()
        self._nodes[host] = subprocess.Popen(
            self.command(host, command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **self._environments.get(host, {}), **self._token},
            preexec_fn=functools.partial(set_parent_death_signal, os.getpid()),
            start_new_session=True,
        )
        return begin

    def _log(self, host: int) -> Path:
        return self._folder / f"host-{host}.log"

    # --- what can happen to a host --------------------------------------------------------------------------------

    def processes(self, host: int) -> list[psutil.Process]:
        """Its processes, Ray's among them."""
        if self.namespaces is not None:
            return self.namespaces.processes(host)
        with contextlib.suppress(psutil.NoSuchProcess):
            if host in self._nodes:
                node = psutil.Process(self._nodes[host].pid)
                return [node, *node.children(recursive=True)]
        return []

    def kill(self, host: int) -> None:
        """The host is lost with all its processes. Not for host 0 of a run that goes on."""
        kill_all(lambda: self.processes(host))
        if node := self._nodes.pop(host, None):
            node.wait()

    def revive(self) -> None:
        """Start the Ray nodes again that have ended: with their host, or because Ray had given up a host that did not answer."""
        ended = [host for host in range(len(self)) if host not in self._nodes or self._nodes[host].poll() is not None]
        for host in ended:
            kill_all(lambda host=host: self.processes(host))
        self.start(*ended)

    @contextlib.contextmanager
    def frozen(self, host: int) -> Iterator[None]:
        """All its processes are stopped, and go on afterwards. Raises DeadlineExceeded where one cannot be stopped."""
        deadline = time.monotonic() + FREEZE_S
        try:
            # A process may start another until it is stopped, and stops some time after the signal.
            while running := [process for process in self.processes(host) if not _is_stopped(process)]:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded("the harness", f"host {host} to stop", FREEZE_S, f"these run: {running}")
                for process in running:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.suspend()
                time.sleep(0.01)  # nothing reports that a process that is not a child has stopped
            yield
        finally:
            for process in self.processes(host):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()


def _is_stopped(process: psutil.Process) -> bool:
    """Or ended."""
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
