"""The Ray launcher: the same role processes, placed by Ray on one host or many.

Invariants:
- A placement group holds one bundle per role; roles that are placed later get another group. Ray only decides the hosts: no token
  and no weight goes through it.
- The bundle of a role that has left is reused for the next role that needs as many GPUs.
- Each role is a child process of a small actor in its bundle, and dies with it.
- An actor that is lost, with its node or without, is made again when its role is restarted: on the same host, or on any host for a
  role that does not listen. Where that is impossible, the role has died.
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

from ...errors import ConfigError, DeadlineExceeded, RoleDied, SlipstreamError, with_deadline
from .local import LocalLauncher, Placement, ProcessHandle, claim_ports, free_ports

PLACE_S = 120.0  # longest wait for Ray to place all roles, or to place one again
END_S = 10.0  # how long an actor may take to end its process; after that the actor itself is killed
MOBILE = ("worker", "evaluator")  # kinds of roles that do not listen, so that any host will do

log = logging.getLogger(__name__)


class RayActor:
    """The actor: starts and ends one role's process on its host."""

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._launcher = LocalLauncher(logs, 0)
        self._process: ProcessHandle | None = None

    async def reserve(self, loopback: bool, port: int) -> tuple[str, int]:
        """The address to listen on, and a port that is free there: `port`, or any for 0."""
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        return host, (claim_ports(port, 1, host) if port else free_ports(1, host))[0]

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> int:
        await self.kill()  # on a restart the old process is dead, or could not be reached
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
    """The process of `role`, reached through its actor."""

    def __init__(self, role: str, actor: Any, pid: int) -> None:
        self._role = role
        self._actor = actor
        self.pid = pid

    async def wait(self) -> int:
        try:
            return await self._actor.wait.remote()
        except RayActorError:
            return -9  # the actor died, and the process with it

    async def terminate(self) -> None:
        await _completed(self._actor.terminate.remote(), f"{self._role} to be asked to stop")

    async def kill(self) -> None:
        if not await _completed(self._actor.kill.remote(), f"{self._role} to be killed"):
            ray.kill(self._actor)  # ends `wait`, too


async def _completed(answer: Any, what: str) -> bool:
    """Whether an actor completed a call within `END_S`; False for one that is lost."""
    try:
        await with_deadline(END_S, answer, who="the Ray launcher", waits_for=what, hint="its node is lost or stuck")
    except RayActorError:
        return False
    except DeadlineExceeded as error:
        log.warning("%s", error)
        return False
    return True


class RayBundle(msgspec.Struct, frozen=True):
    """The resources of one role: bundle `index` of a placement group, with its CPUs and GPUs."""

    group: PlacementGroup
    index: int
    cpus: int
    gpus: int

    def actor(self, logs: Path) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.index)
        options = {"num_cpus": self.cpus, "num_gpus": self.gpus, "scheduling_strategy": strategy}
        return ray.remote(**options)(RayActor).remote(logs)

    @property
    def alive(self) -> bool:
        """Whether its node is alive. Ray moves the bundle of a lost node to another one, if that has room."""
        node = placement_group_table(self.group)["bundles_to_node_id"].get(self.index)
        return any(known["NodeID"] == node and known["Alive"] for known in ray.nodes())


