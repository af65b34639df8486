"""Weight pushes: every transport moves the same weights, wrong ones are found, and after a learner's death the old ones serve."""

import asyncio
import contextlib
import signal
import sys
import threading
from asyncio.subprocess import PIPE
from pathlib import Path

import msgspec
import pytest
import torch
from slipstream.common import accelerator
from slipstream.configs.schema import TransportKind
from slipstream.errors import WeightSyncError
from slipstream.rollout.engines import registry as servers
from slipstream.tests import tiny
from slipstream.tests.conformance import reference
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.replica import GREEDY, PROMPTS, VERSIONS, Replica, Traffic, Weights, make_publisher
from slipstream.weightsync.broadcast import BroadcastGroup

DYING_LEARNER = """
import asyncio, itertools, msgspec, os, signal, sys
from pathlib import Path
from slipstream.rollout.engines.access import ServerAccess
from slipstream.tests import tiny
from slipstream.tests.conformance.replica import make_publisher
from slipstream.tests.conformance.servers import make_client
from slipstream.weightsync.broadcast import BroadcastGroup

async def main(kind, url, version, folder, files, when, access):
    engine = make_client(kind, "replica", url, access=msgspec.json.decode(access, type=ServerAccess))
    sends, sent = BroadcastGroup.broadcast, itertools.count(1)

    def broadcast(self, data):
        if when == "while sending" and next(sent) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return sends(self, data)

    async def swap_weights(version):
        os.kill(os.getpid(), signal.SIGKILL)

    BroadcastGroup.broadcast = broadcast
    engine.swap_weights = swap_weights
    publisher = make_publisher(engine, folder=Path(files), bucket_bytes=16 << 10)
    weights, canary = tiny.weights(Path(folder)), tiny.canary(tiny.load(Path(folder)))
    print("ready", flush=True)
    sys.stdin.readline()
    await publisher.publish(int(version), weights.items(), *canary)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("transport", ["broadcast", "shared", "disk", "delta"])
async def test_every_transport_updates_the_weights(kind: Kind, replica: Replica, transport: TransportKind) -> None:
    kind.needs(transport)
    await replica.close()  # the fixture's own pushes were broadcasts
    for which in (1, 0, 1):
        version = await replica.push(which, transport)
        assert await replica.engine.version() == version
        assert await replica.serves(which)


@pytest.mark.skipif(accelerator.current() is None, reason="torch sees no GPU")
async def test_collectives_between_gpus_update_the_weights(
    replica: Replica, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if servers.serves_on_cpu(replica.server.config):
        pytest.skip(f"{replica.kind.name} computes on the CPU")
    for name, value in tiny.one_gpu("learner").items():
        monkeypatch.setenv(name, value)
    kind = accelerator.current()
    assert kind is not None
    device = accelerator.device_of_rank(0)
    with contextlib.closing(
        make_publisher(replica.engine, folder=tmp_path, backend=kind.collectives, tolerance=replica.tolerance)
    ) as publisher:
        for which in (1, 0, 1):
            weights = {name: tensor.to(device) for name, tensor in tiny.weights(replica.weights.folders[which]).items()}
            canary = tiny.canary(replica.weights.models[which])
            report = await publisher.publish(next(VERSIONS), weights.items(), *canary)
            assert (report.pushed, report.failed) == (("replica",), {})
            assert report.canary <= replica.tolerance
            replica.version = report.version
            assert await replica.serves(which)


@pytest.mark.parametrize("transport", ["broadcast", "delta"])
async def test_adapters_only_update_to_the_merged_weights(
    kind: Kind, replica: Replica, transport: TransportKind, tmp_path: Path
) -> None:
    kind.needs(transport)
    folder, generator = replica.weights.folders[0], torch.Generator().manual_seed(1)
    base, adapters = tiny.weights(folder), {}
    merged = tiny.load(folder)
    for name, weight in base.items():
        if "_proj." in name:
            stem, (out, into) = name.removesuffix(".weight"), weight.shape
            down = adapters[f"{stem}.lora_A.weight"] = torch.randn(4, into, generator=generator) / 8
            up = adapters[f"{stem}.lora_B.weight"] = torch.randn(out, 4, generator=generator) / 8
            merged.get_parameter(name).data += up @ down
    await replica.close()
    weights = Weights(replica.weights.folders, (replica.weights.models[0], merged))
    adapted = Replica(kind, replica.server, weights, tmp_path)
    for _ in range(2):  # the second adds to the base, not to the first
        report = await adapted.publish(adapters.items(), 1, transport)
        assert report.pushed == ("replica",)
        assert report.canary <= adapted.tolerance
    assert await adapted.serves(1)
    assert report.sent_bytes < sum(tensor.nbytes for tensor in base.values()) / 3
    await adapted.close()


async def test_a_delta_holds_what_changed_and_nothing_else(kind: Kind, replica: Replica) -> None:
    kind.needs("delta")
    await replica.close()
    weights = tiny.weights(replica.weights.folders[0])
    full = await replica.publish(weights.items(), 0, "delta")
    again = await replica.publish(weights.items(), 0, "delta")
    assert again.pushed == ("replica",)
    assert again.sent_bytes < full.sent_bytes / 20
    assert await replica.serves(0)


@pytest.mark.parametrize("bucket_bytes", [16 << 10, 300 << 10, 64 << 20])
async def test_weights_travel_in_buckets_of_any_size(replica: Replica, tmp_path: Path, bucket_bytes: int) -> None:
    """Of a whole model in one to a tensor in many."""
    publisher = make_publisher(replica.engine, folder=tmp_path, bucket_bytes=bucket_bytes, tolerance=replica.tolerance)
    weights, model = tiny.weights(replica.weights.folders[1]), replica.weights.models[1]
    report = await publisher.publish(next(VERSIONS), weights.items(), *tiny.canary(model))
    publisher.close()
    assert (report.pushed, report.failed) == (("replica",), {})
    replica.version = report.version
    assert await replica.serves(1)


async def test_a_push_reports_what_it_did(replica: Replica) -> None:
    weights = tiny.weights(replica.weights.folders[1])
    report = await replica.publish(weights.items(), 1)
    assert report.pushed == ("replica",)
    assert report.sent_bytes == sum(t.nbytes for t in weights.values())
    assert 0 < report.transfer_ms < report.push_ms
    assert 0 < report.pause_ms < report.push_ms


async def test_generation_goes_on_while_weights_travel(
    kind: Kind, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind.needs("staging")
    old, arrived, go_on = replica.version, asyncio.Event(), threading.Event()
    loop, sends = asyncio.get_running_loop(), BroadcastGroup.broadcast

    def slowly(self: BroadcastGroup, data: torch.Tensor) -> None:
        loop.call_soon_threadsafe(arrived.set)
        assert go_on.wait(50)
        sends(self, data)

    monkeypatch.setattr(BroadcastGroup, "broadcast", slowly)
    push = asyncio.create_task(replica.push(1))
    try:
        await asyncio.wait_for(arrived.wait(), 50)
        completions = await asyncio.wait_for(replica.generate_all(PROMPTS), 40)
        assert not push.done()
    finally:
        go_on.set()
        new = await push
    assert {span.version for completion in completions for span in completion.version_spans} == {old}
    assert new != old
    assert await replica.serves(1)


@pytest.mark.parametrize("when", ["while sending", "before the swap"])
async def test_a_learner_that_dies_leaves_the_old_version_serving(replica: Replica, tmp_path: Path, when: str) -> None:
    old = replica.version
    command = [sys.executable, "-c", DYING_LEARNER, replica.kind.name, replica.server.url, str(next(VERSIONS))]
    learner = await asyncio.create_subprocess_exec(
        *command,
        *(str(replica.weights.folders[1]), str(tmp_path), when),
        msgspec.json.encode(replica.server.access).decode(),
        stdin=PIPE,
        stdout=PIPE,
    )
    assert learner.stdin is not None
    assert learner.stdout is not None
    assert await asyncio.wait_for(learner.stdout.readline(), 60) == b"ready\n"
    async with Traffic(replica) as traffic:
        learner.stdin.write(b"go\n")
        assert await asyncio.wait_for(learner.wait(), 60) == -signal.SIGKILL
        assert await replica.engine.version() == old
        await replica.engine.resume()  # it died while the server was paused
    assert {span.version for _, completion in traffic.finished for span in completion.version_spans} == {old}
    assert await replica.serves(0)
    await replica.push(1)
    assert await replica.serves(1)


async def test_the_canary_finds_one_wrong_tensor(replica: Replica) -> None:
    weights = tiny.weights(replica.weights.folders[0])
    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(WeightSyncError, match=r"replica does not hold version \d+: .* nats"):
        await replica.publish((weights | {name: -weights[name]}).items(), 0)
    await replica.push(0)
    assert await replica.serves(0)


async def test_a_bit_that_flips_on_the_way_is_found_before_the_swap(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, sends = replica.version, BroadcastGroup.broadcast

    def flipped(self: BroadcastGroup, data: torch.Tensor) -> None:
        data = data.clone()
        data.view(torch.uint8)[-1] ^= 1
        sends(self, data)

    monkeypatch.setattr(BroadcastGroup, "broadcast", flipped)
    report = await replica.publish(tiny.weights(replica.weights.folders[1]).items(), 1)
    monkeypatch.undo()
    assert report.pushed == ()
    assert "checksum" in report.failed["replica"]
    assert replica.version == old
    assert await replica.serves(0)
    await replica.push(1)
    assert await replica.serves(1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("unknown", "model.layers.9.mlp.down_proj.weight"),
        ("missing", "model.norm.weight"),
        ("shape", "model.norm.weight"),
    ],
    ids=["unknown", "missing", "shape"],
)
async def test_weights_that_do_not_fit_leave_the_old_ones_serving(replica: Replica, change: str, says: str) -> None:
    old = replica.version
    weights = tiny.weights(replica.weights.folders[1])
    if change == "unknown":
        weights["model.layers.9.mlp.down_proj.weight"] = torch.zeros(4)
    elif change == "missing":
        del weights["model.norm.weight"]
    else:
        weights["model.norm.weight"] = torch.zeros(65)
    report = await replica.publish(weights.items(), 1)
    assert report.pushed == ()
    assert says in report.failed["replica"]
    assert replica.version == old
    assert await replica.serves(0)
    await replica.push(1)
    completion = await replica.generate(PROMPTS[0], GREEDY)
    rows = reference.rows(replica.weights.models[1], PROMPTS[0], completion)
    assert reference.error(rows, completion.token_ids, completion.logprobs) <= replica.tolerance
