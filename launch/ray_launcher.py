"""The Ray launcher: the same role processes, placed by Ray on one host or many.

Invariants:
- A placement group holds a bundle per role, and another one those that come later; Ray decides the hosts, and only that. No
  token and no weight goes through Ray.
- The place of a role that has left is given to the next that needs as many GPUs.
- Each role is a child process of a small actor at its place, and dies with it.
- A place that is lost, with its node or alone, is made anew when its role is started again: at the host that it had, or anywhere
  for a role that listens nowhere. Where that cannot be, the role has died.
- Ending what cannot be reached takes `END_S` and raises nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import ConfigError, DeadlineExceeded, RoleDied, SlipstreamError, within
from .processes import LocalLauncher, Process, Spot, claim_ports, free_ports

PLACE_S = 120.0
"""Longest wait for Ray to find room for all roles, or another place for one."""

END_S = 10.0
"""How long a place may take to say that it has ended its process; after that the place itself is ended."""

MOBILE = ("worker", "evaluator")
"""Kinds of roles that listen nowhere, so that they may go on at any host."""

log = logging.getLogger(__name__)


class Place:
    """The actor: starts and ends one role's process on its host."""

    def __init__(self, logs: str) -> None:
        Path(logs).mkdir(parents=True, exist_ok=True)
        self._launcher = LocalLauncher(Path(logs), 0)
        self._process: Process | None = None

    async def reserve(self, loopback: bool, port: int) -> tuple[str, int]:
        """The address to listen on, and a port that is free there: `port`, or any for 0."""
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        return host, (claim_ports(port, 1, host) if port else free_ports(1, host))[0]

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> int:
        await self.kill()  # whoever starts it again has seen it dead, or could not reach it
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
    """The process of `role` at its place."""

    def __init__(self, role: str, place: Any, pid: int) -> None:
        self._role = role
        self._place = place
        self.pid = pid

    async def wait(self) -> int:
        try:
            return await self._place.wait.remote()
        except RayActorError:
            return -9  # the place died, and the process with it

    async def terminate(self) -> None:
        await _told(self._place.terminate.remote(), f"{self._role} to be asked to stop")

    async def kill(self) -> None:
        if not await _told(self._place.kill.remote(), f"{self._role} to be killed"):
            ray.kill(self._place)  # ends `wait`, too


async def _told(answer: Any, what: str) -> bool:
    """Whether a place did as it was told within `END_S`; False for one that is lost."""
    try:
        await within(END_S, answer, who="the Ray launcher", waits_for=what, hint="its node is lost or stuck")
    except RayActorError:
        return False
    except DeadlineExceeded as error:
        log.warning("%s", error)
        return False
    return True


