"""Several hosts on one machine, each its own Ray node, whose processes and links can be hurt.

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
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from ..common.process import set_parent_death_signal
from ..errors import ConfigError, DeadlineExceeded
from .switch import LinkState, SwitchStarted, address_of, kill_all, processes_of

RAY_PORT = 6379
START_S = 120.0
"""Longest time for a Ray node to start and to be known to its head."""

RAY_SESSIONS = "/tmp/ray"
"""Where Ray keeps its sockets; each namespace has a folder of its own there."""

HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 4000,
    "health_check_failure_threshold": 3,
}
"""Ray takes a host that does not answer for lost after about fifteen seconds; by default after about a minute."""

NODES = """
import ray
ray.init(log_to_driver=False, logging_level="ERROR")
for node in ray.nodes():
    if node["Alive"]:
        print(node["NodeManagerAddress"])
"""
"""Prints the addresses of the cluster's nodes."""

STORE_BYTES = 80_000_000
"""Ray's object store, which a run does not use."""


def may_make_namespaces() -> bool:
    """Whether this process may make network namespaces with interfaces."""
    return (
        os.geteuid() == 0
        and os.access("/dev/net/tun", os.W_OK)
        and all(map(shutil.which, ("ip", "nsenter", "unshare")))
    )


class Hosts:
    """`count` hosts with `cpus` CPUs for Ray each, their Ray nodes started. Use as a context manager.

    Raises ConfigError where a cluster cannot be made here, DeadlineExceeded where a node does not start.
    """

    def __init__(
        self, count: int, cpus: Sequence[int], folder: Path, environments: Mapping[int, Mapping[str, str]] = {}
    ) -> None:
        self.namespaces: tuple[str, ...] = ()  # by host; none where this user may not make any
        self._cpus = cpus
        self._folder = folder
        self._environments = environments  # variables of a host's Ray node, and so of all processes that it starts
        self._count = count
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        self._logs = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            if may_make_namespaces():
                self._switch = subprocess.Popen(
                    [sys.executable, "-m", "slipstream.chaos.switch", str(self._count)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                self.namespaces = msgspec.json.decode(self._reply(), type=SwitchStarted).namespaces
            for host in range(self._count):
                self.start(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._switch is not None:
            assert self._switch.stdin is not None
            self._switch.stdin.close()
            self._switch.wait()
            self._switch = None
        else:
            for host in list(self._nodes):
                self.kill(host)
        for node in self._nodes.values():
            node.wait()
        self._nodes.clear()
        self._logs.close()

    def address(self, host: int) -> str:
        return address_of(host) if self.namespaces else f"127.0.0.{host + 1}"

    @property
    def environment(self) -> dict[str, str]:
        """Of a command that joins the cluster."""
        return {"RAY_ADDRESS": f"{self.address(0)}:{RAY_PORT}", "RAY_USAGE_STATS_ENABLED": "0"}

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` on `host`. The process that executes it has the id of the one that was started."""
        if not self.namespaces:
            return list(command)
        sessions = self._folder / f"ray-{host}"
        sessions.mkdir(exist_ok=True)
        Path(RAY_SESSIONS).mkdir(exist_ok=True)
        own = f'mount --bind "$0" {RAY_SESSIONS} && exec "$@"'
        return [
            "nsenter", f"--net={self.namespaces[host]}", "unshare", "--mount", "--propagation=private",
            "sh", "-c", own, str(sessions), *command,
        ]  # fmt: skip

    def start(self, host: int) -> None:
        """Start the host's Ray node, and wait until the cluster has it."""
        node = ["--head", f"--port={RAY_PORT}", f"--system-config={json.dumps(HEALTH)}", "--include-dashboard=false"]
        joins = [f"--address={self.address(0)}:{RAY_PORT}"]
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *(joins if host else node),
            f"--node-ip-address={self.address(host)}", f"--num-cpus={self._cpus[host]}", f"--object-store-memory={STORE_BYTES}",
        ]  # fmt: skip
        log = self._logs.enter_context((self._folder / f"host-{host}.log").open("ab"))
        self._nodes[host] = subprocess.Popen(
            self.command(host, command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **self._environments.get(host, {})},
            preexec_fn=functools.partial(set_parent_death_signal, os.getpid()),
            start_new_session=True,
        )
        self._wait(host)

    def _wait(self, host: int) -> None:
        until, alive = time.monotonic() + START_S, False
        while not alive and time.monotonic() < until:
            if (status := self._nodes[host].poll()) is not None:
                raise ConfigError(f"Ray's node on host {host} ended with {status}; see {self._folder}/host-{host}.log")
            done = subprocess.run(
                self.command(0, [sys.executable, "-c", NODES]),
                env={**os.environ, **self.environment},
                capture_output=True,
                text=True,
                timeout=START_S,
                check=False,
            )
            alive = self.address(host) in done.stdout.split()
        if not alive:
            raise DeadlineExceeded(
                "the harness", f"Ray's node on host {host}", START_S, f"see {self._folder}/host-{host}.log"
            )

    # --- what can happen to a host --------------------------------------------------------------------------------

    def processes(self, host: int) -> list[psutil.Process]:
        """Its processes, Ray's among them."""
        if self.namespaces:
            return list(processes_of(self.namespaces[host]))
        with contextlib.suppress(psutil.NoSuchProcess):
            node = psutil.Process(self._nodes[host].pid)
            return [node, *node.children(recursive=True)]
        return []

    def kill(self, host: int) -> None:
        """The host is lost with all its processes. Not for host 0 of a run that goes on."""
        if self.namespaces:
            kill_all([self.namespaces[host]])
        else:
            for process in self.processes(host):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        if node := self._nodes.pop(host, None):
            node.wait()

    @contextlib.contextmanager
    def frozen(self, host: int) -> Iterator[None]:
        """All its processes are stopped, and go on afterwards."""
        self._signal(host, signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(host, signal.SIGCONT)

    def _signal(self, host: int, number: signal.Signals) -> None:
        for process in self.processes(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def link(self, host: int, *, up: bool = True, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """From now on the host's link is like that, see `LinkState`. Only as root."""
        assert self._switch is not None
        assert self._switch.stdin is not None
        self._switch.stdin.write(msgspec.json.encode(LinkState(host, up, delay_s, loss)) + b"\n")
        self._switch.stdin.flush()
        self._reply()

    def _reply(self) -> bytes:
        assert self._switch is not None
        assert self._switch.stdout is not None
        if line := self._switch.stdout.readline():
            return line
        raise ConfigError("the switch between the hosts ended; is this process allowed to make network namespaces?")
