"""Deltas give back the same bits, whatever changed; and the files they and whole snapshots travel in."""

import asyncio
import itertools
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file, save_file
from slipstream.common import owned_folders
from slipstream.common.owned_folders import WEIGHTS, OwnedFolder
from slipstream.errors import DeadlineExceeded, WeightSyncError
from slipstream.tests.replicas import CPU, LocalReplica
from slipstream.tests.tiers import examples
from slipstream.weightsync import delta, transports
from slipstream.weightsync.plan import AckCollector, BroadcastSource
from slipstream.weightsync.replica import PushResult, PushTarget
from slipstream.weightsync.snapshot import WeightSnapshot, as_bytes, checksum
from slipstream.weightsync.staging import WeightStaging
from slipstream.weightsync.transports import (
    FileTransport,
    Manifest,
    WeightFolder,
    read_manifest,
)

BITS = {torch.float32: np.int32, torch.bfloat16: np.int16, torch.float64: np.int64, torch.uint8: np.int8}
SPECIAL = {
    torch.float32: [0x7FC00001, 0x7F800001, -0x80000000, 0, -1],  # NaNs with payloads, -0.0, 0.0, a negative NaN
    torch.bfloat16: [0x7FC1, 0x7F81, -0x8000, 0, -1],
    torch.float64: [0x7FF8000000000001, -0x8000000000000000, 0, -1],
    torch.uint8: [0, -1],
}


