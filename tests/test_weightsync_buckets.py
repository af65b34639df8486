"""Cutting tensors into buckets, by properties; and a real gloo group between two threads."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream.common.tasks import in_thread
from slipstream.errors import WeightSyncError
from slipstream.weightsync import broadcast
from slipstream.weightsync.broadcast import BroadcastGroup, Rendezvous, _gloo
from slipstream.weightsync.plan import BroadcastSource, GroupPlan, TransferPlan
from slipstream.weightsync.snapshot import ALIGNMENT, buckets_of, cut, dtype_of, pack, unpack
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 500)), st.integers(1, 1000))
def test_buckets_hold_every_tensor_once_in_order_aligned_and_within_the_limit(sizes: list[int], limit: int) -> None:
    buckets = list(cut(sizes, limit))
    assert [b.first + i for b in buckets for i in range(len(b.offsets))] == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket.nbytes <= limit or len(bucket.offsets) == 1
        end = 0
        for at, size in zip(bucket.offsets, sizes[bucket.first :], strict=False):
            assert at % ALIGNMENT == 0
            assert at >= end
            end = at + size
        assert end == bucket.nbytes


@given(st.lists(st.tuples(st.sampled_from(["float32", "bfloat16", "int8"]), st.lists(st.integers(0, 5), max_size=3))))
@settings(deadline=None)
def test_unpacking_gives_back_the_same_bits(entries: list[tuple[str, list[int]]]) -> None:
    tensors = [torch.randn(shape).mul(50).to(dtype_of(dtype)) for dtype, shape in entries]
    plan = TransferPlan(
        version=1,
        names=tuple(f"t{i}" for i in range(len(entries))),
        dtypes=tuple(d for d, _ in entries),
        shapes=tuple(tuple(s) for _, s in entries),
        bucket_bytes=256,
        source=BroadcastSource(),
        checksum="",
        keep=False,
        acks="",
        receiver="a",
    )
    sent = list(pack(tensors, plan.bucket_bytes))
    got = [pair for bucket, data in zip(buckets_of(plan), sent, strict=True) for pair in unpack(plan, bucket, data)]
    assert [name for name, _ in got] == list(plan.names)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, (_, b) in zip(tensors, got, strict=True))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="'float31'"):
        dtype_of("float31")


def make_pair(timeout_s: float) -> list[BroadcastGroup]:
    return make_group(2, timeout_s)


def make_group(ranks: int, timeout_s: float) -> list[BroadcastGroup]:
    rendezvous = Rendezvous("127.0.0.1", timeout_s)
    plan = GroupPlan("pair", "gloo", "127.0.0.1", rendezvous.port, 1, world_size=ranks, timeout_s=timeout_s)
    made: dict[int, BroadcastGroup] = {}

    def join(rank: int) -> None:
        made[rank] = BroadcastGroup(plan, rank, CPU)

    others = [threading.Thread(target=join, args=(rank,)) for rank in range(1, ranks)]
    for other in others:
        other.start()
    made[0] = BroadcastGroup(plan, 0, CPU, rendezvous)
    for other in others:
        other.join(60)
    return [made[rank] for rank in range(ranks)]


def test_a_group_leaves_global_torch_state_alone_and_a_late_member_is_a_named_error() -> None:
    _, receiver = make_pair(timeout_s=5)  # in which they meet, too
    assert not torch.distributed.is_initialized()
    with pytest.raises(WeightSyncError, match="rank 1: broadcast in group pair failed"):
        receiver.broadcast(torch.zeros(8))


def test_leaving_a_group_fails_the_others_at_once() -> None:
    sender, receiver = make_pair(timeout_s=60)
    began = time.monotonic()
    sender.close()
    with pytest.raises(WeightSyncError, match="closed"):
        receiver.broadcast(torch.zeros(8))
    with pytest.raises(WeightSyncError, match="is closed"):
        sender.broadcast(torch.zeros(8))
    assert time.monotonic() - began < 30  # not the group's deadline


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage is collected: what ends does so without."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
async def test_closing_a_group_after_its_send_has_failed_fails_the_others_at_once() -> None:
    sender, receiver, leaver = make_group(3, timeout_s=60)

    def go_on(group: BroadcastGroup) -> None:
        while True:
            group.broadcast(torch.zeros(1 << 16))

    receiving = in_thread(lambda: go_on(receiver), "receive")
    sending = in_thread(lambda: go_on(sender), "send")
    leaver.close()
    await asyncio.wait({sending}, timeout=30)
    assert isinstance(sending.exception(), WeightSyncError)  # kept, with its traceback
    sender.close()
    await asyncio.wait({receiving}, timeout=30)  # not the group's deadline
    assert receiving.done()
    assert "broadcast in group pair failed" in str(receiving.exception())


class HalfwayStore(torch.distributed.Store):
    """Of a member that dies once the others know where it listens."""

    def __init__(self, store: torch.distributed.Store) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        raise RuntimeError("it dies")

    def wait(self, *_: object) -> None:
        raise RuntimeError("it dies")


async def test_closing_the_rendezvous_releases_at_once_those_that_wait_for_a_connection() -> None:
    """Which they have of no member yet, so that the end of none shows. Of two members the one with the lower port waits for the
    other's connection; the other one is refused at once where that has died."""
    timeout = timedelta(seconds=60)
    for _ in range(20):
        rendezvous = Rendezvous("127.0.0.1", 60)
        plan = GroupPlan("void", "gloo", "127.0.0.1", rendezvous.port, 1, world_size=2, timeout_s=60)
        store = TCPStore("127.0.0.1", rendezvous.port, timeout=timeout, wait_for_workers=False)
        with pytest.raises(RuntimeError):
            _gloo(HalfwayStore(PrefixStore(plan.name, store)), plan, 1, timeout)
        waiting = in_thread(lambda plan=plan: BroadcastGroup(plan, 0, CPU), "rank 0")
        await asyncio.wait((waiting,), timeout=0.5)
        rendezvous.close()
        await asyncio.wait((waiting,), timeout=30)  # not the group's deadline
        if "rank 0 has given the group up" in str(waiting.exception()):
            break
        assert "did not meet" in str(waiting.exception())  # it was refused, at once or a while later
    else:
        raise AssertionError("it was refused every time")


