"""Pushes in fp8: a server computes with what the weights are in fp8, and loads them again and again.

Our own servers take them as any other push, so the shared one is asked. vLLM computes in fp8 on GPUs alone, and quantizes
activations, too: there log-probs are compared within what that costs, and with a second server, which has loaded the same weights
from a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from slipstream.configs.schema import TransportKind
from slipstream.errors import WeightSyncError
from slipstream.rollout.engines import registry as servers
from slipstream.rollout.engines.quantized_model import quantization_config
from slipstream.tests import tiny
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.replica import VERSIONS, Replica, Weights, make_publisher
from slipstream.tests.conformance.servers import Server, configure
from slipstream.weightsync import fp8
from slipstream.weightsync.plan import PushReport
from slipstream.weightsync.publisher import Publisher

KERNELS = 1.0
"""nats by which a canary's log-prob may differ where activations are in fp8 and bfloat16, in a tiny model of random weights. Those
of another policy differ by several."""
SAME = 0.02
"""nats between two servers of the same weights and kernels."""


@pytest.fixture(scope="module", params=["dense", "moe"])
def policies(
    request: pytest.FixtureRequest, kind: Kind, weights: Weights, tmp_path_factory: pytest.TempPathFactory
) -> Weights:
    """Two policies, and what they are in fp8. Those for servers but vLLM have sizes that are no multiples of a block."""
    kind.needs("fp8")
    moe, wide, root = request.param == "moe", kind.name == "vllm", tmp_path_factory.mktemp("fp8")
    if wide and servers.serves_on_cpu(configure(kind, Path())):
        pytest.skip("vLLM computes in fp8 on GPUs only")
    if moe and not wide:
        pytest.skip("tests/test_rollout_server_model.py has our own server load experts")
    folders, dtype = weights.folders, torch.float32
    if wide:
        folders = tuple(tiny.tiny_qwen3(root / f"m{seed}", seed, moe=moe, wide=True) for seed in range(2))
        dtype = torch.bfloat16
    models = tuple(tiny.load(tiny.rounded_to_fp8(folder, root / f"fp8-{folder.name}", dtype)) for folder in folders)
    return Weights(folders, models)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def quantized_server(
    request: pytest.FixtureRequest, kind: Kind, policies: Weights, start: Callable[..., Server]
) -> Iterator[Server]:
    if kind.name != "vllm":
        yield request.getfixturevalue("server")
        return
    options = {"quantization": "fp8"}
    server = start(kind, policies.folders[0], options=options, dtype="bfloat16", tolerance=KERNELS)
    yield server
    server.close()


@pytest.fixture
async def served(kind: Kind, quantized_server: Server, policies: Weights, tmp_path: Path) -> AsyncIterator[Replica]:
    await quantized_server.wait_ready()
    replica = Replica(kind, quantized_server, policies, tmp_path)
    yield replica
    await replica.close()


def publisher_of(
    replica: Replica, transport: TransportKind = "broadcast", bucket_bytes: int = 64 << 10, *, quantized: bool = True
) -> contextlib.closing[Publisher]:
    """A publisher as a learner's that quantizes, or one that pushes what it is given."""
    publisher = make_publisher(
        replica.engine,
        folder=replica.files,
        partial=replica.partial,
        transport=transport,
        bucket_bytes=bucket_bytes,
        tolerance=replica.tolerance,
        quantized=quantized,
    )
    return contextlib.closing(publisher)


def weights_of(replica: Replica, which: int) -> dict[str, torch.Tensor]:
    """Those of policy `which`, as a learner gathers them."""
    dtype = torch.bfloat16 if replica.kind.name == "vllm" else torch.float32
    return {name: tensor.to(dtype) for name, tensor in tiny.weights(replica.weights.folders[which]).items()}


async def push(replica: Replica, publisher: Publisher, which: int, weights: dict[str, torch.Tensor]) -> PushReport:
    """Push `weights` with the canary of policy `which` in fp8."""
    report = await publisher.publish(next(VERSIONS), weights.items(), *tiny.canary(replica.weights.models[which]))
    assert (report.pushed, report.failed) == (("replica",), {})
    replica.version = await replica.engine.version()
    return report


