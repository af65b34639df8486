"""What a role has of Ray: its bundle of resources, and in it the actor that starts its processes.

Invariants:
- The actor makes the key pair of each process; Ray carries the public key.
- The process is a child of the actor, and dies with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .links import LinkEnd
from .local import LocalLauncher, ProcessHandle, claim_ports, free_ports
from .shared_folder import FolderProof, missing_proof


class RayActor:
    """The actor: starts and ends one role's process on its host."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._launcher = LocalLauncher(logs, 0)
        self._process: ProcessHandle | None = None
        self._link_end = LinkEnd()

    async def reserve(self, loopback: bool, port: int) -> tuple[str, int]:
        """The address to listen on, and a port that is free there: `port`, or any for 0."""
        host = "127.0.0.1" if loopback else ray.util.get_node_ip_address()
        return host, (claim_ports(port, 1, host) if port else free_ports(1, host))[0]

    async def listen(self, host: str, port: int) -> int:
        return await self._link_end.listen(host, port)

    async def connect(self, addresses: Sequence[tuple[str, int]]) -> list[str]:
        return await self._link_end.connect(addresses)

    async def close_links(self) -> None:
        await self._link_end.close()

    async def make_pair(self, role: str) -> str:
        """A new key pair for the process that starts next; the public key."""
        return self._launcher.make_pair(role)

    async def missing_proof(self, proof: FolderProof) -> str:
        return missing_proof(proof)

    async def start(self, role: str, command: Sequence[str], environment: dict[str, str]) -> int:
        self._logs.mkdir(parents=True, exist_ok=True)
        await self.kill()  # on a restart the old process is dead, or could not be reached
        self._process = await self._launcher.execute(role, command, environment)
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait() if self._process else 0

    async def terminate(self) -> None:
        if self._process:
            await self._process.terminate()

    async def kill(self) -> None:
        if self._process:
            await self._process.kill()


class RayBundle(msgspec.Struct, frozen=True):
    """The resources of one role: the only bundle of a placement group, with its CPUs and GPUs, which Ray counts as `resource`."""

    group: PlacementGroup
    cpus: int
    gpus: int
    resource: str

    def actor(self, logs: Path) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=0)
        devices: dict[str, Any] = {"num_gpus": self.gpus}
        if self.resource != "GPU":
            devices = {"resources": {self.resource: self.gpus}} if self.gpus else {}
        return ray.remote(num_cpus=self.cpus, **devices, scheduling_strategy=strategy)(RayActor).remote(logs)

    @property
    def node(self) -> str:
        """Where it is, by Ray's id; empty where that node is not alive. Ray moves the bundle of a lost node to another one, if that
        has room."""
        node = placement_group_table(self.group)["bundles_to_node_id"].get(0, "")
        return node if any(known["NodeID"] == node and known["Alive"] for known in ray.nodes()) else ""