def test_a_group_that_does_not_meet_is_a_named_error() -> None:
    rendezvous = Rendezvous("127.0.0.1", 1)
    plan = GroupPlan("lonely", "gloo", "127.0.0.1", rendezvous.port, 1, world_size=2, timeout_s=1)
    with pytest.raises(WeightSyncError, match=r"group lonely did not meet within 1 s"):
        BroadcastGroup(plan, 0, CPU, rendezvous)


def test_closing_the_rendezvous_releases_at_once_whoever_still_waits_there() -> None:
    rendezvous = Rendezvous("127.0.0.1", 60)
    plan = GroupPlan("void", "gloo", "127.0.0.1", rendezvous.port, 1, world_size=3, timeout_s=60)
    errors: list[WeightSyncError] = []

    def meet() -> None:
        try:
            BroadcastGroup(plan, 1, CPU)
        except WeightSyncError as error:
            errors.append(error)

    waiting = threading.Thread(target=meet)
    waiting.start()
    waiting.join(1)
    assert waiting.is_alive()
    rendezvous.close()
    waiting.join(60)
    meet()  # who comes later does not wait either
    assert len(errors) == 2


def test_a_connection_to_the_store_that_is_lost_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch loses some: its deadline passes though the store answers."""
    lost, connect = set[int | None](), torch.distributed.TCPStore

    def first_is_lost(*arguments: Any, **options: Any) -> torch.distributed.TCPStore:
        if not options.get("is_master"):
            assert options["timeout"] <= timedelta(seconds=1)
        if not options.get("is_master") and threading.get_ident() not in lost:
            lost.add(threading.get_ident())
            raise torch.distributed.DistNetworkError("The client socket has timed out after 1000ms")
        return connect(*arguments, **options)

    monkeypatch.setattr(broadcast, "TCPStore", first_is_lost)
    sender, receiver = make_pair(timeout_s=30)
    assert len(lost) == 2
    for group in (sender, receiver):
        group.close()


def test_nccl_without_a_gpu_build_is_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)
    rendezvous = Rendezvous("127.0.0.1", 1)
    plan = GroupPlan("nccl", "nccl", "127.0.0.1", rendezvous.port, 1, world_size=1, timeout_s=1)
    with pytest.raises(WeightSyncError, match="no NCCL; allowed here is gloo"):
        BroadcastGroup(plan, 0, CPU, rendezvous)
