"""Guarded sockets: a role may do what is its own, peers that are no role get nothing through, and both is counted. Real sockets."""

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
from slipstream.buffer import messages as m
from slipstream.buffer.client import BufferClient
from slipstream.configs.schema import Buffer
from slipstream.errors import ConfigError, DeadlineExceeded, RequestRefused, StateError
from slipstream.rpc import security as curve
from slipstream.rpc.client import RpcClient
from slipstream.rpc.pubsub import StatePublisher, StateSubscriber
from slipstream.rpc.security import CurveServer, KeyPair, PeerTable, configure_client, make_pair, write_pair
from slipstream.rpc.server import RpcServer
from slipstream.tests.fleets import buffer_service, mark_served
from slipstream.weightsync.fleet import Fleet, ReplicaInfo
from slipstream.weightsync.plan import AckCollector, WeightAck, send_ack

SOON = 60.0
SHORT = 0.3  # what a stranger waits: longer than an answer takes
BUFFER, WORKER, OTHER_WORKER, LEARNER, ENGINE, SECOND_HOST, SUPERVISOR, NOBODY = (make_pair() for _ in range(8))
ROLES = {
    "buffer": BUFFER,
    "worker-0": WORKER,
    "worker-1": OTHER_WORKER,
    "learner-0": LEARNER,
    "engine-0": ENGINE,
    "engine-0.1": SECOND_HOST,
    "supervisor": SUPERVISOR,
}
CONFIG = Buffer(max_staleness=1, groups_per_batch=1, group_size=2)


def table() -> PeerTable:
    return PeerTable({role: pair.public for role, pair in ROLES.items()})


@pytest.fixture
def process_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Makes this process that of a pair, as a launcher does."""

    def become(pair: KeyPair | None) -> None:
        monkeypatch.delenv(curve.VARIABLE, raising=False)
        if pair is not None:
            folder = tmp_path / pair.public.encode().hex()
            folder.mkdir(exist_ok=True)
            (folder / curve.FILE).write_bytes(msgspec.json.encode(pair))
            monkeypatch.setenv(curve.VARIABLE, str(folder))

    return become


@contextlib.asynccontextmanager
async def serving(path: Path, address: str, peers: PeerTable) -> AsyncIterator[None]:
    ready = asyncio.Event()
    task = asyncio.create_task(buffer_service(CONFIG, path, address, peers=peers, lease_s=600.0).serve(ready.set))
    await ready.wait()
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def client_of(
    address: str, name: str, pair: KeyPair, server: KeyPair = BUFFER, deadline_s: float = SOON
) -> BufferClient:
    return BufferClient(f"{address}#{server.public}", name, pair=pair, deadline_s=deadline_s)


async def more_refused(client: BufferClient, than: int) -> int:
    """Refusals, once there are more: one is an event of libzmq's alone."""
    while (refused := (await client.stats()).refused) <= than:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    return refused


async def test_the_buffer_serves_roles_and_counts_strangers(tmp_path: Path, address: str, process_of) -> None:
    process_of(BUFFER)
    async with (
        asyncio.timeout(2 * SOON),
        serving(tmp_path / "buffer.sqlite", address, table()),
        client_of(address, "worker-0", WORKER) as client,
    ):
        await client.register()
        mark_served(address, 0)
        refused = (await client.stats()).refused
        assert refused == 0
        strangers = (
            BufferClient(address, "worker-0", deadline_s=SHORT),  # no CURVE at all
            client_of(address, "worker-0", WORKER, server=NOBODY, deadline_s=SHORT),  # of another run's buffer
        )
        for stranger in strangers:
            async with stranger:
                with pytest.raises(DeadlineExceeded):
                    await stranger.stats()
                refused = await more_refused(client, refused)
        async with client_of(address, "worker-0", NOBODY, deadline_s=curve.GRACE_S + 1) as foreign:
            with pytest.raises(DeadlineExceeded):
                await foreign.stats()
            await more_refused(client, refused)
        assert (await client.lease()).group_id == 0
        assert (await client.stats()).dropped == 0  # nothing of theirs was even read