class Bundle(msgspec.Struct, frozen=True):
    """Room for one role: bundle `index` of a placement group, and the CPUs and GPUs in it."""

    group: PlacementGroup
    index: int
    cpus: int
    gpus: int

    def actor(self, logs: Path) -> Any:
        """A place in it."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index)
        return ray.remote(num_cpus=self.cpus, num_gpus=self.gpus, scheduling_strategy=strategy)(Place).remote(str(logs))

    @property
    def there(self) -> bool:
        """Whether its node lives. Where one does not, Ray moves the bundle to another node, if there is room."""
        node = placement_group_table(self.group)["bundles_to_node_id"].get(self.index)
        return any(known["NodeID"] == node and known["Alive"] for known in ray.nodes())


class RayLauncher:
    """Places roles on the cluster that `RAY_ADDRESS` names, or on a Ray that it starts here and stops again.

    Every role takes one CPU; in a Ray of our own those that come later take none, because there a CPU is only a number.

    Args:
        logs: folder of the roles' logs.
        first_port: 0, or the first of as many ports as there are roles.
        many_hosts: spread over the cluster and listen on node addresses; else everything is on this node, on loopback.
    """

    def __init__(self, logs: Path, first_port: int, *, many_hosts: bool) -> None:
        self.host = "127.0.0.1"
        self._many_hosts = many_hosts
        self._logs = logs
        self._next_port = first_port
        self._groups: list[PlacementGroup] = []
        self._free: list[Bundle] = []
        self._bundles: dict[str, Bundle] = {}
        self._places: dict[str, Any] = {}
        self._hosts: dict[str, str] = {}

    async def place(self, roles: Mapping[str, int]) -> dict[str, Spot]:
        cpus = 0 if self._groups and not _external() else 1
        await self._join(len(roles))
        here = ray.util.get_node_ip_address()
        if self._many_hosts:
            self.host = here
        new = {}
        for role, gpus in roles.items():
            vacant = next((b for b in self._free if b.gpus == gpus and b.there), None)
            if vacant is None:
                new[role] = gpus
            else:
                self._free.remove(vacant)
                self._bundles[role] = vacant
        placed: dict[str, Spot] = {}
        try:
            if new:
                near = {} if self._many_hosts and _external() else {f"node:{here}": 0.001}
                await self._reserve(new, cpus, near)
            for role in roles:
                self._places[role] = self._bundles[role].actor(self._logs)
                placed[role] = await self._port(role)
                self._hosts[role] = placed[role].host
        except BaseException as error:
            await asyncio.gather(*(self.release(role) for role in roles))
            if isinstance(error, RayActorError):
                raise RoleDied(f"a place for {', '.join(roles)} was lost at once: {_line(error)}") from error
            raise
        return placed

    async def another_port(self, role: str) -> int:
        return (await self._port(role)).port

    async def _port(self, role: str) -> Spot:
        """An address at the place of `role`."""
        reserved = self._places[role].reserve.remote(not self._many_hosts, self._next_port)
        spot = Spot(*await self._answer(reserved, f"a port for {role}"))
        self._next_port += 1 if self._next_port else 0
        return spot

    async def _reserve(self, roles: Mapping[str, int], cpus: int, near: dict[str, float]) -> None:
        """A placement group with a bundle for each of `roles`.

        Raises:
            ConfigError: they come later, and the GPUs are not there.
            DeadlineExceeded: Ray found no room.
        """
        wanted, free = sum(roles.values()), int(ray.available_resources().get("GPU", 0))
        if self._groups and wanted > free:
            raise ConfigError(f"{', '.join(roles)} want {wanted} GPUs, and Ray has {free} that are free; ask for fewer")
        bundles = [
            {name: amount for name, amount in {"CPU": float(cpus), "GPU": float(gpus), **near}.items() if amount}
            for gpus in roles.values()
        ]
        group = placement_group(bundles, strategy="PACK")
        try:
            await within(
                PLACE_S,
                group.ready(),
                who="the Ray launcher",
                waits_for=f"room for {len(roles)} roles, {bundles}",
                hint=f"the cluster has {ray.cluster_resources()}; ask for fewer replicas, ranks or workers",
            )
        except BaseException:
            remove_placement_group(group)
            raise
        self._groups.append(group)
        self._bundles |= {role: Bundle(group, i, cpus, gpus) for i, (role, gpus) in enumerate(roles.items())}

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
        """Wait for an actor.

        Raises:
            SlipstreamError: what it raised of ours, as it was.
            RayActorError: it is lost.
            RoleDied: anything else that it or Ray said.
            DeadlineExceeded: it was silent for `PLACE_S`.
        """
        try:
            return await within(
                PLACE_S, reference, who="the Ray launcher", waits_for=what, hint="is the node alive? see `ray status`"
            )
        except RayTaskError as error:
            if isinstance(error.cause, SlipstreamError):
                raise error.cause from error
            raise RoleDied(f"the Ray launcher waited for {what}: {error.cause!r}") from error
        except RayActorError:
            raise
        except RayError as error:
            raise RoleDied(f"the Ray launcher waited for {what}: {_line(error)}") from error

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> Process:
        try:
            return await self._start(role, command, environment)
        except (RayActorError, DeadlineExceeded) as error:
            log.warning("the place of %s at %s is lost: %s", role, self._hosts[role], _line(error))
        try:
            await self._move(role)
            return await self._start(role, command, environment)
        except (RayActorError, DeadlineExceeded) as error:
            raise RoleDied(
                f"the place of {role} at {self._hosts[role]} is lost, and Ray has no other: {_line(error)}"
            ) from error

    async def _start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> Process:
        place = self._places[role]
        pid = await self._answer(place.start.remote(role, list(command), environment), f"{role} to start")
        return RayProcess(role, place, pid)

    async def _move(self, role: str) -> None:
        """A new place for `role`, in its bundle wherever that is now."""
        ray.kill(self._places[role])  # it may only be out of reach
        place = self._places[role] = self._bundles[role].actor(self._logs)
        host, _ = await self._answer(place.reserve.remote(not self._many_hosts, 0), f"another place for {role}")
        if host != self._hosts[role] and role.partition("-")[0] not in MOBILE:
            raise RoleDied(
                f"the place of {role} is lost; Ray has another at {host}, but the others know it at {self._hosts[role]}"
            )
        self._hosts[role] = host

    async def release(self, role: str) -> None:
        if (place := self._places.pop(role, None)) is not None:
            await self._vacate(place)
        if (bundle := self._bundles.pop(role, None)) is not None:
            self._free.append(bundle)

    async def _vacate(self, place: Any) -> None:
        await _told(place.kill.remote(), "a place to end its process")
        ray.kill(place)

    async def close(self) -> None:
        await asyncio.gather(*(self._vacate(place) for place in self._places.values()))
        for group in self._groups:
            remove_placement_group(group)
        if not _external():
            await asyncio.to_thread(ray.shutdown)


def _line(error: Exception) -> str:
    """The first line of what Ray says, which may be a page."""
    return str(error).strip().partition("\n")[0]


def _external() -> bool:
    """Whether the user names a cluster that is not ours to start or stop."""
    return bool(os.environ.get("RAY_ADDRESS"))
