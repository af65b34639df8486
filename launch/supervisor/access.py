"""The supervisor's access control of a run: it holds every role's public key and makes the access tokens of the inference servers.

Invariants:
- The supervisor's own key pair and the tokens live as long as the supervisor.
- A role's key is authorized before its process starts, and replaces the key of the process before.
- Tokens leave this process over a guarded connection only, to the role that may have them: workers cannot push weights.
- Servers that others started have tokens, a key and a certificate of their own, which the supervisor reads from their files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from msgspec import structs

from ...buffer.client_registry import SUPERVISOR
from ...errors import RequestRefused
from ...rollout.engines.access import ServerAccess, make_access
from ...rollout.engines.server_keys import ServerKeys
from ...rpc.client import RpcClient
from ...rpc.pubsub import StatePublisher
from ...rpc.security import PeerTable, make_pair
from ...rpc.server import RpcRequest, RpcServer
from ..peers import AccessGranted, PeerDirectory, RequestAccess

SERVERS = ("engine", "reward")  # kinds of roles that are told both tokens, and have certificates
CONTROLLING = ("learner",)  # kinds that push weights
REQUESTING = ("worker", "evaluator", "rater")  # kinds that ask for completions and scores


class AccessManager:
    """Made in a running event loop, bound on `host`; `serve` until the run ends, then `close`. `certified` is told the
    certificate of each server that starts."""

    def __init__(self, host: str, certified: Callable[[str, str], None]) -> None:
        self._certified = certified
        self.pair = make_pair()
        self._admitted = dict[str, str]()
        self.table = PeerTable()
        self.servers = make_access()
        self._directory: StatePublisher[PeerDirectory] = StatePublisher(
            f"tcp://{host}:*", PeerDirectory(1, {SUPERVISOR: self.pair.public}), self.table, self.pair
        )
        self._requests: RpcServer[RequestAccess] = RpcServer(
            f"tcp://{host}:*", "the supervisor", RequestAccess, peers=self.table, pair=self.pair
        )

    @property
    def directory_address(self) -> str:
        return self._directory.address

    @property
    def request_address(self) -> str:
        return self._requests.address

    @property
    def directory(self) -> PeerDirectory:
        return self._directory.state

    def admit(self, name: str, key: str) -> None:
        """`name`, which is no role, may follow what this process publishes."""
        self._admitted[name] = key
        self.table.update({**self.directory.keys, **self._admitted})

    def authorize(self, role: str, key: str) -> None:
        """`key` is that of the process of `role` which starts now; the one before it has no rights any more."""
        before = self.directory
        certificates = {name: known for name, known in before.certificates.items() if name != role}
        self._publish(PeerDirectory(before.revision + 1, {**before.keys, role: key}, certificates))

    def admit_server(self, name: str, keys: ServerKeys) -> None:
        """The replica `name` is a server that others started: roles that use servers get its tokens, and it may acknowledge pushes.
        Call before the first role starts."""
        self.servers = structs.replace(self.servers, others={**self.servers.others, name: keys.access})
        self.authorize(name, keys.public)

    def revoke(self, role: str) -> None:
        """The role has left the run."""
        before = self.directory
        keys, certificates = (
            {n: v for n, v in all_.items() if n != role} for all_ in (before.keys, before.certificates)
        )
        self._publish(PeerDirectory(before.revision + 1, keys, certificates))

    def access(self, role: str) -> ServerAccess:
        """How the supervisor reaches the server `role`."""
        return self.servers.of(role, self.directory.certificates.get(role, ""))

    @contextlib.contextmanager
    def trusting(self, client: RpcClient, role: str) -> Iterator[None]:
        """`client`, of this process, talks to the present process of `role`, for as long as the context lasts: also where none has
        started yet, and where another one takes its place."""

        def trust() -> None:
            client.trust(self.directory.keys.get(role, ""))

        trust()
        self.table.on_change.append(trust)
        try:
            yield
        finally:
            self.table.on_change.remove(trust)

    async def serve_directory(self) -> None:
        await self._directory.serve()

    async def serve_requests(self) -> None:
        await self._requests.serve(self._grant, "the next role that starts")

    async def close(self) -> None:
        self._requests.close()
        await self._directory.close()

    def _publish(self, directory: PeerDirectory) -> None:
        self._directory.publish(directory)
        self.table.update({**directory.keys, **self._admitted})

    async def _grant(self, request: RpcRequest[RequestAccess]) -> AccessGranted:
        role = request.sender or ""
        kind = role.partition("-")[0]
        if role in self.servers.others:
            raise RequestRefused(f"{role} is a server that others started, with tokens of its own")
        if kind in SERVERS:
            if certificate := request.message.certificate:
                known = self.directory
                certificates = {**known.certificates, role: certificate}
                self._publish(structs.replace(known, revision=known.revision + 1, certificates=certificates))
                self._certified(role, certificate)
            return AccessGranted(structs.replace(self.servers, others={}))  # it serves with the tokens of the run
        if kind in CONTROLLING:
            return AccessGranted(self.servers)
        if kind in REQUESTING:
            return AccessGranted(self.servers.without_control)
        raise RequestRefused(f"{role} uses no server")
