"""Publish/subscribe of one state, over real sockets, with the fleet as the state. Keys: see `test_curve`."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from slipstream.errors import WireError
from slipstream.rpc import pubsub, wire
from slipstream.rpc.pubsub import (
    CHANGES,
    COMPRESSED,
    SUBSCRIBE,
    UNSUBSCRIBE,
    StateChanges,
    StatePublisher,
    StateSubscriber,
    decode_state,
    encode_state,
)
from slipstream.weightsync.fleet import Fleet, ReplicaInfo

WAIT_S = 60.0


def fleet_at(revision: int, version: int | None = None, incarnation: int = 0) -> Fleet:
    return Fleet(revision, (ReplicaInfo("engine-0", "http://127.0.0.1:1", incarnation, "serving", version),))


def frame(state: msgspec.Struct) -> bytes:
    (only,) = wire.encode(state)
    return bytes(only)


def changes(whole: Fleet, state: Fleet, revision: int | None = None) -> bytes:
    """The frame of what has changed since `whole`; `revision` is that of a state with the same changes."""
    found = state.changes_since(whole)
    assert found is not None
    return CHANGES + msgspec.msgpack.encode(StateChanges(whole.revision, revision or state.revision, found))


def revision_of(sent: bytes) -> int:
    if sent[:1] == CHANGES:
        return msgspec.msgpack.decode(sent[1:], type=StateChanges).revision
    return decode_state(Fleet, sent).revision


@pytest.fixture
async def publisher() -> AsyncIterator[StatePublisher[Fleet]]:
    publisher = StatePublisher("tcp://127.0.0.1:*", Fleet())
    serving = asyncio.create_task(publisher.serve())
    yield publisher
    serving.cancel()
    await asyncio.wait({serving})
    await publisher.close()


async def test_a_subscriber_gets_the_present_state_and_every_newest_one(publisher: StatePublisher[Fleet]) -> None:
    publisher.publish(fleet_at(1))
    async with asyncio.timeout(WAIT_S), StateSubscriber(publisher.address, Fleet()) as early:
        assert await early.changed(0) == fleet_at(1)
        async with StateSubscriber(publisher.address, Fleet()) as late:  # the second subscriber gets it at once, too
            assert await late.changed(0) == fleet_at(1)
            publisher.publish(fleet_at(2, incarnation=1))
            assert await early.changed(1) == fleet_at(2, incarnation=1)
            assert await late.until(lambda f: f.replicas[0].incarnation == 1) == fleet_at(2, incarnation=1)
            seen = []
            async for fleet in late:
                seen.append(fleet.revision)
                if fleet.replicas[0].version == 5:
                    break
                for version in range(6):
                    publisher.publish(fleet_at(3 + version, version))
            assert seen == sorted(set(seen))
            assert seen[-1] == 8


async def test_closing_sends_a_last_state() -> None:
    publisher = StatePublisher("tcp://127.0.0.1:*", Fleet())
    serving = asyncio.create_task(publisher.serve())
    publisher.publish(fleet_at(1))
    async with asyncio.timeout(WAIT_S), StateSubscriber(publisher.address, Fleet()) as subscriber:
        await subscriber.until(lambda f: len(f.replicas) == 1)
        serving.cancel()
        await asyncio.wait({serving})
        await publisher.close(publisher.state.ended())
        assert await subscriber.until(lambda f: not f.replicas) == Fleet(2)


async def test_an_unchanged_state_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub, "REPEAT_S", 0.05)
    publisher = StatePublisher("tcp://127.0.0.1:*", fleet_at(1))
    serving = asyncio.create_task(publisher.serve())
    context = zmq.asyncio.Context()
    with context.socket(zmq.SUB) as raw:
        raw.connect(publisher.address)
        raw.subscribe(b"")
        async with asyncio.timeout(WAIT_S):
            assert await raw.recv() == frame(fleet_at(1))
            nothing = CHANGES + msgspec.msgpack.encode(StateChanges(1, 1, b""))
            while (sent := await raw.recv()) != nothing:
                assert sent == frame(fleet_at(1))  # it subscribed before the first was sent
            assert [await raw.recv() for _ in range(2)] == [nothing] * 2
    context.term()
    serving.cancel()
    await asyncio.wait({serving})
    await publisher.close()


async def test_bad_frames_and_older_revisions_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub, "REPEAT_S", WAIT_S)  # it does not subscribe anew meanwhile
    context = zmq.asyncio.Context()
    sender = context.socket(zmq.XPUB)
    port = sender.bind_to_random_port("tcp://127.0.0.1")
    fleet = fleet_at(5)
    try:
        async with asyncio.timeout(WAIT_S), StateSubscriber(f"tcp://127.0.0.1:{port}", Fleet()) as subscriber:
            await sender.recv()
            await sender.send(frame(fleet))
            await subscriber.changed(0)
            wrong_type = wire.FORMAT + msgspec.msgpack.encode({"revision": "six"})
            for bad in (b"", b"\xff", wire.FORMAT, b"{}", wrong_type, frame(Fleet(4)), CHANGES, CHANGES + b"{}"):
                await sender.send(bad)
                fleet = msgspec.structs.replace(fleet, revision=fleet.revision + 1)
                await asyncio.sleep(0.05)
                assert subscriber.state.replicas == fleet.replicas
                await sender.send(frame(fleet))
                assert await subscriber.changed(fleet.revision - 1) == fleet
            whole, range_ = fleet.revision, lambda *ends: msgspec.msgpack.encode([("serving", 9, True, False, [ends])])
            for bad in (
                StateChanges(whole, whole + 1, b"\xff"),
                StateChanges(whole, whole + 1, range_(0, 2)),  # there is one replica
                StateChanges(whole, whole + 1, range_(-1, 1)),
                StateChanges(whole, whole, range_(0, 1)),  # not newer
                StateChanges(whole + 9, whole + 10, range_(0, 1)),  # since a state that is not here
                [whole, -1, b""],
            ):
                await sender.send(CHANGES + msgspec.msgpack.encode(bad))
            await sender.send(CHANGES + msgspec.msgpack.encode(StateChanges(whole, whole + 2, range_(0, 1))))
            assert (await subscriber.changed(whole)).revision == whole + 2
            assert [replica.version for replica in subscriber.state.replicas] == [9]
    finally:
        sender.close(linger=0)
        context.term()


async def test_a_push_is_sent_as_what_it_changed(publisher: StatePublisher[Fleet]) -> None:
    """Names and addresses of a thousand replicas do not travel again, and a subscriber that comes meanwhile gets all."""
    fleet, rng, context = many(1), random.Random(0), zmq.asyncio.Context()
    publisher.publish(fleet)
    async with asyncio.timeout(WAIT_S), StateSubscriber(publisher.address, Fleet()) as early:
        assert await early.changed(0) == fleet
        with context.socket(zmq.SUB) as raw:
            raw.connect(publisher.address)
            raw.subscribe(b"")
            assert decode_state(Fleet, await raw.recv()) == fleet
            for revision in range(2, 12):
                replicas = list(fleet.replicas)
                for place in rng.sample(range(len(replicas)), 100) if revision % 2 else range(revision * 50):
                    replicas[place] = msgspec.structs.replace(replicas[place], version=revision, asleep=place % 2 == 0)
                fleet = Fleet(revision, tuple(replicas))
                publisher.publish(fleet)
                assert await early.changed(revision - 1) == fleet
                sent = await raw.recv()
                while revision_of(sent) < revision:  # a repetition
                    sent = await raw.recv()
                if revision > 2:  # the second may be the one that answers this subscription, and is then sent whole
                    assert sent[:1] == CHANGES
                    assert len(sent) < len(encode_state(fleet))
            async with StateSubscriber(publisher.address, Fleet()) as late:
                assert await late.changed(0) == fleet
            fleet = Fleet(12, (*fleet.replicas, ReplicaInfo("engine-1000", "http://10.0.0.1:1")))
            publisher.publish(fleet)
            assert await early.changed(11) == fleet
    context.term()


async def test_a_subscriber_that_lost_a_whole_state_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pubsub, "REPEAT_S", 0.05)
    context = zmq.asyncio.Context()
    sender = context.socket(zmq.XPUB)
    sender.setsockopt(zmq.XPUB_VERBOSER, 1)
    port = sender.bind_to_random_port("tcp://127.0.0.1")
    lost = fleet_at(3, 1)
    async with asyncio.timeout(WAIT_S), StateSubscriber(f"tcp://127.0.0.1:{port}", Fleet()) as subscriber:
        assert await sender.recv() == SUBSCRIBE
        await asyncio.sleep(0.06)
        await sender.send(changes(lost, fleet_at(4, 2)))
        assert [await sender.recv(), await sender.recv()] == [UNSUBSCRIBE, SUBSCRIBE]
        assert subscriber.state == Fleet()
        monkeypatch.setattr(pubsub, "REPEAT_S", WAIT_S)
        await sender.send(changes(lost, fleet_at(5, 2)))  # again, and it has just asked
        await sender.send(frame(lost))
        await sender.send(changes(lost, fleet_at(6, 4)))
        assert await subscriber.changed(3) == fleet_at(6, 4)
        assert await sender.poll(0) == 0
    sender.close(linger=0)
    context.term()


async def test_a_subscriber_outlives_a_publisher_that_is_restarted() -> None:
    """A connection that broke is made anew, and the newest state comes with it."""
    context = zmq.asyncio.Context()
    first = context.socket(zmq.XPUB)
    port = first.bind_to_random_port("tcp://127.0.0.1")
    async with asyncio.timeout(WAIT_S), StateSubscriber(f"tcp://127.0.0.1:{port}", Fleet()) as subscriber:
        await first.recv()
        await first.send(frame(Fleet(1)))
        await subscriber.changed(0)
        first.close(linger=0)
        context.term()
        context = zmq.asyncio.Context()
        second = context.socket(zmq.XPUB)
        second.bind(f"tcp://127.0.0.1:{port}")
        await second.recv()
        await second.send(frame(Fleet(2)))
        assert await subscriber.changed(1) == Fleet(2)
        second.close(linger=0)
    context.term()


def many(revision: int, replicas: int = 1000) -> Fleet:
    infos = (
        ReplicaInfo(f"engine-{i}", f"http://10.0.0.{i % 250}:{10_000 + i}", 0, "serving", 1) for i in range(replicas)
    )
    return Fleet(revision, tuple(infos))


async def test_a_large_state_arrives_compressed_and_whole(publisher: StatePublisher[Fleet]) -> None:
    publisher.publish(many(1))
    assert len(encode_state(many(1))) < len(frame(many(1))) / 5
    async with asyncio.timeout(WAIT_S), StateSubscriber(publisher.address, Fleet()) as subscriber:
        assert await subscriber.changed(0) == many(1)


def test_damaged_and_endless_frames_are_wire_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    good = encode_state(many(1))
    for bad in (good[:-10], good[:1] + good[2:], COMPRESSED, COMPRESSED + b"x" * 100):
        with pytest.raises(WireError):
            decode_state(Fleet, bad)
    monkeypatch.setattr(wire, "FRAME_LIMIT", 50_000)
    with pytest.raises(WireError, match="above 50000 bytes"):
        decode_state(Fleet, good)


async def test_a_state_that_changes_all_the_time_is_sent_as_often_as_it_may_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what a snapshot costs here there may be one every 0.2 s; the last change arrives."""
    monkeypatch.setattr(pubsub, "MESSAGE_S", 0.2 * pubsub.SHARE)
    publisher = StatePublisher("tcp://127.0.0.1:*", Fleet())
    serving = asyncio.create_task(publisher.serve())
    frames, last = list[bytes](), 200
    context = zmq.asyncio.Context()
    with context.socket(zmq.SUB) as raw:
        raw.connect(publisher.address)
        raw.subscribe(b"")
        async with asyncio.timeout(WAIT_S):
            frames.append(await raw.recv())
            began = asyncio.get_running_loop().time()
            for revision in range(1, last + 1):
                publisher.publish(fleet_at(revision))
                await asyncio.sleep(0.005)
            while revision_of(frames[-1]) < last:
                frames.append(await raw.recv())
            took = asyncio.get_running_loop().time() - began
    context.term()
    assert len(frames) <= 2 + took / 0.2
    serving.cancel()
    await asyncio.wait({serving})
    await publisher.close()


async def test_many_that_subscribe_at_once_cost_few_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot goes to all subscribers: one for each of them would be as many as their square."""
    monkeypatch.setattr(pubsub, "MESSAGE_S", 0.002)
    sent = list[int]()

    class Counted(StatePublisher[Fleet]):
        async def _send(self, state: Fleet) -> int:
            sent.append(state.revision)
            return await super()._send(state)

    publisher = Counted("tcp://127.0.0.1:*", fleet_at(1))
    serving = asyncio.create_task(publisher.serve())
    async with asyncio.timeout(WAIT_S), contextlib.AsyncExitStack() as stack:
        subscribers = [StateSubscriber(publisher.address, Fleet()) for _ in range(60)]
        began = asyncio.get_running_loop().time()
        for subscriber in subscribers:
            await stack.enter_async_context(subscriber)
        await asyncio.gather(*(subscriber.changed(0) for subscriber in subscribers))
        took = asyncio.get_running_loop().time() - began
    assert len(sent) <= 20 + took / 0.2  # while they subscribe, from one in 0.02 s to one in 1.2 s
    serving.cancel()
    await asyncio.wait({serving})
    await publisher.close()
