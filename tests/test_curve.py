"""CURVE: with the run's keys everything works, without them nothing gets through and it is counted. Real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from slipstream.buffer.client import BufferClient
from slipstream.configs.schema import Buffer
from slipstream.errors import DeadlineExceeded
from slipstream.rpc import security as curve
from slipstream.rpc.pubsub import StatePublisher, StateSubscriber
from slipstream.rpc.security import CurveServer, Keys, configure_client, make_keys
from slipstream.tests.fleets import buffer_service, mark_served
from slipstream.weightsync.fleet import Fleet, ReplicaInfo
from slipstream.weightsync.plan import AckCollector, WeightAck, send_ack

SOON = 20.0
OURS = make_keys()
OTHERS = make_keys()
STRANGERS = {
    "without keys": None,
    "with another run's keys": OTHERS,
    "with our server's public key alone": msgspec.structs.replace(OTHERS, server=OURS.server),
}
CONFIG = Buffer(max_staleness=1, groups_per_batch=1, group_size=2, lease_s=60.0)


@contextlib.asynccontextmanager
async def serving(path: Path, address: str, keys: Keys | None) -> AsyncIterator[None]:
    ready = asyncio.Event()
    task = asyncio.create_task(buffer_service(CONFIG, path, address, keys=keys).serve(ready.set))
    await ready.wait()
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_the_buffer_serves_who_has_the_keys_and_counts_who_has_not(tmp_path: Path, address: str) -> None:
    async with (
        asyncio.timeout(SOON),
        serving(tmp_path / "buffer.sqlite", address, OURS),
        BufferClient(address, "worker-0", keys=OURS) as client,
    ):
        await client.register()
        mark_served(client, 0)
        refused = (await client.stats()).refused
        assert refused == 0
        for keys in STRANGERS.values():
            async with BufferClient(address, "mallory", keys=keys, deadline_s=0.3) as stranger:
                with pytest.raises(DeadlineExceeded):
                    await stranger.stats()
            before, refused = refused, (await client.stats()).refused
            assert refused > before
        assert (await client.lease()).group_id == 0
        assert (await client.stats()).dropped == 0  # nothing of theirs was even read


async def test_the_keys_of_a_process_are_in_its_environment(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert curve.own_keys() is None
    for name, value in OURS.environment().items():
        monkeypatch.setenv(name, value)
    assert curve.own_keys() == OURS
    async with asyncio.timeout(SOON), serving(tmp_path / "buffer.sqlite", address, None):
        async with BufferClient(address, "worker-0") as client:
            await client.register()
        async with BufferClient(address, "mallory", keys=OTHERS, deadline_s=0.3) as stranger:
            with pytest.raises(DeadlineExceeded):
                await stranger.register()


def test_keys_show_nothing_when_they_are_printed() -> None:
    assert OURS.client_secret not in f"{OURS} {OURS!r}"


async def test_the_fleet_is_shown_to_who_has_the_keys() -> None:
    board = StatePublisher("tcp://127.0.0.1:*", Fleet(), OURS)
    serving = asyncio.create_task(board.serve())
    board.publish(Fleet(1, (ReplicaInfo("engine-0", "http://a"),)))
    async with asyncio.timeout(SOON), StateSubscriber(board.address, Fleet(), OURS) as feed:
        assert (await feed.changed(0)).revision == 1
        for keys in STRANGERS.values():
            async with StateSubscriber(board.address, Fleet(), keys) as stranger:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await stranger.changed(0)
    serving.cancel()
    await asyncio.wait({serving})
    await board.close()


async def test_a_ack_counts_from_who_has_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.weightsync.plan.LINGER_MS", 300)

    async def send(keys: Keys | None, rank: int) -> None:
        monkeypatch.delenv(curve.VARIABLE, raising=False)
        for name, value in keys.environment().items() if keys else ():
            monkeypatch.setenv(name, value)
        await asyncio.to_thread(send_ack, acks.address, WeightAck(expected.receiver, rank, 1))

    monkeypatch.setenv(curve.VARIABLE, OURS.environment()[curve.VARIABLE])
    acks = AckCollector("127.0.0.1")
    with acks.expect("engine-0", 1, 2) as expected:
        await send(OURS, 0)
        for keys in STRANGERS.values():
            await send(keys, 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await expected.complete()
        await send(OURS, 1)
        async with asyncio.timeout(SOON):
            await expected.complete()
    acks.close()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""How a ZeroMQ peer begins that knows of no encryption."""

KNOCKS = 1500
"""More than a queue of libzmq holds."""


async def test_strangers_who_knock_while_the_loop_is_busy_hold_up_nobody(address: str) -> None:
    context, others = zmq.asyncio.Context(), zmq.Context()
    guard = CurveServer(context, OURS)
    pull = context.socket(zmq.PULL)
    guard.configure(pull)
    pull.bind(address)
    host, port = address.removeprefix("tcp://").split(":")
    for _ in range(KNOCKS):  # here, so that the loop does not turn
        with socket.create_connection((host, int(port)), timeout=SOON) as stranger:
            stranger.sendall(GREETING)
            while stranger.recv(1024):
                pass
    ours = others.socket(zmq.PUSH)
    configure_client(ours, OURS)
    ours.connect(address)
    ours.send(b"well?")
    async with asyncio.timeout(SOON):
        assert await pull.recv() == b"well?"
    await asyncio.sleep(0)
    assert guard.refused >= KNOCKS
    ours.close()
    guard.close()
    pull.close()
    others.term()
    context.term()