class RayLauncher:
    """Places roles on the cluster that `RAY_ADDRESS` names, or on a Ray that it starts here and stops again; over `many_hosts` of
    the cluster, else on this node and on loopback. Every role takes one CPU; in a Ray started here roles that are placed later
    take none: there a CPU is only a number."""

    def __init__(self, logs: Path, first_port: int, *, many_hosts: bool) -> None:
        self.host = "127.0.0.1"
        self._many_hosts = many_hosts
        self._logs = logs
        self._next_port = first_port
        self._groups: list[PlacementGroup] = []
        self._free: list[RayBundle] = []
        self._bundles: dict[str, RayBundle] = {}
        self._actors: dict[str, Any] = {}
        self._hosts: dict[str, str] = {}

    async def place(self, roles: Mapping[str, int]) -> dict[str, Placement]:
        cpus = 0 if self._groups and not _external() else 1
        await self._join(len(roles))
        here = ray.util.get_node_ip_address()
        if self._many_hosts:
            self.host = here
        new = dict(roles)
        for role, gpus in roles.items():
            if vacant := next((b for b in self._free if b.gpus == gpus and b.alive), None):
                self._free.remove(vacant)
                self._bundles[role] = vacant
                del new[role]
        placed: dict[str, Placement] = {}
        try:
            if new:
                affinity = {} if self._many_hosts and _external() else {f"node:{here}": 0.001}
                await self._reserve(new, cpus, affinity)
            for role in roles:
                self._actors[role] = self._bundles[role].actor(self._logs)
                placed[role] = await self._port(role)
                self._hosts[role] = placed[role].host
        except BaseException as error:
            await asyncio.gather(*(self.release(role) for role in roles))
            if isinstance(error, RayActorError):
                raise RoleDied(f"the placement of {', '.join(roles)} was lost at once: {_line(error)}") from error
            raise
        return placed

    async def reserve_port(self, role: str) -> int:
        return (await self._port(role)).port

    async def _port(self, role: str) -> Placement:
        reserved = self._actors[role].reserve.remote(not self._many_hosts, self._next_port)
        placement = Placement(*await self._answer(reserved, f"a port for {role}"))
        self._next_port += 1 if self._next_port else 0
        return placement

    async def _reserve(self, roles: Mapping[str, int], cpus: int, affinity: dict[str, float]) -> None:
        """A placement group with a bundle for each of `roles`. Raises ConfigError where roles that are placed later need more GPUs
        than are free, DeadlineExceeded where Ray found no room."""
        wanted, free = sum(roles.values()), int(ray.available_resources().get("GPU", 0))
        if self._groups and wanted > free:
            raise ConfigError(f"{', '.join(roles)} want {wanted} GPUs, and Ray has {free} that are free; ask for fewer")
        wishes = [{"CPU": float(cpus), "GPU": float(gpus), **affinity} for gpus in roles.values()]
        bundles = [{name: amount for name, amount in wish.items() if amount} for wish in wishes]
        group = placement_group(bundles, strategy="PACK")
        try:
            room = f"room for {len(roles)} roles, {bundles}"
            hint = f"the cluster has {ray.cluster_resources()}; ask for fewer replicas, ranks or workers"
            await with_deadline(PLACE_S, group.ready(), who="the Ray launcher", waits_for=room, hint=hint)
        except BaseException:
            remove_placement_group(group)
            raise
        self._groups.append(group)
        self._bundles |= {role: RayBundle(group, i, cpus, gpus) for i, (role, gpus) in enumerate(roles.items())}

    async def _join(self, roles: int) -> None:
        """Connect to the cluster, or start one here. Raises ConfigError when the one that `RAY_ADDRESS` names cannot be reached."""
        if ray.is_initialized():
            return
        own = {} if _external() else {"address": "local", "num_cpus": roles, "include_dashboard": False}
        try:
            await asyncio.to_thread(ray.init, log_to_driver=False, logging_level=logging.ERROR, **own)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"launch.kind: ray cannot be reached or started: {error}") from error

    async def _answer(self, reference: Any, what: str) -> Any:
        """The answer of an actor. Raises the actor's own SlipstreamError, RayActorError where the actor is lost, RoleDied for any
        other error, DeadlineExceeded after `PLACE_S`."""
        try:
            hint = "is the node alive? see `ray status`"
            return await with_deadline(PLACE_S, reference, who="the Ray launcher", waits_for=what, hint=hint)
        except RayTaskError as error:
            if isinstance(error.cause, SlipstreamError):
                raise error.cause from error
            raise RoleDied(f"the Ray launcher waited for {what}: {error.cause!r}") from error
        except RayActorError:
            raise
        except RayError as error:
            raise RoleDied(f"the Ray launcher waited for {what}: {_line(error)}") from error

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        try:
            return await self._start(role, command, environment)
        except (RayActorError, DeadlineExceeded) as error:
            log.warning("the placement of %s at %s is lost: %s", role, self._hosts[role], _line(error))
        try:
            await self._move(role)
            return await self._start(role, command, environment)
        except (RayActorError, DeadlineExceeded) as error:
            lost = f"the placement of {role} at {self._hosts[role]} is lost"
            raise RoleDied(f"{lost}, and Ray has no other: {_line(error)}") from error

    async def _start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        actor = self._actors[role]
        pid = await self._answer(actor.start.remote(role, list(command), environment), f"{role} to start")
        return RayProcess(role, actor, pid)

    async def _move(self, role: str) -> None:
        """A new actor for `role`, in its bundle wherever that is now."""
        ray.kill(self._actors[role])  # it may be alive but out of reach
        actor = self._actors[role] = self._bundles[role].actor(self._logs)
        host, _ = await self._answer(actor.reserve.remote(not self._many_hosts, 0), f"another placement for {role}")
        if host != self._hosts[role] and role.partition("-")[0] not in MOBILE:
            elsewhere = f"Ray has another at {host}, but the others know it at {self._hosts[role]}"
            raise RoleDied(f"the placement of {role} is lost; {elsewhere}")
        self._hosts[role] = host

    async def release(self, role: str) -> None:
        if (actor := self._actors.pop(role, None)) is not None:
            await self._kill(actor)
        if (bundle := self._bundles.pop(role, None)) is not None:
            self._free.append(bundle)

    async def _kill(self, actor: Any) -> None:
        await _completed(actor.kill.remote(), "an actor to end its process")
        ray.kill(actor)

    async def close(self) -> None:
        await asyncio.gather(*map(self._kill, self._actors.values()))
        for group in self._groups:
            remove_placement_group(group)
        if not _external():
            await asyncio.to_thread(ray.shutdown)


def _line(error: Exception) -> str:
    """The first line of an error of Ray, which may be a page."""
    return str(error).strip().partition("\n")[0]


def _external() -> bool:
    """Whether the user names a running cluster, which is neither started nor stopped here."""
    return bool(os.environ.get("RAY_ADDRESS"))
