"""Who has to reach whom, and the check that it does."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from slipstream.configs import load
from slipstream.launch.launchers import links
from slipstream.launch.launchers.links import SUPERVISOR, TALKS, LinkEnd, pairs_that_talk
from slipstream.launch.supervisor.processes import role_names
from slipstream.tests.scripted import settle


def test_pairs_are_of_different_hosts_and_named_once() -> None:
    hosts = {
        SUPERVISOR: "a",
        "buffer": "a",
        "engine-0": "b",
        "engine-1": "b",
        "worker-0": "b",
        "worker-1": "c",
        "learner-0": "c",
    }
    pairs = set(pairs_that_talk(hosts))
    assert ("worker-0", "buffer") in pairs
    assert {server for client, server in pairs if hosts[client] == "c" and hosts[server] == "b"} == {
        "engine-0",
        "engine-1",
    }
    assert all(hosts[client] != hosts[server] for client, server in pairs)
    assert len({(hosts[client], server) for client, server in pairs}) == len(pairs)
    assert not any(server.startswith("worker") for _, server in pairs)


def test_every_kind_of_role_has_someone_to_talk_to() -> None:
    names = (
        role_names(load("quickstart", ["reward.kind=judge", "reward.model=m"]))
        if False
        else role_names(load("quickstart"))
    )
    kinds = {name.partition("-")[0] for name in names}
    assert kinds <= set(TALKS)
    assert {kind for kinds in TALKS.values() for kind in kinds} <= set(TALKS)


async def test_a_client_that_does_not_close_holds_nothing_up() -> None:
    """As that of a host that is lost meanwhile."""
    end = LinkEnd()
    async with asyncio.timeout(60):
        port = await end.listen("127.0.0.2", 0)
        before = len(asyncio.all_tasks())
        reader, writer = await asyncio.open_connection("127.0.0.2", port)
        while len(asyncio.all_tasks()) == before:  # noqa: ASYNC110 - until it is accepted
            await asyncio.sleep(0.01)
        await end.close()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await settle()
        assert len(asyncio.all_tasks()) == before


async def test_a_connection_is_made_or_its_failure_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CONNECT_S", 2.0)
    one, other = LinkEnd(), LinkEnd()
    with socket.socket() as full:
        full.bind(("127.0.0.3", 0))
        full.listen(0)
        queued = [socket.socket() for _ in range(3)]  # fills the queue of connections, so that the next gets no answer
        for client in queued:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        port = await one.listen("127.0.0.2", 0)
        addresses = [("127.0.0.2", port), ("127.0.0.2", 1), full.getsockname()]
        assert await other.connect(addresses) == ["", "Connect call failed ('127.0.0.2', 1)", "no answer within 2 s"]
        for client in queued:
            client.close()
    await one.close()
    with socket.socket() as free:
        free.bind(("127.0.0.2", port))  # the role can listen there now
