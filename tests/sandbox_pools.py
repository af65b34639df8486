"""Pools of every kind of sandbox: those of this host, and machines elsewhere, for which a container of bubblewrap stands in.
SWE-ReX's has the real server of SWE-ReX in it; what stands in for E2B is in `e2b_stand_in.py`."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from slipstream.envs.sandbox import E2BPool, Limits, LocalPool, SandboxPool, SweRexPool
from slipstream.envs.sandbox.bubblewrap import find_bwrap
from slipstream.envs.sandbox.gvisor import find_runsc
from slipstream.errors import ConfigError
from slipstream.tests import e2b_stand_in
from slipstream.tests.tiny import free_port
from swerex.deployment.remote import RemoteDeployment

LOCAL = ("bubblewrap", "landlock", "gvisor")  # of this host
ALL = (*LOCAL, "swe-rex", "e2b")
KEY = "the-key"
CONTAINER = (
    *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-pid", "--unshare-ipc"),
    *("--tmpfs", "/mnt", "--setenv", "TMPDIR", "/mnt"),
)
UNTIL_STDIN_ENDS = (
    "sh",
    "-c",
    ': | "$@" & read _; kill -9 -1',
    "sh",
)  # so that it ends with the tests; the server's stdin has ended


def container(*server: str) -> tuple[str, ...]:
    """The command line of a machine that runs a server, until its stdin ends."""
    return (find_bwrap(), *CONTAINER, "--", *UNTIL_STDIN_ENDS, *server)


class Deployment(RemoteDeployment):
    """A machine elsewhere: processes, IPC and a temporary folder of its own, the network and files of this host, read-only."""

    def __init__(self) -> None:
        self.port = free_port()
        super().__init__(host="http://127.0.0.1", port=self.port, auth_token=KEY)

    async def start(self) -> None:
        server = (str(Path(sys.executable).with_name("swerex-remote")), "--host", "127.0.0.1", "--auth-token", KEY)
        self.process = subprocess.Popen(  # noqa: ASYNC220 - it runs in a thread of its own
            container(*server, "--port", str(self.port)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        await super().start()
        await self.runtime.wait_until_alive(timeout=60.0)

    async def stop(self) -> None:
        if self._runtime is not None:
            await super().stop()  # as other deployments do, it first asks the server to close
        self.process.communicate()


class Machines(SweRexPool):
    """Keeps what it has deployed."""

    def __init__(self, limits: Limits, kind: type[Deployment] = Deployment) -> None:
        self.deployed: list[Any] = []
        self._kind = kind
        super().__init__(self._deploy, limits)

    def _deploy(self) -> Deployment:
        self.deployed.append(self._kind())
        return self.deployed[-1]


@functools.cache
def e2b_service() -> e2b_stand_in.E2BService:
    """The only one of this process, which the SDK takes for E2B from now on."""
    service = e2b_stand_in.E2BService(container)
    os.environ |= {"E2B_API_KEY": e2b_stand_in.KEY, "E2B_API_URL": service.url, "E2B_SANDBOX_URL": service.url}
    return service


def e2b_pool(limits: Limits) -> E2BPool:
    e2b_service()
    return E2BPool(limits=limits)


def pool_of(kind: str, limits: Limits) -> SandboxPool:
    elsewhere = {"swe-rex": Machines, "e2b": e2b_pool}
    return elsewhere[kind](limits) if kind in elsewhere else local_pool_of(kind, limits)


def local_pool_of(kind: str, limits: Limits, **options: Any) -> LocalPool:
    require_program(kind)
    return LocalPool(limits, kind=kind, **options)


def require_program(kind: str) -> None:
    """Skip the test where gVisor is not installed, which nothing needs that was not asked for."""
    if kind == "gvisor":
        try:
            find_runsc()
        except ConfigError as missing:
            pytest.skip(str(missing))
