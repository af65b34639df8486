"""The Ray launcher: the same role processes, placed by Ray on one host or many.

Invariants:
- One placement group holds a bundle per role; Ray decides the hosts, and only that. No token and no weight goes through Ray.
- Each role is a child process of a small actor at its place, and dies with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import ConfigError, RoleDied, SlipstreamError, within
from .processes import LocalLauncher, Process, claim_ports, free_ports

PLACE_S = 120.0
"""Longest wait for Ray to find room for all roles."""


class Place:
    """The actor: starts and ends one role's process on its host."""

    def __init__(self, logs: str) -> None:
        Path(logs).mkdir(parents=True, exist_ok=True)
        self._launcher = LocalLauncher(Path(logs), 0)
        self._process: Process | None = None

    async def reserve(self, loopback: bool, first_port: int, count: int) -> tuple[str, list[int]]:
        """The address to listen on, and ports that are free there."""
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        return host, claim_ports(first_port, count, host) if first_port else free_ports(count, host)

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> int:
        self._process = await self._launcher.start(role, command, environment)
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait() if self._process else 0

    async def terminate(self) -> None:
        if self._process:
            await self._process.terminate()

    async def kill(self) -> None:
        if self._process:
            await self._process.kill()


class RayProcess:
    """A role's process at its place."""

    def __init__(self, place: Any, pid: int) -> None:
        self._place = place
        self.pid = pid

    async def wait(self) -> int:
        try:
            return await self._place.wait.remote()
        except RayActorError:
            return -9  # the place died, and the process with it

    async def terminate(self) -> None:
        with contextlib.suppress(RayActorError):
            await self._place.terminate.remote()

    async def kill(self) -> None:
        with contextlib.suppress(RayActorError):
            await self._place.kill.remote()


class RayLauncher:
    """Places roles on the cluster that `RAY_ADDRESS` names, or on a Ray that it starts here and stops again.

    Args:
        logs: folder of the roles' logs.
        first_port: 0, or the first of as many ports as there are roles.
        gpus: the roles that need GPUs, and how many; the others take one CPU.
        many_hosts: spread over the cluster and listen on node addresses; else everything is on this node, on loopback.
    """

    def __init__(self, logs: Path, first_port: int, gpus: dict[str, int], *, many_hosts: bool) -> None:
        self.host = "127.0.0.1"
        self._many_hosts = many_hosts
        self._logs = logs
        self._first_port = first_port
        self._gpus = gpus
        self._group: PlacementGroup | None = None
        self._places: dict[str, Any] = {}

    async def place(self, roles: Sequence[str], ports: int) -> dict[str, tuple[str, list[int]]]:
        await self._join(len(roles))
        here = ray.util.get_node_ip_address()
        if self._many_hosts:
            self.host = here
        near = {} if self._many_hosts else {f"node:{here}": 0.001}
        bundles = [{"CPU": 1.0, **near, **({"GPU": float(self._gpus[r])} if self._gpus.get(r) else {})} for r in roles]
        self._group = placement_group(bundles, strategy="PACK")
        await within(
            PLACE_S,
            self._group.ready(),
            who="the Ray launcher",
            waits_for=f"room for {len(roles)} roles, {bundles}",
            hint=f"the cluster has {ray.cluster_resources()}; ask for fewer replicas, ranks or workers",
        )
        actor = ray.remote(num_cpus=1)(Place)
        placed: dict[str, tuple[str, list[int]]] = {}
        for i, role in enumerate(roles):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=i)
            options = {"scheduling_strategy": strategy, "num_gpus": self._gpus.get(role, 0)}
            self._places[role] = actor.options(**options).remote(str(self._logs))
            first = self._first_port + i * ports if self._first_port else 0
            reserved = self._places[role].reserve.remote(not self._many_hosts, first, ports)
            placed[role] = await self._answer(reserved, f"ports for {role}")
        return placed

    async def _join(self, roles: int) -> None:
        """Connect to the cluster, or start one here. Raises ConfigError when `RAY_ADDRESS` leads nowhere."""
        if ray.is_initialized():
            return
        own = {} if _external() else {"address": "local", "num_cpus": roles, "include_dashboard": False}
        try:
            await asyncio.to_thread(ray.init, log_to_driver=False, logging_level=logging.ERROR, **own)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"launch.kind: ray cannot be reached or started: {error}") from error

    async def _answer(self, reference: Any, what: str) -> Any:
        """Wait for an actor; what it raised of ours is raised again as it was."""
        try:
            return await within(
                PLACE_S, reference, who="the Ray launcher", waits_for=what, hint="is the node alive? see `ray status`"
            )
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, SlipstreamError) else RoleDied(str(error)) from error

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> Process:
        place = self._places[role]
        pid = await self._answer(place.start.remote(role, list(command), environment), f"{role} to start")
        return RayProcess(place, pid)

    async def close(self) -> None:
        for place in self._places.values():
            with contextlib.suppress(RayActorError):
                await place.kill.remote()
            ray.kill(place)
        if self._group is not None:
            remove_placement_group(self._group)
        if not _external():
            await asyncio.to_thread(ray.shutdown)


def _external() -> bool:
    """Whether the user names a cluster that is not ours to start or stop."""
    return bool(os.environ.get("RAY_ADDRESS"))
