"""Rolling pushes over a fleet of small real replicas: cohorts, fences, joiners, leavers, deadlines, in every transport.

The replicas are those of tests/replicas.py: real receiving code, real sockets, collectives and files, a real model that computes
the canary; only the server around them is missing. The same against real servers is in tests/conformance.
"""

import asyncio
import contextlib
import errno
import gc
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from slipstream.errors import EngineError, StateError, WeightSyncError
from slipstream.tests.replicas import CANARY, LocalReplica, RemoteReplica, logprobs, make_model, remote
from slipstream.weightsync import publisher as publishing
from slipstream.weightsync.plan import GroupPlan, PushReport, ReplicaControl, TransferPlan
from slipstream.weightsync.publisher import Publisher
from slipstream.weightsync.snapshot import StoredTensors
from slipstream.weightsync.transports import read_manifest

TRANSPORTS = ("broadcast", "shared", "disk", "delta")


class Fleet:
    """A publisher, and what it told the supervisor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reported: list[tuple[str, int | str]] = []
        self.publisher: Publisher

    def publish_to(self, *replicas: ReplicaControl, transport: str = "broadcast", **options: Any) -> Publisher:
        defaults: dict[str, Any] = {"push_s": 20.0, "canary_tolerance": 1e-6, "bucket_bytes": 1024}
        self.publisher = Publisher(
            replicas,
            transport=transport,  # type: ignore[arg-type]
            folder=self.folder,
            spool=self.folder,
            host="127.0.0.1",
            backend="gloo",
            device=torch.device("cpu"),
            on_served=lambda name, version: self.reported.append((name, version)),
            on_lost=lambda name, reason: self.reported.append((name, reason)),
            **(defaults | options),
        )
        return self.publisher

    async def push(self, version: int, model: torch.nn.Module | None = None) -> PushReport:
        model = model or make_model(version)
        return await self.publisher.publish(version, model.state_dict().items(), CANARY, logprobs(model, CANARY))


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """No push keeps a version, however it fails. The collector is off: a learner may step for hours before it collects all."""
    fleet = Fleet(tmp_path / "weights")
    gc.disable()
    try:
        yield fleet
    finally:
        fleet.publisher.close()
        del fleet.publisher  # which refers to the fleet, and to the replicas: they leave their groups
        gc.enable()
    assert not [file for file in open_files() if file.startswith(str(fleet.folder))]


def open_files() -> list[str]:
    """Of this process."""
    files = list[str]()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            files.append(os.readlink(link))
    return files


def holds(replica: LocalReplica, version: int) -> bool:
    """Whether it serves `version`, bit for bit, and is not paused."""
    wanted = make_model(version).state_dict()
    same = all(torch.equal(tensor, wanted[name]) for name, tensor in replica.model.state_dict().items())
    return same and replica.served == version and not replica.paused


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_versions_roll_over_the_fleet_one_cohort_at_a_time(fleet: Fleet, transport: str) -> None:
    call_log: list[tuple[str, str]] = []
    replicas = [LocalReplica(name, call_log, ranks=2 if name == "b" else 1) for name in "abcde"]
    fleet.publish_to(*replicas, transport=transport, partial="keep_kv")
    for version in (1, 2, 3):
        call_log.clear()
        report = await fleet.push(version)
        assert (report.version, report.pushed, report.failed) == (version, tuple("abcde"), {})
        assert all(holds(replica, version) for replica in replicas)
        assert 0 < report.pause_ms < report.push_ms
        assert 0 < report.transfer_ms < report.push_ms
        assert report.sent_bytes > 0
        assert report.canary == 0
        steps = [(name, what.split()[0]) for name, what in call_log if what != "join"]
        assert steps == [(n, w) for n in "abcde" for w in ("receive", "pause", "swap", "resume", "score")]
        assert ("a", "pause keep_kv") in call_log
    assert fleet.reported == [(name, version) for version in (1, 2, 3) for name in "abcde"]
    assert ("a", "join") not in call_log  # the group lasts as long as its members do


async def test_files_are_written_once_per_push_and_shared_memory_is_cleaned(fleet: Fleet) -> None:
    replicas = [LocalReplica(name) for name in "abcd"]
    publisher = fleet.publish_to(*replicas, transport="shared")
    paths: list[Path] = []
    receive = replicas[3].receive_weights

    async def note(plan: TransferPlan) -> None:
        paths.append(Path(plan.source.path))  # type: ignore[union-attr]
        await receive(plan)

    replicas[3].receive_weights = note
    sizes = [(await fleet.push(version)).sent_bytes for version in (1, 2)]
    assert sizes == [paths[1].stat().st_size] * 2
    assert not paths[0].exists()
    assert str(paths[1]).startswith("/dev/shm/slipstream-weights-")
    publisher.close()
    assert not paths[1].parent.exists()


async def test_a_disk_tells_other_readers_what_is_latest(fleet: Fleet) -> None:
    fleet.publish_to(LocalReplica("a"), transport="disk")
    for version in (1, 2, 3):
        await fleet.push(version)
    manifest = read_manifest(fleet.folder)
    assert manifest is not None
    assert (manifest.version, manifest.full) == (3, "v3.full.safetensors")
    assert len(list(fleet.folder.glob("*.safetensors"))) == 2


async def test_a_delta_goes_to_those_who_kept_the_version_before_and_the_file_to_the_others(fleet: Fleet) -> None:
    replicas = [LocalReplica(name) for name in "ab"]
    publisher = fleet.publish_to(*replicas, transport="delta")
    full = (await fleet.push(1)).sent_bytes
    model = make_model(1)
    with torch.no_grad():
        model[0].weight[3] += 1.0
    small = await fleet.push(2, model)
    assert [r.call_log[-5] for r in replicas] == [("a", "receive DeltaSource"), ("b", "receive DeltaSource")]
    assert small.sent_bytes < full / 3
    assert read_manifest(fleet.folder).base == 1  # type: ignore[union-attr]

    reborn, late = LocalReplica("b"), LocalReplica("c")
    publisher.update([replicas[0], reborn, late])
    with torch.no_grad():
        model[0].weight[4] += 1.0
    assert (await fleet.push(3, model)).pushed == ("a",)
    caught_up = await publisher.catch_up()
    assert caught_up is not None
    assert caught_up.pushed == ("b", "c")
    assert replicas[0].call_log[-5] == ("a", "receive DeltaSource")
    assert ("b", "receive FileSource") in reborn.call_log
    assert ("c", "receive FileSource") in late.call_log
    with torch.no_grad():
        model[0].weight[5] += 1.0
    assert (await fleet.push(4, model)).pushed == ("a", "b", "c")
    assert ("c", "receive DeltaSource") in late.call_log
    everything = make_model(9)
    await fleet.push(5, everything)  # all of it changed: a delta would be larger
    assert replicas[0].call_log[-5] == ("a", "receive FileSource")


async def test_groups_follow_the_cohorts_members(fleet: Fleet) -> None:
    replicas = [LocalReplica(name) for name in "abcde"]
    publisher = fleet.publish_to(*replicas[:4], cohort=2)

    def joins() -> list[int]:
        return [sum(what == "join" for _, what in replica.call_log) for replica in replicas]

    for version in (1, 2):
        assert (await fleet.push(version)).pushed == tuple("abcd")
        assert joins() == [1, 1, 1, 1, 0]
    publisher.update([replicas[0], replicas[1], replicas[2], replicas[4]])
    await publisher.catch_up()
    assert joins() == [1, 1, 1, 1, 1]  # the joiner by itself
    assert holds(replicas[4], 2)
    assert (await fleet.push(3)).pushed == tuple("abce")
    assert joins() == [1, 1, 2, 1, 2]
    assert holds(replicas[3], 2)  # a leaver keeps what it has


class Forgetful(LocalReplica):
    """Its loader says that all is well, and skips a layer the first `times` times."""

    def __init__(self, name: str, times: int) -> None:
        super().__init__(name)
        self.times = times
        self.load = self._load

    def _load(self, tensors: dict[str, torch.Tensor]) -> None:
        self.times -= 1
        some = {name: tensor for name, tensor in tensors.items() if self.times < 0 or not name.startswith("1")}
        self.model.load_state_dict(some, strict=False)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_the_canary_catches_a_bad_load_and_a_second_push_heals_it(fleet: Fleet, transport: str) -> None:
    replicas = [LocalReplica("a"), Forgetful("b", 1)]
    fleet.publish_to(*replicas, transport=transport)
    assert (await fleet.push(1)).pushed == ("a", "b")
    assert holds(replicas[1], 1)


async def test_a_replica_that_stays_wrong_stops_the_push_before_the_next_cohort(fleet: Fleet) -> None:
    replicas = [LocalReplica("a"), Forgetful("b", 0), LocalReplica("c")]
    fleet.publish_to(*replicas)
    await fleet.push(1)
    replicas[1].times = 2  # type: ignore[attr-defined]
    with pytest.raises(
        WeightSyncError, match="b does not hold version 2: after two pushes its canary log-probs differ"
    ):
        await fleet.push(2)
    assert holds(replicas[0], 2)
    assert holds(replicas[2], 1)
    assert fleet.reported[-2] == ("a", 2)
    assert fleet.reported[-1][0] == "b"


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)


async def test_a_file_that_was_damaged_is_written_anew(fleet: Fleet) -> None:
    class Unlucky(LocalReplica):
        damage = 1

        async def receive_weights(self, plan: TransferPlan) -> None:
            self.damage -= 1
            if self.damage == 0:
                flip_last_byte(Path(plan.source.path))  # type: ignore[union-attr]
            await super().receive_weights(plan)

    replica = Unlucky("a")
    fleet.publish_to(replica, transport="disk")
    report = await fleet.push(1)
    assert report.pushed == ("a",)
    assert replica.damage == -1
    assert report.sent_bytes == 2 * (fleet.folder / "v1.full.safetensors").stat().st_size


class Silent(LocalReplica):
    """Takes the announcement of version 2, and never says anything again about it, as often as told."""

    times = 99

    async def receive_weights(self, plan: TransferPlan) -> None:
        if plan.version == 2 and self.times > 0:
            self.times -= 1
            return
        await super().receive_weights(plan)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_late_member_is_fenced_and_its_cohort_goes_on_without_it(fleet: Fleet, transport: str) -> None:
    replicas = [LocalReplica("a"), Silent("b"), LocalReplica("c"), LocalReplica("d")]
    fleet.publish_to(*replicas, transport=transport, cohort=2, push_s=8.0)
    await fleet.push(1)
    began = time.monotonic()
    report = await fleet.push(2)
    assert time.monotonic() - began < 2 * 8.0
    assert report.pushed == ("a", "c", "d")
    late = report.failed["b"]
    # Of a loop that stood still the deadline of the whole attempt passes together with that of the transfer.
    assert re.search(
        r"for b to hold version 2; no ack of rank 0; see its log$|waited .* s for b; see the servers' logs$", late
    )
    assert holds(replicas[1], 1)  # goes on with what it has, and is not paused
    assert fleet.reported[4:] == [("a", 2), ("b", late), ("c", 2), ("d", 2)]
    replicas[1].times = 0  # type: ignore[attr-defined]
    assert (await fleet.push(3)).pushed == ("a", "c", "d")  # fenced until it is proven
    caught_up = await fleet.publisher.catch_up()
    assert caught_up is not None
    assert caught_up.pushed == ("b",)
    assert fleet.reported[-1] == ("b", 3)
    assert (await fleet.push(4)).pushed == ("a", "b", "c", "d")
    assert await fleet.publisher.catch_up() is None


async def test_a_swap_that_fails_is_tried_once_more_and_the_paused_are_resumed(fleet: Fleet) -> None:
    class Refuses(LocalReplica):
        async def swap_weights(self, version: int) -> None:
            self.call_log.append((self.name, "swap refused"))
            raise EngineError(f"{self.name} answered 500")

    replicas = [Refuses("a"), LocalReplica("b")]
    fleet.publish_to(*replicas, cohort=2)
    report = await fleet.push(1)
    assert (report.pushed, report.failed) == (("b",), {"a": "a answered 500"})
    assert sum(what == "swap refused" for _, what in replicas[0].call_log) == 2
    assert not replicas[0].paused
    assert fleet.reported == [("b", 1), ("a", "a answered 500")]


class Stuck(LocalReplica):
    """Is asked something, and never answers."""

    def __init__(self, name: str, at: str) -> None:
        super().__init__(name)
        self.asked = asyncio.Event()
        setattr(self, at, self._forever)

    async def _forever(self, *_: object) -> None:
        self.asked.set()
        await asyncio.Event().wait()


@pytest.mark.parametrize("at", ["join_group", "receive_weights", "pause", "swap_weights", "resume", "score", "version"])
async def test_a_leaver_in_the_middle_of_a_push_is_let_go_at_once(fleet: Fleet, at: str) -> None:
    replicas = [LocalReplica("a"), Stuck("b", at), LocalReplica("c")]
    publisher = fleet.publish_to(*replicas, cohort=2, push_s=60.0)
    pushing = asyncio.create_task(fleet.push(1))
    await asyncio.wait_for(replicas[1].asked.wait(), 60)  # type: ignore[attr-defined]
    publisher.update([replicas[0], replicas[2]])
    report = await asyncio.wait_for(pushing, 60)
    assert (report.pushed, report.failed) == (("a", "c"), {})
    assert holds(replicas[0], 1)
    assert holds(replicas[2], 1)
    assert fleet.reported == [("a", 1), ("c", 1)]


@pytest.mark.parametrize("at", ["join_group", "receive_weights", "pause", "swap_weights", "resume", "score", "version"])
async def test_every_wait_has_a_deadline(fleet: Fleet, at: str) -> None:
    replicas = [Stuck("a", at), LocalReplica("b")]
    fleet.publish_to(*replicas, push_s=6.0)
    began = time.monotonic()
    report = await fleet.push(1)
    assert time.monotonic() - began < 2 * 6.0
    assert report.pushed == ("b",)
    assert "publisher waited" in report.failed["a"]


async def test_a_joiner_gets_the_current_version_through_catch_up(fleet: Fleet) -> None:
    replicas = [LocalReplica("a"), LocalReplica("b")]
    publisher = fleet.publish_to(replicas[0])
    assert await publisher.catch_up() is None  # nothing to bring yet
    await fleet.push(1)
    assert await publisher.catch_up() is None  # no replica is behind
    publisher.update(replicas)
    report = await publisher.catch_up()
    assert report is not None
    assert (report.version, report.pushed) == (1, ("b",))
    assert holds(replicas[1], 1)
    replicas[1].served = None  # started anew on the same port, unknown to the publisher
    report = await publisher.catch_up()
    assert report is not None
    assert report.pushed == ("b",)


class Clock:
    """`time` of the publisher, in which `later` seconds more have passed."""

    later = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.later


async def test_a_joiner_that_fails_is_tried_again_after_twice_as_long(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(publishing, "time", clock)
    monkeypatch.setattr(publishing, "RETRY_S", 200.0)
    monkeypatch.setattr(publishing, "RETRY_MOST_S", 700.0)
    serving, joiner = LocalReplica("serving"), LocalReplica("joiner")
    receives = 0

    async def fails(plan: TransferPlan) -> None:
        nonlocal receives
        receives += 1
        raise EngineError("joiner answered 500")

    joiner.receive_weights, receive = fails, joiner.receive_weights
    publisher = fleet.publish_to(serving, transport="disk")
    await fleet.push(1)
    assert publisher.retry_in() is None
    publisher.update([serving, joiner])
    for wait in (200.0, 400.0, 700.0, 700.0):
        assert publisher.retry_in() == 0
        assert (await publisher.catch_up()).failed == {"joiner": "joiner answered 500"}  # type: ignore[union-attr]
        tried, left = receives, publisher.retry_in()
        assert left is not None
        assert wait - 100.0 < left <= wait
        assert await publisher.catch_up() is None  # not due
        assert receives == tried
        clock.later += left
    joiner.receive_weights = receive
    assert (await publisher.catch_up()).pushed == ("joiner",)  # type: ignore[union-attr]
    assert publisher.retry_in() is None


@pytest.mark.parametrize("at", ["version", "receive_weights"])
async def test_a_push_breaks_off_a_catch_up_that_gets_nowhere(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(publishing, "GRACE_SHARE", 0.0005)
    monkeypatch.setattr(publishing, "PROBE_S", 600.0)
    serving, stuck = LocalReplica("serving"), Stuck("stuck", at)
    publisher = fleet.publish_to(serving, transport="disk", push_s=600.0)
    await fleet.push(1)
    publisher.update([serving, stuck])
    catching = asyncio.create_task(publisher.catch_up())
    await asyncio.wait_for(stuck.asked.wait(), 60)
    began = time.monotonic()
    assert (await fleet.push(2)).pushed == ("serving",)
    assert time.monotonic() - began < 60  # what it waits for has 144 s at least
    broken_off = await catching
    assert broken_off is not None
    assert (broken_off.version, broken_off.pushed) == (1, ())
    assert broken_off.failed == {"stuck": "the push of the next version came first"}
    assert publisher.retry_in()


async def test_the_loop_goes_on_while_a_version_is_hashed_and_stored(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.publish_to(LocalReplica("a"), transport="disk")
    storing, loop_ran, add = threading.Event(), threading.Event(), StoredTensors.add

    def slowly(self: StoredTensors, tensor: torch.Tensor) -> None:
        storing.set()
        assert loop_ran.wait(30), "the loop stood still"
        add(self, tensor)

    async def watch() -> None:
        assert await asyncio.to_thread(storing.wait, 30)
        loop_ran.set()

    monkeypatch.setattr(StoredTensors, "add", slowly)
    watching = asyncio.create_task(watch())
    assert (await fleet.push(1)).pushed == ("a",)
    await watching


async def test_a_version_that_cannot_be_stored_is_not_pushed_and_names_the_folder(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: StoredTensors, tensor: torch.Tensor) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    replica = LocalReplica("a")
    fleet.publish_to(replica, transport="disk")
    monkeypatch.setattr(StoredTensors, "add", full)
    with pytest.raises(WeightSyncError, match=r"version 1 is not pushed: it cannot be written to /.*: No space left"):
        await fleet.push(1)
    assert replica.served is None


async def test_everybody_may_be_gone(fleet: Fleet) -> None:
    class Down(LocalReplica):
        async def version(self) -> int | None:
            raise EngineError(f"{self.name} is not reachable")

    fleet.publish_to(Down("a"))
    report = await fleet.push(1)
    assert (report.pushed, report.failed) == ((), {"a": "a is not reachable"})
    caught_up = await fleet.publisher.catch_up()
    assert caught_up is not None
    assert caught_up.failed == {"a": "a is not reachable"}  # and so it is tried again
    fleet.publisher.update([])
    assert (await fleet.push(2)).pushed == ()


async def test_a_canary_needs_its_log_probs(fleet: Fleet) -> None:
    fleet.publish_to(LocalReplica("a"))
    with pytest.raises(StateError, match="3 canary log-probs for 3 tokens"):
        await fleet.publisher.publish(1, [], [1, 2, 3], [0.0, 0.0, 0.0])


async def test_a_bug_in_a_client_is_not_swallowed(fleet: Fleet) -> None:
    class Buggy(LocalReplica):
        async def pause(self, mode: str) -> None:
            raise ZeroDivisionError

    fleet.publish_to(Buggy("a"))
    with pytest.raises(ZeroDivisionError):
        await fleet.push(1)
    gc.collect()  # such an error ends the learner, and keeps the version until then


# Processes of their own, that can be killed and frozen.


class DiesReceiving(RemoteReplica):
    async def receive_weights(self, plan: TransferPlan) -> None:
        await super().receive_weights(plan)
        self.signal(signal.SIGKILL)


class FreezesJoining(RemoteReplica):
    async def join_group(self, plan: GroupPlan) -> None:
        self.signal(signal.SIGSTOP)
        await super().join_group(plan)


async def start(stack: AsyncExitStack, tmp_path: Path, names: Sequence[str]) -> list[RemoteReplica]:
    replicas = [await stack.enter_async_context(remote(name, tmp_path / name)) for name in names]
    await asyncio.gather(*(replica.wait_ready(120) for replica in replicas))
    return replicas


def client(kind: Callable[..., RemoteReplica], of: RemoteReplica, tmp_path: Path) -> RemoteReplica:
    return kind(of.name, tmp_path / of.name, of.process)


async def test_a_replica_killed_while_it_receives_takes_nobody_with_it(fleet: Fleet, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        remotes = await start(stack, tmp_path, ["killed"])
        healthy = [LocalReplica("a"), LocalReplica("b")]
        fleet.publish_to(healthy[0], client(DiesReceiving, remotes[0], tmp_path), healthy[1], cohort=3, push_s=240.0)
        began = time.monotonic()
        report = await fleet.push(1)
        assert time.monotonic() - began < 50  # who waits for it has 57 s
        assert report.pushed == ("a", "b")
        assert report.failed["killed"] == "killed is not reachable"
        assert all(holds(replica, 1) for replica in healthy)


async def test_a_frozen_replica_is_fenced_and_catches_up_when_it_thaws(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "RETRY_S", 0.2)  # what it was told before it froze may outlast an attempt or two
    async with AsyncExitStack() as stack:
        frozen = (await start(stack, tmp_path, ["frozen"]))[0]
        healthy = LocalReplica("a")
        publisher = fleet.publish_to(healthy, client(FreezesJoining, frozen, tmp_path), cohort=2, push_s=8.0)
        began = time.monotonic()
        report = await fleet.push(1)
        assert time.monotonic() - began < 2 * 8.0
        assert report.pushed == ("a",)
        # The wait for its reply and the meeting of the group have the same deadline.
        assert re.search("waited|did not meet within", report.failed["frozen"])
        publisher.update([healthy, frozen])
        frozen.signal(signal.SIGCONT)

        async def thawed() -> PushReport:
            while True:
                await asyncio.sleep(publisher.retry_in() or 0)
                if (caught_up := await publisher.catch_up()) is not None and caught_up.pushed:
                    return caught_up

        assert (await asyncio.wait_for(thawed(), 120)).pushed == ("frozen",)
        assert await frozen.version() == 1
        assert await frozen.score(CANARY) == pytest.approx(logprobs(make_model(1), CANARY), abs=1e-4)
