"""What the processes of a run know of each other: the public key of every role, and the access tokens of the inference servers.

    supervisor ──PeerDirectory, published with every process that starts──> roles: who may connect, whose key a client demands
    role ──RequestAccess──> supervisor ──AccessGranted──> role: tokens of the servers that this role may use

Invariants:
- The context of a role holds no secret: it has the supervisor's public key, and with it a role asks for what it needs.
- A key is in the directory before its process starts. The key of a process that was replaced is not in it any more.
- Where the run is not guarded, as in tests that start a role by themselves, there is no directory and no token.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec

from ..rollout.engines.access import ServerAccess
from ..rpc.client import RpcClient
from ..rpc.pubsub import following
from ..rpc.security import PeerTable, split_address
from .run_context import RunContext

ACCESS_S = 60.0  # longest wait for the supervisor to grant access; it takes milliseconds
RESEND_S = 5.0


class PeerDirectory(msgspec.Struct, frozen=True):
    """Every role that has been started, the supervisor included; `revision` rises with every change."""

    revision: int = 0
    keys: dict[str, str] = {}  # public keys of their present processes, by name
    certificates: dict[str, str] = {}  # SHA-256 of the TLS certificates of servers, by name


class RequestAccess(msgspec.Struct, frozen=True, tag=True):
    """A role asks for the tokens that it may have. A server that has a certificate tells it."""

    certificate: str = ""


class AccessGranted(msgspec.Struct, frozen=True, tag=True):
    access: ServerAccess


def is_guarded(context: RunContext) -> bool:
    """Whether the processes of the run have keys."""
    return split_address(context.addresses.supervisor)[1] is not None


async def request_access(context: RunContext, role: str, certificate: str = "") -> ServerAccess:
    """The tokens that `role`, this process, may use. Raises DeadlineExceeded: the supervisor does not answer, or does not know this
    process's key; RequestRefused: the role needs none."""
    if not is_guarded(context):
        return ServerAccess()
    client = RpcClient(context.addresses.access, role, "the supervisor", AccessGranted, resend_s=RESEND_S)
    try:
        hint = f"is the supervisor at {context.addresses.access} alive, and this process the newest of {role}?"
        request = client.request(RequestAccess(certificate), AccessGranted, ACCESS_S, hint=hint)
        return (await request).access
    finally:
        client.close()


@contextlib.asynccontextmanager
async def following_peers(context: RunContext, *updates: Callable[[PeerDirectory], None]) -> AsyncIterator[None]:
    """Passes the directory to `updates`, now and on every change. Does nothing where the run is not guarded."""
    if not is_guarded(context):
        yield
        return

    def update(directory: PeerDirectory) -> None:
        for follow in updates:
            follow(directory)

    async with following(context.addresses.peers, PeerDirectory(), update, "peers"):
        yield


def peer_table(context: RunContext) -> PeerTable | None:
    """Who may connect to the sockets of this process: no peer before `following_peers` fills it. None where the run is not
    guarded."""
    return PeerTable() if is_guarded(context) else None


def filling(table: PeerTable | None) -> Callable[[PeerDirectory], None]:
    """What keeps `table` that of the directory."""

    def fill(directory: PeerDirectory) -> None:
        if table is not None:
            table.update(directory.keys)

    return fill


def trusting(client: RpcClient, role: str) -> Callable[[PeerDirectory], None]:
    """What has `client` talk to the present process of `role`."""
    return lambda directory: client.trust(directory.keys.get(role, ""))
