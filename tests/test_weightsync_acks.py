"""Acks over RPC: only the expected ones count."""

import asyncio
import time

import msgspec
import pytest
import zmq
import zmq.asyncio
from slipstream.errors import WeightSyncError
from slipstream.rpc import wire
from slipstream.weightsync.plan import AckCollector, WeightAck, send_ack


async def report_ack(address: str, receiver: str, rank: int, version: int, error: str = "") -> None:
    await asyncio.to_thread(send_ack, address, WeightAck(receiver, rank, version, error))


@pytest.fixture
async def acks():
    acks = AckCollector("127.0.0.1")
    yield acks
    acks.close()


async def test_a_replica_is_complete_with_its_last_rank(acks: AckCollector) -> None:
    with acks.expect("a", 7, 2) as expected:
        await report_ack(acks.address, expected.receiver, 1, 7)
        complete = asyncio.create_task(expected.complete())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(complete), 0.2)
        assert "no ack of rank 0;" in expected.missing()
        await report_ack(acks.address, expected.receiver, 0, 7)
        await asyncio.wait_for(complete, 60)


async def test_an_error_ends_it_at_once_and_is_cut_to_size(acks: AckCollector) -> None:
    with acks.expect("a", 7, 2) as expected:
        await report_ack(acks.address, expected.receiver, 1, 7, "x" * 100_000)
        with pytest.raises(WeightSyncError, match=r"^rank 1: x{2000}$"):
            await asyncio.wait_for(expected.complete(), 60)


async def test_late_foreign_doubled_and_broken_messages_change_nothing(acks: AckCollector) -> None:
    with acks.expect("a", 7, 2) as late:
        pass
    with acks.expect("a", 7, 2) as expected, acks.expect("b", 7, 1) as other:
        assert len({late.receiver, expected.receiver, other.receiver}) == 3
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as foreign:
            foreign.connect(acks.address)
            for frames in (
                [b""],
                [b"\xc1 garbage"],
                [wire.FORMAT + msgspec.msgpack.encode([0, {"receiver": 3}])],
                [b"x", b"y"],
            ):
                await foreign.send_multipart(frames)
            await foreign.send(b"x" * (1 << 20))  # over the limit: cut off
        await report_ack(acks.address, late.receiver, 0, 7)
        await report_ack(acks.address, late.receiver, 1, 7, "of an earlier attempt")
        await report_ack(acks.address, expected.receiver, 0, 6)
        await report_ack(acks.address, expected.receiver, 5, 7)
        await report_ack(acks.address, "nobody", 0, 7)
        await report_ack(acks.address, expected.receiver, 0, 7)
        await report_ack(acks.address, expected.receiver, 0, 7, "changed its mind")
        await report_ack(acks.address, other.receiver, 0, 7)
        await asyncio.wait_for(other.complete(), 60)
        assert "no ack of rank 1;" in expected.missing()
        await report_ack(acks.address, expected.receiver, 1, 7)
        await asyncio.wait_for(expected.complete(), 60)


def test_an_ack_to_nobody_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.weightsync.plan.LINGER_MS", 200)
    began = time.monotonic()
    send_ack("tcp://127.0.0.1:1", WeightAck("a", 0, 1))
    assert time.monotonic() - began < 4  # not the five seconds that it may linger
    with pytest.raises(WeightSyncError, match="no ack can be sent to 'nonsense'"):
        send_ack("nonsense", WeightAck("a", 0, 1))
