"""What is named nowhere is refused: requests without a right, tokens that are empty."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import get_args

import msgspec
import pytest
from slipstream.buffer import messages
from slipstream.errors import RequestRefused
from slipstream.launch.supervisor import heartbeat
from slipstream.learner.aux_models import remote
from slipstream.rollout.engines.access import FORBIDDEN, OK, UNAUTHORIZED, ServerAccess, make_access
from slipstream.rpc.client import RpcClient
from slipstream.rpc.security import PeerTable, make_pair
from slipstream.rpc.server import RpcServer


@pytest.mark.parametrize(
    ("requests", "rights"),
    [
        (messages.Request, messages.RIGHTS),
        (heartbeat.RoleSignal, heartbeat.RIGHTS),
        (remote.Request, remote.RIGHTS),
    ],
)
def test_every_request_has_its_rights(requests: object, rights: Mapping[type, object]) -> None:
    assert set(get_args(requests)) == set(rights)


class Listed(msgspec.Struct, frozen=True, tag=True):
    pass


class OfAll(msgspec.Struct, frozen=True, tag=True):
    pass


class Forgotten(msgspec.Struct, frozen=True, tag=True):
    pass


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


async def test_a_request_without_rights_is_refused_to_every_role() -> None:
    ours, server_pair = make_pair(), make_pair()
    peers = PeerTable()
    peers.update({"worker-0": ours.public})
    rights = {Listed: ("learner",), OfAll: None}
    server = RpcServer(
        "tcp://127.0.0.1:*", "it", Listed | OfAll | Forgotten, peers=peers, rights=rights, pair=server_pair
    )
    client = RpcClient(server.address, "worker-0", "it", Done, identity=b"w", pair=ours)

    async def answer() -> None:
        async for request in server.arriving():
            server.reply(request.identity, request.number, Done())

    answering = asyncio.create_task(answer())
    try:
        async with asyncio.timeout(20):
            await client.send(OfAll(), Done)
            for refused in (Listed(), Forgotten()):
                with pytest.raises(RequestRefused, match=f"worker-0 has no right to {type(refused).__name__}"):
                    await client.send(refused, Done)
    finally:
        answering.cancel()
        client.close()
        server.close()


def test_an_empty_token_opens_nothing() -> None:
    path, control = "/inference/v1/generate", "/pause"
    access = make_access()
    bearer = b"Bearer "
    assert access.allows(path, bearer + access.request.encode()) == OK
    assert access.allows(control, bearer + access.request.encode()) == FORBIDDEN
    assert access.allows(control, bearer + access.control.encode()) == OK
    for one in (access, ServerAccess(control=access.control), ServerAccess(request=access.request), ServerAccess()):
        for header in (None, b"", b"Bearer", bearer, b"Basic " + access.control.encode()):
            assert one.allows(path, header) == UNAUTHORIZED
