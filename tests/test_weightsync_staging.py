"""The receiving end: a real Staging, fed by a real sender thread, real files and a real ack socket."""

import asyncio
import threading
import time
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from slipstream.errors import WeightSyncError
from slipstream.weightsync import delta
from slipstream.weightsync.broadcast import BroadcastGroup, Rendezvous
from slipstream.weightsync.plan import (
    AckCollector,
    BroadcastSource,
    DeltaSource,
    FileSource,
    GroupPlan,
    Source,
    TransferPlan,
)
from slipstream.weightsync.snapshot import WeightSnapshot, checksum, dtype_of, pack
from slipstream.weightsync.staging import WeightStaging

CPU = torch.device("cpu")
BUCKET = 4096


def snapshot(version: int, seed: int, dtype: str = "bfloat16") -> WeightSnapshot:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(64, 32), (32,), (), (0, 4), (3, 5, 7), (50, 100)]
    tensors = tuple(torch.randn(s, generator=generator).to(dtype_of(dtype)) for s in shapes)
    return WeightSnapshot(version, tuple(f"t{i}" for i in range(len(shapes))), tensors, checksum(tensors))


def plan_of(
    wanted: WeightSnapshot, source: Source, acks: str, receiver: str = "a#1", *, keep: bool = False
) -> TransferPlan:
    return wanted.plan(source, bucket_bytes=BUCKET, keep=keep, acks=acks, receiver=receiver)


def write(path: Path, what: WeightSnapshot) -> FileSource:
    save_file(dict(zip(what.names, what.tensors, strict=True)), path)
    return FileSource(str(path))


def same(staged: list[tuple[str, torch.Tensor]], wanted: WeightSnapshot) -> bool:
    bits = [(n, t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist()) for n, t in staged]
    return bits == [
        (n, t.dtype, t.shape, t.reshape(-1).view(torch.uint8).tolist())
        for n, t in zip(wanted.names, wanted.tensors, strict=True)
    ]


def mapped() -> str:
    return Path("/proc/self/maps").read_text()


def staging() -> WeightStaging:
    return WeightStaging(0, CPU, lambda plan: None)


async def stage(
    receiver: WeightStaging, acks: AckCollector, wanted: WeightSnapshot, source: Source, *, keep: bool = False
) -> None:
    """Announce, and wait for the ack."""
    with acks.expect("a", wanted.version, 1) as expected:
        receiver.begin(plan_of(wanted, source, acks.address, expected.receiver, keep=keep))
        await asyncio.wait_for(expected.complete(), 60)


@pytest.fixture
async def acks():
    acks = AckCollector("127.0.0.1")
    yield acks
    acks.close()


async def meet(receiver: WeightStaging, seconds: float = 60.0) -> BroadcastGroup:
    rendezvous = Rendezvous("127.0.0.1", seconds)
    plan = GroupPlan("g", "gloo", "127.0.0.1", rendezvous.port, rank_offset=1, world_size=2, timeout_s=seconds)
    _, group = await asyncio.gather(
        asyncio.to_thread(receiver.join, plan), asyncio.to_thread(BroadcastGroup, plan, 0, CPU, rendezvous)
    )
    return group


