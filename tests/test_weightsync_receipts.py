"""The receipt socket: only the one expected counts."""

import asyncio
import time

import msgspec
import pytest
import zmq
import zmq.asyncio
from slipstream.errors import WeightSyncError
from slipstream.weightsync.plan import Receipt
from slipstream.weightsync.receipts import Receipts, send_receipt


async def say(address: str, receiver: str, rank: int, version: int, error: str = "") -> None:
    await asyncio.to_thread(send_receipt, address, Receipt(receiver, rank, version, 0.5 + rank, error))


@pytest.fixture
async def receipts():
    receipts = Receipts("127.0.0.1")
    yield receipts
    receipts.close()


async def test_a_replica_is_complete_with_its_last_rank(receipts: Receipts) -> None:
    with receipts.expect("a", 7, 2) as expectation:
        await say(receipts.address, expectation.receiver, 1, 7)
        complete = asyncio.create_task(expectation.complete())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(complete), 0.2)
        assert "no receipt of rank 0" in str(expectation)
        await say(receipts.address, expectation.receiver, 0, 7)
        assert await asyncio.wait_for(complete, 5) == 1.5


async def test_an_error_ends_it_at_once_and_is_cut_to_size(receipts: Receipts) -> None:
    with receipts.expect("a", 7, 2) as expectation:
        await say(receipts.address, expectation.receiver, 1, 7, "x" * 100_000)
        with pytest.raises(WeightSyncError, match=r"^rank 1: x{2000}$"):
            await asyncio.wait_for(expectation.complete(), 5)


async def test_late_foreign_doubled_and_broken_messages_change_nothing(receipts: Receipts) -> None:
    with receipts.expect("a", 7, 2) as late:
        pass
    with receipts.expect("a", 7, 2) as expectation, receipts.expect("b", 7, 1) as other:
        assert len({late.receiver, expectation.receiver, other.receiver}) == 3
        with zmq.asyncio.Context() as context, context.socket(zmq.PUSH) as foreign:
            foreign.connect(receipts.address)
            for frames in ([b""], [b"\xc1 garbage"], [msgspec.msgpack.encode({"replica": 3})], [b"x", b"y"]):
                await foreign.send_multipart(frames)
            await foreign.send(b"x" * (1 << 20))  # over the limit: cut off
        await say(receipts.address, late.receiver, 0, 7)
        await say(receipts.address, late.receiver, 1, 7, "of an earlier attempt")
        await say(receipts.address, expectation.receiver, 0, 6)
        await say(receipts.address, expectation.receiver, 5, 7)
        await say(receipts.address, "nobody", 0, 7)
        await say(receipts.address, expectation.receiver, 0, 7)
        await say(receipts.address, expectation.receiver, 0, 7, "changed its mind")
        await say(receipts.address, other.receiver, 0, 7)
        assert await asyncio.wait_for(other.complete(), 5) == 0.5
        assert "no receipt of rank 1" in str(expectation)
        await say(receipts.address, expectation.receiver, 1, 7)
        assert await asyncio.wait_for(expectation.complete(), 5) == 1.5


def test_a_receipt_to_nobody_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.weightsync.receipts.LINGER_MS", 200)
    began = time.monotonic()
    send_receipt("tcp://127.0.0.1:1", Receipt("a", 0, 1, 0.1))
    assert time.monotonic() - began < 2
    with pytest.raises(WeightSyncError, match="no receipt can be sent to 'nonsense'"):
        send_receipt("nonsense", Receipt("a", 0, 1, 0.1))