async def differences(replica: Replica) -> list[float]:
    """Mean difference in nats between the log-probs of the canary by the server and by each policy in fp8."""
    found = []
    for model in replica.weights.models:
        ids, expected = tiny.canary(model)
        scored = torch.tensor(await replica.engine.score(ids))
        found.append(float((scored - torch.tensor(expected)).abs().mean()))
    return found


@pytest.mark.parametrize("transport", ["broadcast", "shared", "delta"])
async def test_pushed_weights_are_computed_with_in_fp8(served: Replica, transport: TransportKind) -> None:
    sent = []
    with publisher_of(served, transport) as publisher:
        for which in (0, 1, 1, 0):
            sent.append((await push(served, publisher, which, weights_of(served, which))).sent_bytes)
            near = await differences(served)
            assert near[which] < near[1 - which] / 5, near
    assert sent[2] < sent[0] / 5 or transport != "delta"
    completion = await served.generate([5, 6, 7])
    assert {span.version for span in completion.version_spans} == {served.version}


def last_first(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(reversed(weights.items()))


def scales_last(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(sorted(weights.items(), key=lambda item: item[0].endswith(fp8.SCALE)))


@pytest.mark.parametrize("bucket_bytes", [16 << 10, 64 << 20])
async def test_weights_and_scales_arrive_in_any_order(served: Replica, bucket_bytes: int) -> None:
    found = []
    with publisher_of(served, bucket_bytes=bucket_bytes, quantized=False) as publisher:
        policies = [dict(fp8.quantized(weights_of(served, which).items())) for which in range(2)]
        for which, weights in ((1, last_first(policies[1])), (0, policies[0]), (1, scales_last(policies[1]))):
            await push(served, publisher, which, weights)
            found.append(await differences(served))
    assert found[0] == pytest.approx(found[2], abs=1e-6)
    assert found[0] != pytest.approx(found[1], abs=1e-6)


async def test_wrong_scales_are_found(served: Replica) -> None:
    with publisher_of(served, quantized=False) as publisher:
        right = dict(fp8.quantized(weights_of(served, 0).items()))
        wrong = {name: -tensor if name.endswith(fp8.SCALE) else tensor for name, tensor in right.items()}
        with pytest.raises(WeightSyncError, match=r"replica does not hold version \d+: .* nats"):
            await push(served, publisher, 0, wrong)
        await push(served, publisher, 0, right)


def write_checkpoint(folder: Path, copy: Path) -> Path:
    """A copy of a model folder as a checkpoint in fp8, at `copy`."""
    shutil.copytree(folder, copy)
    weights = {name: tensor.bfloat16() for name, tensor in tiny.weights(folder).items()}
    save_file(dict(fp8.quantized(weights.items())), copy / "model.safetensors", {"format": "pt"})
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"] = quantization_config(str(folder), 1)
    (copy / "config.json").write_text(json.dumps(config))
    return copy


async def test_what_is_pushed_is_what_the_server_computes_of_a_checkpoint_in_fp8(
    kind: Kind, served: Replica, start: Callable[..., Server], tmp_path: Path
) -> None:
    if kind.name != "vllm":
        pytest.skip("our own server reads no quantized checkpoints")
    checkpoint = write_checkpoint(served.weights.folders[1], tmp_path / "checkpoint")
    with contextlib.closing(start(kind, checkpoint, dtype="bfloat16")) as other:
        await other.wait_ready()
        engine = other.client("loaded")
        ids, _ = tiny.canary(served.weights.models[1])
        loaded = torch.tensor(await engine.score(ids))
        await engine.close()
    with publisher_of(served) as publisher:
        for which in (1, 0, 1):
            await push(served, publisher, which, weights_of(served, which))
    pushed = torch.tensor(await served.engine.score(ids))
    assert float((pushed - loaded).abs().max()) <= SAME
