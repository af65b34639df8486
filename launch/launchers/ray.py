"""The Ray launcher: the same role processes, placed by Ray on one host or many.

Invariants:
- Each role has a placement group of one bundle. Ray only decides the hosts: no token, no weight and no secret goes through it.
- The bundle of a role that has left is reused for the next role that needs as many GPUs. The processes of a replica that spans
  hosts get bundles on different ones, as long as there is room.
- Each role is a child process of a small actor in its bundle (`ray_actor.py`), and dies with it.
- Ray moves the bundle of a lost host to another one, as soon as one has room, be it the lost one again; `move` asks for it anew
  while none has, and makes an actor there.
- A buffer and a reward server stay where they are: the others know them by their addresses.
- The buffer's processes are on the host of this process if that has room: the hosts whose loss ends a run are then one.
- A role is started only where the run's folder is the one of this host. `move` tries again, until `PLACE_S`, where it is not.
- Ending what cannot be reached takes `END_S` and raises nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from ...common.signals import take_back_sigterm
from ...errors import ConfigError, DeadlineExceeded, RoleDied, SlipstreamError, with_deadline
from .links import CONNECT_S, SUPERVISOR, LinkEnd, pairs_that_talk
from .local import PLACE_S, Placement, PlacementLost, ProcessHandle
from .packing import assign
from .ray_actor import RayBundle
from .shared_folder import folder_proof, require_shared

START_S = 30.0  # longest wait for an actor that has answered before to start a process, the end of an old one included
RETRY_S = 1.0  # between two actors of a role that were lost at once or are of no use: Ray has no event for when another may live
END_S = 10.0  # how long an actor may take to end its process; after that the actor itself is killed
BUFFER = "buffer"
FIXED = ("buffer", "reward")  # kinds of roles that cannot move to another host

log = logging.getLogger(__name__)


class RayProcess:
    """The process of `role`, reached through its actor."""

    def __init__(self, role: str, actor: Any, pid: int) -> None:
        self._role = role
        self._actor = actor
        self.pid = pid
        self.lost = False

    async def wait(self) -> int:
        try:
            return await self._actor.wait.remote()
        except RayActorError:
            self.lost = True
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


class RayLauncher:
    """Places roles on the cluster that `RAY_ADDRESS` names, or on a Ray that it starts here and stops again; over `many_hosts` of
    the cluster, else on this node and on loopback. Every role takes one CPU; in a Ray started here roles that are placed later
    take none: there a CPU is only a number. `resource` is what Ray calls a GPU of this accelerator. `named_by` is the key or option
    by which a user says where the folder of `logs` is."""

    def __init__(
        self, logs: Path, first_port: int, *, many_hosts: bool, resource: str = "GPU", named_by: str = "run.dir"
    ) -> None:
        self.host = "127.0.0.1"
        self.authorize: Callable[[str, str], None] = lambda role, key: None
        self._many_hosts = many_hosts
        self._resource = resource
        self._named_by = named_by
        self._logs = logs
        self._next_port = first_port
        self._groups: list[PlacementGroup] = []
        self._free: list[RayBundle] = []
        self._bundles: dict[str, RayBundle] = {}
        self._actors: dict[str, Any] = {}
        self._placements: dict[str, Placement] = {}

    async def place(self, roles: Mapping[str, int]) -> dict[str, Placement]:
        cpus = 0 if self._groups and not _external() else 1
        await self._join(len(roles))
        here = ray.util.get_node_ip_address()
        if self._many_hosts:
            self.host = here
        new: Mapping[str, int] = {}
        try:
            new, targets = self._reuse(roles, cpus)
            if new:
                spread = self._many_hosts and _external()
                self._reserve(new, cpus, targets if spread else {}, {} if spread else {f"node:{here}": 0.001})
            for role in roles:
                self._actors[role] = self._bundles[role].actor(self._logs)
            placing, room = (
                self._place_all(roles),
                f"room for {len(roles)} roles, {self._resource_bundles(roles, cpus)}",
            )
            hint = f"the cluster has {ray.cluster_resources()}; ask for fewer or smaller replicas, ranks or workers"
            placed = await with_deadline(PLACE_S, placing, who="the Ray launcher", waits_for=room, hint=hint)
            await self._require_shared({role: placement.host for role, placement in placed.items()})
            return placed
        except BaseException as error:
            made = [self._bundles[role] for role in new if role in self._bundles]
            await asyncio.gather(*(self.release(role) for role in roles))
            self._discard(made)
            if isinstance(error, RayActorError):
                raise RoleDied(f"the placement of {', '.join(roles)} was lost at once: {_line(error)}") from error
            raise

    async def _place_all(self, roles: Iterable[str]) -> dict[str, Placement]:
        for role in roles:
            self._placements[role] = await self._port(role)
        return {role: self._placements[role] for role in roles}

    def _discard(self, bundles: Iterable[RayBundle]) -> None:
        """Of new roles, for which there was no room."""
        for bundle in bundles:
            self._free.remove(bundle)
            self._groups.remove(bundle.group)
            remove_placement_group(bundle.group)

    async def reserve_port(self, role: str) -> int:
        try:
            return (await self._port(role)).port
        except (RayActorError, DeadlineExceeded) as error:
            raise PlacementLost(f"the place of {role} is lost: {_line(error)}") from error

    async def _port(self, role: str) -> Placement:
        reserved = self._actors[role].reserve.remote(not self._many_hosts, self._next_port)
        placement = Placement(*await self._answer(reserved, f"a port for {role}"))
        self._next_port += 1 if self._next_port else 0
        return placement

    async def _require_shared(self, hosts: Mapping[str, str]) -> None:
        """Of the `hosts` of roles. Raises ConfigError naming those on which the run's folder is not the one of this host."""
        if not self._many_hosts:
            return
        folder, answers = self._logs.parent, dict[str, tuple[str, str]]()
        with folder_proof(folder) as proof:
            for role, host in hosts.items():
                answer = self._actors[role].missing_proof.remote(proof)
                answers[role] = host, await self._answer(answer, f"{role}'s host to read {folder}")
        require_shared(folder, self.host, answers, self._named_by)

    def _reuse(self, roles: Mapping[str, int], cpus: int) -> tuple[dict[str, int], dict[str, str]]:
        """Give `roles` the bundles of roles that have left, where these fit; the others, and the hosts where they should be."""
        bundles = dict(zip(roles, self._resource_bundles(roles, cpus), strict=True))
        vacant = [(node, bundle) for bundle in self._free if (node := bundle.node)]
        here = ray.get_runtime_context().get_node_id()
        pinned = {role: here for role in bundles if role.partition("-")[0] == BUFFER}
        left = [(node, float(bundle.gpus)) for node, bundle in vacant]
        given, targets = assign(bundles, self._free_resources(), left, pinned, self._resource)
        for role, index in given.items():
            self._bundles[role] = vacant[index][1]
            self._free.remove(vacant[index][1])
        return {role: gpus for role, gpus in roles.items() if role not in given}, targets

    def _reserve(
        self, roles: Mapping[str, int], cpus: int, targets: Mapping[str, str], affinity: dict[str, float]
    ) -> None:
        """A placement group for each of `roles`, which Ray fills when there is room. Raises ConfigError where roles that are placed
        later need more GPUs than are free."""
        wanted, free = sum(roles.values()), int(ray.available_resources().get(self._resource, 0))
        if self._groups and wanted > free:
            raise ConfigError(
                f"{', '.join(roles)} want {wanted} {self._resource}s, and Ray has {free} that are free; ask for fewer"
            )
        for (role, gpus), bundle in zip(roles.items(), self._resource_bundles(roles, cpus), strict=True):
            target = targets.get(role)  # a preference: where it has no room after all, Ray finds another host
            group = placement_group([bundle | affinity], "STRICT_PACK", _soft_target_node_id=target)
            self._groups.append(group)
            self._bundles[role] = RayBundle(group, cpus, gpus, self._resource)

    def _resource_bundles(self, roles: Mapping[str, int], cpus: int) -> list[dict[str, float]]:
        """What each role needs of Ray; `roles` has the number of its GPUs."""
        needs = ({"CPU": float(cpus), self._resource: float(gpus)} for gpus in roles.values())
        return [{name: amount for name, amount in need.items() if amount} for need in needs]

    def _free_resources(self) -> dict[str, dict[str, float]]:
        """What each host that is alive has for more roles of this run, by its id in Ray."""
        nodes = sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"])
        left = {node["NodeID"]: dict(node["Resources"]) for node in nodes if node["Alive"]}
        groups = {group.id.hex() for group in self._groups}
        for name, table in placement_group_table().items():
            if name in groups:
                for index, node in table["bundles_to_node_id"].items():
                    for resource, amount in table["bundles"][index].items() if node in left else ():
                        left[node][resource] = left[node].get(resource, 0.0) - amount
        return left

    async def _join(self, roles: int) -> None:
        """Connect to the cluster, or start one here. Raises ConfigError when the one that `RAY_ADDRESS` names cannot be reached."""
        own = {} if _external() else {"address": "local", "num_cpus": roles, "include_dashboard": False}
        try:
            if not ray.is_initialized():
                await asyncio.to_thread(ray.init, log_to_driver=False, logging_level=logging.ERROR, **own)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(f"launch.kind: ray cannot be reached or started: {error}") from error
        take_back_sigterm()  # Ray's handler aborts this process 3 s later, however long its last checkpoint takes

    async def _answer(self, reference: Any, what: str, seconds: float | None = None) -> Any:
        """The answer of an actor. Raises the actor's own SlipstreamError, RayActorError where the actor is lost, RoleDied for any
        other error, DeadlineExceeded after `seconds`, or `PLACE_S`."""
        try:
            hint = "is the node alive? see `ray status`"
            return await with_deadline(
                PLACE_S if seconds is None else seconds, reference, who="the Ray launcher", waits_for=what, hint=hint
            )
        except RayTaskError as error:
            if isinstance(error.cause, SlipstreamError):
                raise error.cause from error
            raise RoleDied(f"the Ray launcher waited for {what}: {error.cause!r}") from error
        except RayActorError:
            raise
        except RayError as error:
            raise RoleDied(f"the Ray launcher waited for {what}: {_line(error)}") from error

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> ProcessHandle:
        actor = self._actors[role]
        try:
            self.authorize(role, await self._answer(actor.make_pair.remote(role), f"a key for {role}", START_S))
            pid = await self._answer(actor.start.remote(role, list(command), environment), f"{role} to start", START_S)
        except (RayActorError, DeadlineExceeded) as error:
            raise PlacementLost(
                f"the place of {role} at {self._placements[role].host} is lost: {_line(error)}"
            ) from error
        return RayProcess(role, actor, pid)

    async def move(self, role: str) -> Placement:
        before, deadline, useless = self._placements[role], time.monotonic() + PLACE_S, ""
        while True:
            ray.kill(self._actors[role])  # it may be alive but out of reach
            self._renew(role)
            self._actors[role] = self._bundles[role].actor(self._logs)
            reserved = self._actors[role].reserve.remote(not self._many_hosts, 0)
            try:
                left = deadline - time.monotonic()
                host, port = await self._answer(reserved, f"another place for {role}", max(0.0, left))
            except RayActorError as error:
                log.warning("another place of %s is lost, too: %s", role, _line(error))
                await asyncio.sleep(RETRY_S)
                continue
            except DeadlineExceeded as error:
                none = f"the place of {role} at {before.host} is lost, and Ray had no other within {PLACE_S:g} s"
                raise PlacementLost(useless or none) from error
            if host == before.host:
                return before
            if role.partition("-")[0] in FIXED:
                elsewhere = f"Ray has another at {host}, but the others know it at {before.host}"
                raise PlacementLost(f"the place of {role} is lost; {elsewhere}")
            try:
                await self._require_shared({role: host})
                break
            except (RayActorError, DeadlineExceeded, ConfigError) as error:  # of use once the folder is mounted there
                useless = f"the place of {role} at {before.host} is lost, and another is of no use: {_line(error)}"
                if time.monotonic() + RETRY_S >= deadline:
                    raise PlacementLost(useless) from error
                log.warning("%s", useless)
                await asyncio.sleep(RETRY_S)
        if self._next_port:
            host, port = msgspec.structs.astuple(await self._port(role))[:2]
        self._placements[role] = Placement(host, port)
        return self._placements[role]

    def _renew(self, role: str) -> None:
        """Ask anew for the bundle of a role whose host is lost. As long as no host has room, Ray tries to move the old one without
        a pause, which takes its head a core; a new one it tries at intervals of up to a second."""
        bundle = self._bundles[role]
        if placement_group_table(bundle.group)["state"] == "RESCHEDULING":
            self._groups.remove(bundle.group)
            remove_placement_group(bundle.group)
            group = placement_group(bundle.group.bundle_specs, "STRICT_PACK")
            self._groups.append(group)
            self._bundles[role] = msgspec.structs.replace(bundle, group=group)

    async def check_links(self) -> None:
        if not self._many_hosts:
            return
        ends = {role: actor for role, actor in self._actors.items()}
        hosts = {SUPERVISOR: self.host} | {role: placement.host for role, placement in self._placements.items()}
        own, pairs, listening = LinkEnd(), list(pairs_that_talk(hosts)), dict[str, int]()
        try:
            for server in {server: None for _, server in pairs}:
                if server == SUPERVISOR:
                    listening[server] = await own.listen(self.host, 0)
                else:
                    port = ends[server].listen.remote(hosts[server], self._placements[server].port)
                    listening[server] = await self._answer(port, f"{server} to listen", START_S)
            for client in {client: None for client, _ in pairs}:
                servers = [server for one, server in pairs if one == client]
                addresses = [(hosts[server], listening[server]) for server in servers]
                if client == SUPERVISOR:
                    found = await own.connect(addresses)
                else:
                    connecting = ends[client].connect.remote(addresses)
                    found = await self._answer(connecting, f"{client} to connect", START_S + CONNECT_S)
                for server, why in zip(servers, found, strict=True):
                    if why:
                        raise ConfigError(
                            f"launch.kind: ray_cluster needs hosts that reach each other, and {client} at {hosts[client]} cannot "
                            f"connect to {server} at {hosts[server]}:{listening[server]} ({why}); is there a firewall between them?"
                        )
        finally:
            await own.close()
            closing = (end.close_links.remote() for role, end in ends.items() if role in listening)
            await asyncio.gather(*(_completed(one, "a port to be closed") for one in closing))

    async def release(self, role: str) -> None:
        if (actor := self._actors.pop(role, None)) is not None:
            await self._kill(actor)
        self._placements.pop(role, None)
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