def send(group: BroadcastGroup, what: WeightSnapshot, buckets: int = 1 << 30) -> None:
    for count, data in enumerate(pack(what.tensors, BUCKET)):
        if count == buckets:
            return
        group.broadcast(data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_broadcast_arrives_in_the_background_and_the_group_lives_on(acks: AckCollector, dtype: str) -> None:
    receiver = staging()
    group = await meet(receiver)
    for version in (1, 2):
        wanted = snapshot(version, version, dtype)
        with acks.expect("a", version, 1) as expected:
            began = time.monotonic()
            receiver.begin(plan_of(wanted, BroadcastSource(), acks.address, expected.receiver))
            assert time.monotonic() - began < 5  # nothing was sent yet
            await asyncio.to_thread(send, group, wanted)
            await asyncio.wait_for(expected.complete(), 60)
        assert same(receiver.take(version), wanted)
        with pytest.raises(WeightSyncError, match=f"version {version} is not staged here, nothing is"):
            receiver.take(version)
    receiver.close()
    group.close()


async def test_a_sender_that_leaves_in_the_middle_is_an_ack_with_the_reason_and_take_says_so(
    acks: AckCollector,
) -> None:
    receiver = staging()
    group = await meet(receiver, 60)
    wanted = snapshot(1, 1)
    with acks.expect("a", 1, 1) as expected:
        receiver.begin(plan_of(wanted, BroadcastSource(), acks.address, expected.receiver))
        await asyncio.to_thread(send, group, wanted, 2)
        began = time.monotonic()
        group.close()
        with pytest.raises(WeightSyncError, match="rank 0: rank 1: broadcast in group g failed"):
            await asyncio.wait_for(expected.complete(), 60)
        assert time.monotonic() - began < 30  # not the group's deadline
    with pytest.raises(WeightSyncError, match="version 1 was not staged: rank 1: broadcast in group g failed"):
        receiver.take(1)
    with pytest.raises(WeightSyncError, match="in no broadcast group"):  # its state is unknown: it was left
        await stage(receiver, acks, wanted, BroadcastSource())
    group = await meet(receiver)
    with acks.expect("a", 1, 1) as expected:
        receiver.begin(plan_of(wanted, BroadcastSource(), acks.address, expected.receiver))
        await asyncio.to_thread(send, group, wanted)
        await asyncio.wait_for(expected.complete(), 60)
    assert same(receiver.take(1), wanted)
    receiver.close()


async def test_what_does_not_fit_is_refused_in_the_ack_and_releases_the_sender(acks: AckCollector) -> None:
    def refuse(plan: TransferPlan) -> None:
        raise WeightSyncError(f"version {plan.version}: the model has no tensor 't0'")

    receiver = WeightStaging(0, CPU, refuse)
    group = await meet(receiver, 60)
    wanted = snapshot(1, 1)
    with acks.expect("a", 1, 1) as expected:
        receiver.begin(plan_of(wanted, BroadcastSource(), acks.address, expected.receiver))
        with pytest.raises(WeightSyncError, match="the model has no tensor 't0'"):
            await asyncio.wait_for(expected.complete(), 60)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match="rank 0"):
        await asyncio.to_thread(send, group, wanted)
    assert time.monotonic() - began < 30  # not the group's deadline


async def test_a_check_that_raises_anything_at_all_is_an_ack(acks: AckCollector, tmp_path: Path) -> None:
    def bug(plan: TransferPlan) -> None:
        raise KeyError("hidden_size")

    wanted = snapshot(1, 1)
    with pytest.raises(WeightSyncError, match="KeyError: 'hidden_size'"):
        await stage(WeightStaging(0, CPU, bug), acks, wanted, write(tmp_path / "w", wanted))


async def test_a_file_is_mapped_and_outlives_its_name(acks: AckCollector, tmp_path: Path) -> None:
    receiver, wanted = staging(), snapshot(1, 1)
    path = tmp_path / "w.safetensors"
    await stage(receiver, acks, wanted, write(path, wanted))
    assert str(path) in mapped()  # not copied
    path.unlink()
    assert same(receiver.take(1), wanted)