FORBIDDEN = {
    "worker-0": (
        m.CommitBatch(0),
        m.MarkCheckpointed(0),
        m.Recover(0),
        m.TakeBatch(0),
        m.RequestFresh(0, 1),
        m.Configure(9, m.LiveRules.of(CONFIG)),
        m.Register("worker-1", "x"),
        m.Deregister("worker-1"),
        m.RequestLease("worker-1"),
        m.ReportProgress("worker-1", {}, 0.0, 0.0),
    ),
    "learner-0": (m.Register("learner-0", "x"), m.RequestLease("learner-0"), m.Configure(9, m.LiveRules.of(CONFIG))),
    "engine-0": (m.RequestStats(), m.CommitBatch(0), m.RequestLease("engine-0")),
}
MANY = 300  # times that each is sent


async def test_a_role_can_do_nothing_beyond_its_rights(tmp_path: Path, address: str, process_of) -> None:
    process_of(BUFFER)
    async with (
        asyncio.timeout(4 * SOON),
        serving(tmp_path / "buffer.sqlite", address, table()),
        client_of(address, "worker-1", OTHER_WORKER) as client,
    ):
        await client.register()
        mark_served(address, 0)
        lease = await client.lease()
        before = await client.stats()
        for role, requests in FORBIDDEN.items():
            for name in (role, "learner-0", "supervisor", "worker-1"):  # whatever it calls itself
                pair = ROLES[role]
                if name == "learner-0" and role == "learner-0":
                    name = "worker-1"
                hostile = RpcClient(
                    f"{address}#{BUFFER.public}", name, "the buffer", m.Reply, identity=f"{name}/x".encode(), pair=pair
                )
                try:
                    replies = [hostile.send(one, m.Ack) for _ in range(MANY // 4) for one in requests]
                    for reply in replies:
                        with pytest.raises(RequestRefused):
                            await reply
                finally:
                    hostile.close()
        after = await client.stats()
        assert (after.version, after.ledger, after.leased_groups) == (before.version, before.ledger, 1)
        assert await client.progress({lease.episode(0): {0: 3}}, 1.0, 0.0) == ()  # its lease is still its own
        assert (await client.stats()).ledger.generated == 3


async def test_a_restarted_role_has_another_key_and_the_old_one_is_void(
    tmp_path: Path, address: str, process_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    process_of(BUFFER)
    monkeypatch.setattr(curve, "GRACE_S", SOON)
    peers, again = table(), make_pair()
    async with (
        asyncio.timeout(2 * SOON),
        serving(tmp_path / "buffer.sqlite", address, peers),
        client_of(address, "worker-0", WORKER) as old,
    ):
        await old.register()
        async with client_of(address, "worker-0", again) as new:
            registering = asyncio.create_task(new.register())  # before its key is known: it waits, and is not refused
            await asyncio.sleep(SHORT)
            assert not registering.done()
            peers.update({role: pair.public for role, pair in (ROLES | {"worker-0": again}).items()})
            await registering
            with pytest.raises(DeadlineExceeded):  # also over the connection that it has
                await old.connections["buffer"].request(m.RequestStats(), m.Stats, 1.0)
            assert (await new.stats()).refused == 0


async def test_a_client_follows_a_server_that_starts_again_with_another_key(address: str) -> None:
    async def serve(pair: KeyPair) -> None:
        server: RpcServer[m.Register] = RpcServer(address, "a service", m.Register, peers=table(), pair=pair)

        async def acknowledge(request: object) -> m.Ack:
            return m.Ack()

        try:
            await server.serve(acknowledge, "a request")
        finally:
            server.close()

    client = RpcClient(f"{address}#", "worker-0", "a service", m.Ack, resend_s=0.2, pair=WORKER)
    try:
        async with asyncio.timeout(2 * SOON):
            for pair in (BUFFER, NOBODY):
                reply = asyncio.create_task(client.request(m.Register("a", "b"), m.Ack, SOON))
                serving = asyncio.create_task(serve(pair))
                await asyncio.sleep(SHORT)
                assert not reply.done()  # the key that it knows, if any, is another one
                client.trust(pair.public)
                await reply
                serving.cancel()
                await asyncio.wait({serving})
    finally:
        client.close()


async def test_what_a_server_left_unanswered_is_sent_to_its_successor_at_once(address: str) -> None:
    asked = asyncio.Event()

    @contextlib.asynccontextmanager
    async def served(pair: KeyPair, reply: m.Ack | None) -> AsyncIterator[None]:
        async def answer(request: object) -> m.Ack | None:
            asked.set()
            return reply

        server: RpcServer[m.Register] = RpcServer(address, "a service", m.Register, peers=table(), pair=pair)
        serving = asyncio.create_task(server.serve(answer, "a request"))
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait({serving})
            server.close()

    client = RpcClient(f"{address}#{BUFFER.public}", "worker-0", "a service", m.Ack, resend_s=100 * SOON, pair=WORKER)
    try:
        async with asyncio.timeout(SOON):
            async with served(BUFFER, None):
                replies = [asyncio.create_task(client.request(m.Register("a", "b"), m.Ack, 100 * SOON)) for _ in "ab"]
                await asked.wait()
            async with served(NOBODY, m.Ack()):
                client.trust(NOBODY.public)
                assert await asyncio.gather(*replies) == [m.Ack(), m.Ack()]
    finally:
        client.close()


async def test_nothing_is_sent_to_the_process_before_once_another_is_trusted(address: str) -> None:
    """It would be lost, and sent again only after `resend_s`."""
    server: RpcServer[m.Register] = RpcServer(address, "a service", m.Register, peers=table(), pair=BUFFER)
    serving = asyncio.create_task(server.serve(lambda _: asyncio.sleep(0, m.Ack()), "a request"))
    try:
        for _ in range(30):
            client = RpcClient(f"{address}#{BUFFER.public}", "worker-0", "a service", m.Ack, resend_s=1, pair=WORKER)
            assert await client.request(m.Register("a", "b"), m.Ack, SOON) == m.Ack()
            assert client.notify(m.Register("a", "b"))
            client.trust(NOBODY.public)
            assert not client.notify(m.Register("a", "b"))
            client.close()
    finally:
        serving.cancel()
        await asyncio.wait({serving})
        server.close()


async def test_the_fleet_is_shown_to_roles_only() -> None:
    board = StatePublisher("tcp://127.0.0.1:*", Fleet(), table(), SUPERVISOR)
    serving = asyncio.create_task(board.serve())
    board.publish(Fleet(1, (ReplicaInfo("engine-0", "http://a"),)))
    plain, _, _ = board.address.partition("#")
    async with asyncio.timeout(SOON), StateSubscriber(board.address, Fleet(), WORKER) as feed:
        assert (await feed.changed(0)).revision == 1
        for address, pair in ((plain, None), (board.address, NOBODY), (f"{plain}#{NOBODY.public}", WORKER)):
            async with StateSubscriber(address, Fleet(), pair) as stranger:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(SHORT):
                        await stranger.changed(0)
    serving.cancel()
    await asyncio.wait({serving})
    await board.close()


async def test_an_ack_counts_from_the_engine_that_it_names(monkeypatch: pytest.MonkeyPatch, process_of) -> None:
    process_of(LEARNER)
    acks = AckCollector("127.0.0.1", table())
    plain, _, _ = acks.address.partition("#")

    async def send(pair: KeyPair | None, address: str, receiver: str, rank: int) -> None:
        process_of(pair)
        linger_ms = 300 if pair in (None, NOBODY) else 1000 * SOON  # those two never get through
        monkeypatch.setattr("slipstream.weightsync.plan.LINGER_MS", int(linger_ms))
        await asyncio.to_thread(send_ack, address, WeightAck(receiver, rank, 1))

    async with asyncio.timeout(SOON):
        with acks.expect("engine-0", 1, 2) as expected:
            await send(ENGINE, acks.address, expected.receiver, 0)
            await send(None, plain, expected.receiver, 1)
            await send(NOBODY, acks.address, expected.receiver, 1)
            await send(WORKER, acks.address, expected.receiver, 1)
            with acks.expect("engine-1", 1, 1) as other:
                await send(ENGINE, acks.address, other.receiver, 0)  # of another replica
                await send(SECOND_HOST, acks.address, other.receiver, 0)
                for waiting in (expected, other):
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(SHORT):
                            await waiting.complete()
            await send(SECOND_HOST, acks.address, expected.receiver, 1)  # a rank of the replica on another host
            await expected.complete()
    acks.close()


def test_a_pair_is_in_a_private_file_and_shows_nothing_when_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert curve.own_pair() is None
    pair = write_pair(tmp_path)
    assert (tmp_path / curve.FILE).stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv(curve.VARIABLE, str(tmp_path))
    assert curve.own_pair() == pair
    assert pair.secret not in f"{pair} {pair!r}"
    monkeypatch.setenv(curve.VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"SLIPSTREAM_PRIVATE: .*gone holds no key pair"):
        curve.own_pair()


def test_a_process_without_a_key_is_told_so() -> None:
    refused = pytest.raises(StateError, match="is guarded, and this process has no key")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, refused:
        configure_client(dealer, BUFFER.public, None)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""How a ZeroMQ peer begins that knows of no encryption."""

KNOCKS = 1500
"""More than a queue of libzmq holds."""


async def test_strangers_who_knock_while_the_loop_is_busy_hold_up_no_role(address: str) -> None:
    context, others = zmq.asyncio.Context(), zmq.Context()
    guard = CurveServer(context, table(), BUFFER)
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
    configure_client(ours, BUFFER.public, WORKER)
    ours.connect(address)
    ours.send(b"well?")
    async with asyncio.timeout(SOON):
        assert await pull.recv() == b"well?"
        while guard.refused < KNOCKS:  # noqa: ASYNC110 - a refusal is an event of libzmq's alone
            await asyncio.sleep(0.01)
    ours.close()
    guard.close()
    pull.close()
    others.term()
    context.term()


FOREIGN = curve.HELD + 200
"""More connections with unknown keys than are held at once."""


@pytest.mark.full
async def test_a_flood_of_foreign_keys_holds_up_no_role(address: str) -> None:
    """Each has a key of its own, and proves it."""
    server: RpcServer[m.RequestStats] = RpcServer(address, "a service", m.RequestStats, peers=table(), pair=BUFFER)

    async def acknowledge(request: object) -> m.Ack:
        return m.Ack()

    serving = asyncio.create_task(server.serve(acknowledge, "a request"))
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, FOREIGN + 10)
    flood = []
    for _ in range(FOREIGN):
        dealer = context.socket(zmq.DEALER)
        configure_client(dealer, BUFFER.public, make_pair())
        dealer.connect(address)
        flood.append(dealer)
    client = RpcClient(f"{address}#{BUFFER.public}", "worker-0", "a service", m.Ack, pair=WORKER)
    async with asyncio.timeout(4 * SOON):
        await client.request(m.RequestStats(), m.Ack, SOON)
        while server.refused < FOREIGN:  # noqa: ASYNC110 - a refusal is an event of libzmq's alone
            await asyncio.sleep(0.1)
    assert server.received == 1
    client.close()
    context.destroy(linger=0)
    serving.cancel()
    await asyncio.wait({serving})
    server.close()
