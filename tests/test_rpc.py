"""RPC over real sockets: replies by number, refusals, deadlines, repetition, one-way messages, what is no request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio
from numpy.typing import NDArray
from slipstream.common.waits import current_waits
from slipstream.errors import DeadlineExceeded, RequestRefused, StateError, WireError
from slipstream.rpc import security, wire
from slipstream.rpc.client import RpcClient, RpcNotifier
from slipstream.rpc.security import PeerTable, make_pair
from slipstream.rpc.server import RpcRequest, RpcServer
from slipstream.rpc.wire import ONE_WAY, RpcMessage, RpcRefusal

SOON = 60.0


class Add(msgspec.Struct, frozen=True, tag=True):
    values: NDArray[np.int32]


class Sum(msgspec.Struct, frozen=True, tag=True):
    total: int


class Nothing(msgspec.Struct, frozen=True, tag=True):
    """Never replied with."""


Replies = Sum | Nothing
Handler = Callable[[RpcRequest[Add]], Awaitable[Sum | None]]


def add(*values: int) -> Add:
    return Add(np.array(values, dtype=np.int32))


async def total(request: RpcRequest[Add]) -> Sum:
    if not len(request.message.values):
        raise RequestRefused("there is nothing to add")
    return Sum(int(request.message.values.sum()))


@contextlib.asynccontextmanager
async def serving(handler: Handler, address: str = "tcp://127.0.0.1:*") -> AsyncIterator[RpcServer[Add]]:
    server: RpcServer[Add] = RpcServer(address, "the adder", Add)
    task = asyncio.create_task(server.serve(handler, "the next sum"))
    try:
        async with asyncio.timeout(SOON):
            yield server
    finally:
        task.cancel()
        await asyncio.wait({task})
        server.close()


@contextlib.contextmanager
def client_of(address: str, **options: object):
    client = RpcClient(address, "a caller", "the adder", Replies, **options)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        client.close()


async def test_any_number_of_requests_are_under_way_at_once() -> None:
    async with serving(total) as server:
        with client_of(server.address) as one, client_of(server.address) as other:
            asked = [client.request(add(i, 1), Sum, SOON) for i in range(50) for client in (one, other)]
            replies = await asyncio.gather(*asked)
            assert [reply.total for reply in replies] == [i + 1 for i in range(50) for _ in range(2)]
            assert (await one.send(add(*range(1000)), Sum)).total == 499_500
            assert server.dropped == server.refused == 0


async def test_a_refusal_and_a_reply_of_another_type_are_errors_of_the_caller() -> None:
    async with serving(total) as server:
        with client_of(server.address) as client:
            with pytest.raises(
                RequestRefused, match=r"^the adder refused Add of a caller: there is nothing to add$"
            ) as e:
                await client.request(add(), Sum, SOON)
            assert e.value.reason == "there is nothing to add"
            with pytest.raises(StateError, match="the adder answered Add with Sum"):
                await client.request(add(1), Nothing, SOON)
            with pytest.raises(WireError, match="a frame of Add is above 37748736 bytes"):
                await client.request(Add(np.zeros(10 << 20, dtype=np.int32)), Sum, SOON)
            assert (await client.request(add(2), Sum, SOON)).total == 2


async def test_a_handler_may_reply_later_and_another_reply_overtakes() -> None:
    later = list[RpcRequest[Add]]()

    async def handler(request: RpcRequest[Add]) -> Sum | None:
        if len(request.message.values) > 1:
            later.append(request)
            return None
        return await total(request)

    async with serving(handler) as server:
        with client_of(server.address) as client:
            slow = client.send(add(1, 2), Sum)
            assert (await client.request(add(5), Sum, SOON)).total == 5
            assert not slow.done()
            server.reply(later[0].identity, later[0].number, Sum(3))  # while `serve` polls
            assert (await slow).total == 3
            assert (await client.request(add(6), Sum, SOON)).total == 6


async def test_replies_to_one_connection_travel_together_in_their_order() -> None:
    context = zmq.asyncio.Context()
    server: RpcServer[Add] = RpcServer("tcp://127.0.0.1:*", "the adder", Add)
    with client_of(server.address) as client:
        stranger = context.socket(zmq.DEALER)
        stranger.connect(server.address)
        asked = [client.send(add(i), Sum) for i in range(3)]
        for number in (ONE_WAY, 8, 7):
            await stranger.send_multipart(wire.encode(RpcMessage(number, add(number))))
        requests = list[RpcRequest[Add]]()
        async with asyncio.timeout(SOON):
            while len(requests) < 6:
                requests += server.requests()
                await server.poll(0.1)
        server.reply_all((r.identity, r.number, Sum(int(r.message.values[0]))) for r in requests)
        replies = wire.decode(list[RpcMessage[Sum]], await stranger.recv_multipart())
        assert replies == [RpcMessage(8, Sum(8)), RpcMessage(7, Sum(7))]
        assert [reply.total for reply in await asyncio.gather(*asked)] == [0, 1, 2]
        stranger.close()
    server.close()
    context.term()


async def test_silence_is_a_named_wait_and_ends_at_the_deadline(address: str) -> None:
    with client_of(address) as client:
        asked = asyncio.create_task(client.request(add(1), Sum, 0.3))
        await asyncio.sleep(0)  # it has begun, and waits
        (wait,) = [wait for wait in current_waits() if wait.who == "a caller"]
        assert (wait.waits_for, wait.deadline_s) == ("the adder's answer to Add", 0.3)
        with pytest.raises(
            DeadlineExceeded, match=r"a caller waited 0.3 s for the adder's answer to Add; is the adder at tcp"
        ):
            await asked
        with pytest.raises(DeadlineExceeded, match="for a sum; look there"):
            await client.request(add(1), Sum, 0.1, waits_for="a sum", hint="look there")


@pytest.mark.parametrize("resend_s", [None, 0.1])
async def test_a_request_is_sent_again_only_where_asked_for(resend_s: float | None) -> None:
    seen, arrived = list[int](), asyncio.Event()

    async def handler(request: RpcRequest[Add]) -> Sum | None:
        seen.append(request.number)
        arrived.set()
        return Sum(0) if len(seen) == 3 else None

    async with serving(handler) as server:
        with client_of(server.address, resend_s=resend_s) as client:
            if resend_s is None:
                with pytest.raises(DeadlineExceeded):
                    await client.request(add(1), Sum, 0.5)
                await arrived.wait()
                assert seen == [1]
            else:
                assert await client.request(add(1), Sum, SOON) == Sum(0)
                assert len(seen) >= 3  # more, where a reply took longer than it takes to ask again
                assert set(seen) == {1}


async def test_a_service_that_restarts_meanwhile_goes_unnoticed(address: str) -> None:
    with client_of(address, resend_s=0.1) as client:
        early = asyncio.create_task(client.request(add(1), Sum, SOON))
        for _ in range(2):
            async with serving(total, address):
                assert (await early).total == 1
            early = asyncio.create_task(client.request(add(1), Sum, SOON))
        early.cancel()
        await asyncio.wait({early})


async def test_one_way_messages_arrive_and_never_block(address: str) -> None:
    got, arrived = list[int](), asyncio.Event()

    async def handler(request: RpcRequest[Add]) -> Sum:
        assert request.number == ONE_WAY
        got.append(int(request.message.values[0]))
        if len(got) == 4:
            arrived.set()
        return Sum(0)  # a reply to a one-way message goes nowhere

    def beat() -> None:
        with RpcNotifier(address, linger_ms=5000) as notifier:
            assert notifier.notify(add(3))
            assert notifier.notify(add(4))

    with client_of(address) as client:
        assert client.notify(add(1))  # before the service is there
        async with serving(handler, address):
            assert client.notify(add(2))
            thread = threading.Thread(target=beat)
            thread.start()
            await arrived.wait()
            thread.join(SOON)
            assert sorted(got) == [1, 2, 3, 4]
    with RpcNotifier(address, linger_ms=0) as lonely:
        sent = [lonely.notify(add(i)) for i in range(2000)]
        assert sent[0]
        assert not sent[-1]
    with client_of(address) as lonely:
        assert not all([lonely.notify(add(i)) for i in range(2000)])
    with pytest.raises(zmq.ZMQError):
        RpcNotifier("nowhere")


async def test_what_is_no_request_is_dropped_and_logged_at_powers_of_two(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    context = zmq.asyncio.Context()
    async with serving(total) as server:
        stranger = context.socket(zmq.DEALER)
        stranger.connect(server.address)
        good = wire.encode(RpcMessage(7, add(1, 2)))
        for bad in ([b"nonsense"], [*good, b"more"], [b""], wire.encode(RpcMessage(1, Sum(1))), wire.encode(add(1))):
            await stranger.send_multipart(bad)
        await stranger.send_multipart(good)
        kind = list[RpcMessage[Replies | RpcRefusal]]
        answers = [wire.decode(kind, await stranger.recv_multipart())[0] for _ in range(3)]
        assert answers.pop() == RpcMessage(7, Sum(3))
        assert [answer.number for answer in answers] == [7, 1]  # of those whose number can be read
        for answer, why in zip(answers, ("2 array frames came", "Invalid value 'Sum'"), strict=True):
            assert isinstance(answer.message, RpcRefusal)
            assert answer.message.reason.startswith("that is no request: ")
            assert why in answer.message.reason
        assert server.dropped == 5
        assert server.received == 6
        assert caplog.text.count("that is no request") == 3  # at 1, 2 and 4
        stranger.close()
        context.term()


async def test_a_reply_that_cannot_be_decoded_fails_who_waits(address: str) -> None:
    context = zmq.asyncio.Context()
    service = context.socket(zmq.ROUTER)
    service.bind(address)
    with client_of(address) as client:
        asked = client.send(add(1), Sum)
        identity, *_ = await service.recv_multipart()
        await service.send_multipart([identity, b"\x00another format"])
        with pytest.raises(WireError, match="unknown wire format"):
            await asyncio.wait_for(asked, SOON)
        one, other = client.send(add(1), Sum), client.send(add(2), Sum)
        numbers = [wire.number_of((await service.recv_multipart())[1:]) for _ in range(2)]
        wrong = wire.encode([RpcMessage(numbers[0], {"type": "Sum", "total": "much"})])
        await service.send_multipart([identity, *wrong])
        with pytest.raises(WireError, match=r"Expected `int`, got `str`"):
            await asyncio.wait_for(one, SOON)
        await service.send_multipart([identity, *wire.encode([RpcMessage(numbers[1], Sum(2))])])
        assert await asyncio.wait_for(other, SOON) == Sum(2)
    service.close()
    context.term()


async def test_without_a_key_nothing_is_read_and_it_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "GRACE_S", 0.2)
    own, ours_pair, others = make_pair(), make_pair(), make_pair()
    peers = PeerTable({"worker-0": ours_pair.public})
    server: RpcServer[Add] = RpcServer("tcp://127.0.0.1:*", "the adder", Add, peers=peers, pair=own)
    task = asyncio.create_task(server.serve(total, "the next sum"))
    with client_of(server.address, pair=ours_pair) as ours, client_of(server.address, pair=others) as theirs:
        with pytest.raises(DeadlineExceeded):
            await theirs.request(add(1), Sum, 1.0)
        async with asyncio.timeout(SOON):
            while not server.refused:  # noqa: ASYNC110 - a refusal is an event of libzmq's alone
                await asyncio.sleep(0.01)
        assert (await ours.request(add(1), Sum, SOON)).total == 1
        assert (server.received, server.dropped) == (1, 0)
    task.cancel()
    await asyncio.wait({task})
    server.close()


async def test_an_address_in_use_is_an_error_and_leaves_nothing_open() -> None:
    async with serving(total) as server:
        with pytest.raises(zmq.ZMQError, match="in use"):
            RpcServer(server.address, "another", Add)


def frame_of(array: NDArray[np.int32]) -> memoryview:
    """The received frame that `array` is a view of."""
    assert isinstance(array.base, memoryview)
    return array.base


async def test_a_large_array_is_sent_on_from_where_it_was_received() -> None:
    """As the buffer forwards what it got; a part of it, or a small one, is sent as any array."""
    values = np.arange(wire.KEEP_BYTES, dtype=np.int32)
    context = zmq.asyncio.Context()
    pair = [context.socket(zmq.PAIR) for _ in range(2)]
    pair[1].connect(f"tcp://127.0.0.1:{pair[0].bind_to_random_port('tcp://127.0.0.1')}")
    first, second = map(wire.AsyncSocket, pair)

    async def echo(array: NDArray[np.int32]) -> tuple[list[wire.Frame], NDArray[np.int32]]:
        """The frames of `array` after it was received and encoded again, and what arrives of these."""
        async with asyncio.timeout(SOON):
            await first.poll_send()
            first.send(wire.encode(Add(array)))
            await second.poll()
        received = second.receive()
        assert received is not None
        again = wire.encode(wire.decode(Add, received))
        second.send(again)
        async with asyncio.timeout(SOON):
            await first.poll()
        returned = first.receive()
        assert returned is not None
        return again, wire.decode(Add, returned).values

    try:
        frames, arrived = await echo(values)
        assert isinstance(frames[1], memoryview)
        assert isinstance(frames[1].obj, zmq.Frame)
        assert arrived.tolist() == values.tolist()
        assert not arrived.flags.writeable
        for part in (arrived[5:9], arrived[::2], arrived[::-1]):
            frames, again = await echo(part)
            assert again.tolist() == part.tolist()
        assert (await echo(values[:3]))[1].tolist() == [0, 1, 2]
        first.send(wire.encode(Add(arrived[::-1])))  # as large as the frame that it is of
        await second.poll()
        assert wire.decode(Add, second.receive() or []).values.tolist() == values[::-1].tolist()
        middle = np.frombuffer(frame_of(arrived)[16:32], dtype=np.int32)  # an array of a part of a frame
        assert (await echo(middle))[1].tolist() == values[4:8].tolist()
    finally:
        for socket in pair:
            socket.close(0)
        context.term()