async def test_a_flipped_byte_is_found(acks: AckCollector, tmp_path: Path) -> None:
    receiver, wanted = staging(), snapshot(1, 1)
    source = write(tmp_path / "w", wanted)
    content = bytearray((tmp_path / "w").read_bytes())
    content[-5] ^= 1
    (tmp_path / "w").write_bytes(content)
    with pytest.raises(WeightSyncError, match=f"arrived with checksum .*, the learner sent {wanted.checksum}"):
        await stage(receiver, acks, wanted, source)
    with pytest.raises(WeightSyncError, match="version 1 was not staged"):
        receiver.take(1)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"no safetensors", "cannot read the weights in"), ("other", "holds t0 as")],
)
async def test_an_unreadable_file_is_named(
    acks: AckCollector, tmp_path: Path, content: bytes | str | None, message: str
) -> None:
    path = tmp_path / "w"
    if content == "other":
        save_file({f"t{i}": torch.zeros(i + 1) for i in range(6)}, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(WeightSyncError, match=message):
        await stage(staging(), acks, snapshot(1, 1), FileSource(str(path)))


def write_delta(path: Path, base: WeightSnapshot, new: WeightSnapshot) -> DeltaSource:
    save_file(delta.differences(base.names, base.tensors, new.tensors), path)
    return DeltaSource(str(path), base.version)


async def test_deltas_chain_on_what_was_kept_whatever_way_it_came(acks: AckCollector, tmp_path: Path) -> None:
    receiver, first = staging(), snapshot(1, 1)
    path = tmp_path / "full"
    await stage(receiver, acks, first, write(path, first), keep=True)
    path.write_bytes(bytes(len(path.read_bytes())))  # kept means a copy: what becomes of the file is nothing to it
    receiver.discard()  # never taken; still the base
    second = msgspec.structs.replace(snapshot(2, 1), tensors=tuple(t * 1 for t in first.tensors))
    second.tensors[0][3, 4] += 1
    second = msgspec.structs.replace(second, checksum=checksum(second.tensors))
    await stage(receiver, acks, second, write_delta(tmp_path / "d2", first, second), keep=True)
    assert same(receiver.take(2), second)
    third = snapshot(3, 3)
    await stage(receiver, acks, third, write_delta(tmp_path / "d3", second, third), keep=True)
    assert same(receiver.take(3), third)


async def test_a_delta_from_another_base_is_refused_and_the_base_stays(acks: AckCollector, tmp_path: Path) -> None:
    receiver, first, second, third = staging(), *(snapshot(v, v) for v in (1, 2, 3))
    with pytest.raises(WeightSyncError, match="version 2 is a delta from version 1; the base kept here is none"):
        await stage(receiver, acks, second, write_delta(tmp_path / "d", first, second), keep=True)
    await stage(receiver, acks, first, write(tmp_path / "w", first), keep=True)
    with pytest.raises(WeightSyncError, match="delta from version 2; the base kept here is version 1"):
        await stage(receiver, acks, third, write_delta(tmp_path / "d3", second, third), keep=True)
    wrong = msgspec.structs.replace(third, version=2)
    with pytest.raises(WeightSyncError, match="checksum"):
        await stage(receiver, acks, second, write_delta(tmp_path / "d2", first, wrong), keep=True)
    await stage(receiver, acks, second, write_delta(tmp_path / "d2", first, second), keep=True)
    assert same(receiver.take(2), second)


async def test_a_broadcast_may_be_kept_too(acks: AckCollector, tmp_path: Path) -> None:
    receiver, first, second = staging(), snapshot(1, 1), snapshot(2, 2)
    group = await meet(receiver)
    with acks.expect("a", 1, 1) as expected:
        receiver.begin(plan_of(first, BroadcastSource(), acks.address, expected.receiver, keep=True))
        await asyncio.to_thread(send, group, first)
        await asyncio.wait_for(expected.complete(), 60)
    await stage(receiver, acks, second, write_delta(tmp_path / "d", first, second), keep=True)
    assert same(receiver.take(2), second)
    receiver.close()
    group.close()


async def test_a_newer_version_replaces_one_on_its_way(acks: AckCollector, tmp_path: Path) -> None:
    receiver, first, second = staging(), snapshot(1, 1), snapshot(2, 2)
    group = await meet(receiver, 20)
    receiver.begin(plan_of(first, BroadcastSource(), acks.address))
    await asyncio.to_thread(send, group, first, 1)
    await stage(receiver, acks, second, write(tmp_path / "w", second))
    with pytest.raises(WeightSyncError, match="version 1 is not staged here, version 2 is"):
        receiver.take(1)
    assert same(receiver.take(2), second)
    group.close()
    for thread in [t for t in threading.enumerate() if t.name.startswith("stage-")]:
        await asyncio.to_thread(thread.join, 60)
        assert not thread.is_alive()
    assert receiver._group is None  # the dropped one did not give its group back


async def test_closing_while_a_thread_receives_returns_at_once(acks: AckCollector) -> None:
    receiver, wanted = staging(), snapshot(1, 1)
    group = await meet(receiver, 60)
    receiver.begin(plan_of(wanted, BroadcastSource(), acks.address))
    await asyncio.to_thread(send, group, wanted, 1)
    began = time.monotonic()
    receiver.close()
    assert time.monotonic() - began < 30  # not the 60 s of the group
    with pytest.raises(WeightSyncError, match="nothing is"):
        receiver.take(1)
    group.close()


async def test_a_learner_that_is_gone_costs_the_engine_nothing(tmp_path: Path) -> None:
    receiver, wanted = staging(), snapshot(1, 1)
    receiver.begin(plan_of(wanted, write(tmp_path / "w", wanted), "tcp://127.0.0.1:1"))
    assert same(receiver.take(1), wanted)  # the ack still lingers in its thread
    receiver.begin(plan_of(wanted, write(tmp_path / "w", wanted), "no address"))
    assert same(receiver.take(1), wanted)