@st.composite
def pair(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors alike in dtype and shape, of arbitrary bits, that differ in some elements."""
    dtype = draw(st.sampled_from(list(BITS)))
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    anything = st.integers(np.iinfo(BITS[dtype]).min, np.iinfo(BITS[dtype]).max) | st.sampled_from(SPECIAL[dtype])
    before = draw(hnp.arrays(BITS[dtype], shape, elements=anything))
    after = before.copy()
    if after.size:
        for at in draw(st.lists(st.integers(0, after.size - 1), max_size=8)):
            after.reshape(-1)[at] = draw(anything)
        if draw(st.booleans()):
            after = draw(hnp.arrays(BITS[dtype], shape, elements=anything))

    def tensor(bits: np.ndarray) -> torch.Tensor:
        return torch.tensor(bits.reshape(-1).copy()).view(dtype).reshape(shape)

    return tensor(before), tensor(after)


@given(pairs=st.lists(pair(), max_size=5))
@settings(deadline=None, max_examples=examples(300))
def test_base_and_delta_are_the_new_version_bit_for_bit(
    pairs: list[tuple[torch.Tensor, torch.Tensor]], tmp_path_factory
) -> None:
    names = tuple(f"t{i}" for i in range(len(pairs)))
    base, new = [b for b, _ in pairs], [n for _, n in pairs]
    kept = [b.clone() for b in base]
    path = tmp_path_factory.getbasetemp() / "delta.safetensors"
    save_file(delta.differences(names, base, new), path)
    plan = WeightSnapshot(2, names, tuple(new), checksum(new)).plan(
        BroadcastSource(), bucket_bytes=1, keep=True, acks="", receiver="a"
    )
    got = list(delta.apply(path, plan, dict(zip(names, base, strict=True))))
    assert [name for name, _ in got] == list(names)
    for (_, tensor), wanted in zip(got, new, strict=True):
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(as_bytes(tensor), as_bytes(wanted))
    assert checksum(t for _, t in got) == plan.checksum
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(base, kept, strict=True))  # not written to


def test_only_what_changed_is_written() -> None:
    base = [torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(10), torch.ones(10)]
    new = [b.clone() for b in base]
    new[0][500] = 3
    new[0][7] = -0.0
    new[1] += 1
    parts = delta.differences(["a", "b", "c"], base, new)
    assert {k: v.tolist() for k, v in parts.items() if not k.startswith("b")} == {
        "a:indices": [7, 500],
        "a:values": new[0][[7, 500]].view(torch.int16).tolist(),
    }
    assert set(parts) == {"a:indices", "a:values", "b:whole"}
    assert parts["a:indices"].dtype == torch.int32


def test_the_checksum_sees_every_bit_and_the_order_but_not_the_cut() -> None:
    tensors = [torch.arange(6.0), torch.zeros(2, 0), torch.tensor(3.0)]
    first = checksum(tensors)
    assert checksum([torch.cat([tensors[0], tensors[2].view(1)])]) == first
    assert checksum(reversed(tensors)) != first
    assert checksum([tensors[0].double(), *tensors[1:]]) != first
    tensors[0][0] = -0.0
    assert checksum(tensors) != first


def test_a_folder_keeps_the_last_versions_and_says_which_is_latest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    folder = WeightFolder(tmp_path / "weights", keep=2)
    for version in (1, 2, 3):
        path = folder.write(version, "full", ["a"], [torch.full((2,), float(version))])
        folder.publish(Manifest(version, "c", ("a",), full=path.name))
    folder.write(3, "delta", [], [])
    folder.publish(Manifest(3, "c", ("a",), delta="v3.delta.safetensors", base=2))
    assert read_manifest(folder.path) == Manifest(
        3, "c", ("a",), full="v3.full.safetensors", delta="v3.delta.safetensors", base=2
    )
    assert sorted(p.name for p in folder.path.iterdir()) == [
        "latest.json",
        "v2.full.safetensors",
        "v3.delta.safetensors",
        "v3.full.safetensors",
    ]
    resumed = WeightFolder(tmp_path / "weights", keep=2)
    resumed.write(4, "full", ["a"], [torch.zeros(2)])
    assert sorted(p.name[:2] for p in folder.path.glob("v*")) == ["v3", "v3", "v4"]
    assert load_file(folder.path / "v3.full.safetensors")["a"].tolist() == [3, 3]


@pytest.mark.skipif(
    not Path("/dev/full").exists() or os.geteuid() != 0, reason="needs a read-only folder that binds us"
)
def test_a_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(WeightSyncError, match="cannot make /proc/weights"):
        WeightFolder(Path("/proc/weights"), keep=1)


def test_a_write_that_fails_leaves_nothing_and_is_named(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path, keep=1)
    code = (
        "import resource, signal, sys, torch; from pathlib import Path\n"
        "from slipstream.errors import DeadlineExceeded, WeightSyncError\n"
        "from slipstream.weightsync.transports import WeightFolder\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"  # the disk is full
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "try: WeightFolder(Path(sys.argv[1]), 1).write(1, 'full', ['a'], [torch.zeros(1 << 20)])\n"
        "except WeightSyncError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"cannot write version 1 to {folder.path}/v1.full.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_is_removed_at_the_end_and_after_a_death(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from slipstream.common.owned_folders import WEIGHTS, OwnedFolder\n"
        "folder = OwnedFolder(Path(sys.argv[1]), WEIGHTS); (folder.path / 'w').write_bytes(b'x'); print(folder.path, flush=True)\n"
        "sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    theirs = Path(other.stdout.readline().strip())
    ours = OwnedFolder(tmp_path, WEIGHTS)
    assert ours.path != theirs
    assert (theirs / "w").exists()  # its owner lives
    other.communicate("", 30)
    second = OwnedFolder(tmp_path, WEIGHTS)
    assert not theirs.exists()
    assert ours.path.exists()
    ours.close()
    second.close()
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_write_that_is_given_up_does_not_disturb_the_ones_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first write of version 1 is stuck until version 2 is there."""
    go_on, calls, save = threading.Event(), itertools.count(), transports.write_safetensors
    ended, write_full = threading.Event(), FileTransport._write_full

    def stuck(*arguments: Any) -> None:
        if next(calls) == 0:
            assert go_on.wait(120)
        save(*arguments)

    def write(self: FileTransport, snapshot: WeightSnapshot) -> Path:
        try:
            return write_full(self, snapshot)
        finally:
            if snapshot.tensors[0][0] == 0.0:
                ended.set()

    replica = LocalReplica("a")
    replica.stagings = [WeightStaging(0, CPU, lambda plan: None)]
    target, acks = PushTarget(replica), AckCollector("127.0.0.1")
    monkeypatch.setattr(transports, "write_safetensors", stuck)
    monkeypatch.setattr(FileTransport, "_write_full", write)
    transport = FileTransport(WeightFolder(tmp_path, keep=1), acks)

    async def transfer(version: int, value: float, seconds: float) -> Path:
        snapshot = WeightSnapshot(version, ("a",), (torch.full((3,), value),), checksum([torch.full((3,), value)]))
        result = await transport.transfer(snapshot, [target], seconds, retry=False)
        assert result.failed == {}
        assert replica.stagings[0].take(version)[0][1].tolist() == [value] * 3
        return tmp_path / f"v{version}.full.safetensors"

    with pytest.raises(DeadlineExceeded, match="is the disk stuck"):
        await transfer(1, 0.0, 0.2)
    assert load_file(await transfer(1, 1.0, 60.0))["a"].tolist() == [1, 1, 1]
    path = await transfer(2, 2.0, 60.0)
    go_on.set()
    assert await asyncio.to_thread(ended.wait, 60)
    assert load_file(path)["a"].tolist() == [2, 2, 2]
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert (manifest.version, manifest.full) == (2, path.name)
    assert names(tmp_path) == ["latest.json", path.name]
    acks.close()
    replica.close()


async def test_a_transfer_never_announces_the_file_of_another_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 is transferred while version 1 is being written."""
    writing, go_on, write_full = threading.Event(), threading.Event(), FileTransport._write_full

    def write(self: FileTransport, snapshot: WeightSnapshot) -> Path:
        if snapshot.version == 1:
            writing.set()
            assert go_on.wait(120)
        return write_full(self, snapshot)

    replica = LocalReplica("a")
    replica.stagings = [WeightStaging(0, CPU, lambda plan: None)]
    target, acks = PushTarget(replica), AckCollector("127.0.0.1")
    monkeypatch.setattr(FileTransport, "_write_full", write)
    transport = FileTransport(WeightFolder(tmp_path, keep=2), acks)
    one, two = (
        WeightSnapshot(
            version, ("a",), (torch.full((3,), float(version)),), checksum([torch.full((3,), float(version))])
        )
        for version in (1, 2)
    )
    first = asyncio.create_task(transport.transfer(one, [], 60.0, retry=False))
    assert (await first).failed == {}  # without a target nothing is written
    first = asyncio.create_task(
        transport._file(one, "full", lambda: write(transport, one), time.perf_counter() + 60, PushResult())
    )
    assert await asyncio.to_thread(writing.wait, 60)
    second = asyncio.create_task(transport.transfer(two, [target], 60.0, retry=False))
    await asyncio.sleep(0)
    go_on.set()
    assert await first == tmp_path / "v1.full.safetensors"
    assert (await second).failed == {}
    assert replica.stagings[0].take(2)[0][1].tolist() == [2, 2, 2]
    with pytest.raises(WeightSyncError, match="version 1 is no longer the newest"):
        await transport._file(one, "full", lambda: write(transport, one), time.perf_counter() + 60, PushResult())
    acks.close()
    replica.close()


def test_what_is_latest_never_goes_back(tmp_path: Path) -> None:
    folder = WeightFolder(tmp_path, keep=2)
    paths = [folder.write(version, "full", ["a"], [torch.zeros(1)]) for version in (1, 2)]
    for version in (2, 1):
        folder.publish(Manifest(version, "c", ("a",), full=paths[version - 1].name))
    assert read_manifest(tmp_path) == Manifest(2, "c", ("a",), full="v2.full.safetensors")


def test_two_writers_of_one_version_do_not_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts: list[Path] = []
    save = transports.write_safetensors

    def note(path: Path, *arguments: Any) -> None:
        parts.append(path)
        save(path, *arguments)

    monkeypatch.setattr(transports, "write_safetensors", note)
    folder = WeightFolder(tmp_path, keep=1)
    assert folder.write(1, "full", ["a"], [torch.zeros(1)]) == folder.write(1, "full", ["a"], [torch.zeros(1)])
    assert len(set(parts)) == 2


def test_a_new_folder_is_never_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process sweeps just before the folder is locked."""
    lock = owned_folders._try_lock

    def swept_before(folder: Path) -> int | None:
        monkeypatch.undo()
        owned_folders.sweep(tmp_path, WEIGHTS)
        return lock(folder)

    monkeypatch.setattr(owned_folders, "_try_lock", swept_before)
    folder = OwnedFolder(tmp_path, WEIGHTS)
    owned_folders.sweep(tmp_path, WEIGHTS)
    assert list(tmp_path.iterdir()) == [folder.path]
    folder.close()
    assert list(tmp_path.iterdir()) == []
