"""Whether the hosts of a run reach each other: each listens where its roles will, and the others connect.

    supervisor ──pairs of roles──> launcher ──listen──> one end ──connect──> the other: a failure names both, and the address

Invariants:
- It is checked when all roles have places and before any process starts. A listener is closed before its role needs the port.
- No port of a role is kept busy: the end that connected closes first.
- A pair on one host is not tried. Every try has the deadline `CONNECT_S`, and the end waits for no client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Iterator, Mapping

from ...common.replica_names import replica_of
from ...errors import DeadlineExceeded, with_deadline

CONNECT_S = 10.0  # longest time for one connection: several retransmissions of a lost packet
SUPERVISOR = "supervisor"
# Kinds of roles that connect -> those that they connect to; collectives connect both ways.
TALKS: Mapping[str, tuple[str, ...]] = {
    SUPERVISOR: ("engine", "reward", "buffer"),
    "buffer": (SUPERVISOR,),
    "engine": (SUPERVISOR, "learner"),
    "reward": (SUPERVISOR,),
    "worker": (SUPERVISOR, "engine", "reward", "buffer"),
    "evaluator": (SUPERVISOR, "engine", "buffer"),
    "rater": (SUPERVISOR, "engine"),
    "learner": (SUPERVISOR, "engine", "buffer", "learner", "reference", "critic"),
    "reference": (SUPERVISOR, "learner", "reference"),
    "critic": (SUPERVISOR, "learner", "critic"),
    "sft": (SUPERVISOR, "sft"),
}


def pairs_that_talk(hosts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """(who connects, to whom) by the names of roles, of roles on different `hosts`; one pair for each host that connects and each
    role that listens. Of a server that spans hosts, its own processes and, for collectives, the learner connect to all, and others
    to the first."""
    seen = set[tuple[str, str]]()
    for client, its in hosts.items():
        for server, other in hosts.items():
            talks = server.partition("-")[0] in TALKS.get(client.partition("-")[0], ())
            if replica_of(server) != server or replica_of(client) == server:
                talks = replica_of(client) == replica_of(server) or (talks and client.startswith("learner-"))
            if talks and its != other and (its, server) not in seen:
                seen.add((its, server))
                yield client, server


class LinkEnd:
    """One host's end of the check."""

    def __init__(self) -> None:
        self._servers: list[asyncio.Server] = []
        self._accepted: set[asyncio.StreamWriter] = set()  # connections that are open

    async def listen(self, host: str, port: int) -> int:
        """Accept connections at a port, or at any for 0; the port."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._accepted.add(writer)
            with contextlib.suppress(OSError):
                await reader.read()  # the end that closes first keeps its port busy for a minute
            self._accepted.discard(writer)
            writer.close()

        server = await asyncio.start_server(accept, host, port)
        self._servers.append(server)
        return server.sockets[0].getsockname()[1]

    async def connect(self, addresses: Iterable[tuple[str, int]]) -> list[str]:
        """Why each connection failed, empty for those that were made."""
        return list(await asyncio.gather(*(_connect(*address) for address in addresses)))

    async def close(self) -> None:
        """Stop listening. A connection that its client has not closed is reset, which keeps no port busy: the client's host may be
        lost."""
        for server in self._servers:
            server.close()
        for writer in self._accepted:
            writer.transport.abort()
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()


async def _connect(host: str, port: int) -> str:
    connecting, waits_for = asyncio.open_connection(host, port), f"a connection to {host}:{port}"
    try:
        _, writer = await with_deadline(
            CONNECT_S, connecting, who="the check of links", waits_for=waits_for, hint="is there a firewall?"
        )
    except DeadlineExceeded:
        return f"no answer within {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return ""
