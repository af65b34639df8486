"""Pushes while things die: two real servers, a learner that is killed in the middle, servers that freeze, die and come back."""

import asyncio
import contextlib
import itertools
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from slipstream.errors import EngineError
from slipstream.rollout.engine import Sampling
from slipstream.rollout.vllm import VllmEngine
from slipstream.tests import tiny
from slipstream.weightsync.plan import GroupPlan, PushReport, TransferPlan
from slipstream.weightsync.publisher import Publisher
from transformers import PreTrainedModel

START_S = 180.0
VERSION = itertools.count(1)
GREEDY = Sampling(max_tokens=8, temperature=0.0)
PROMPT = [(3 * j) % 440 + 4 for j in range(20)]

DYING_LEARNER = """
import asyncio, os, signal, sys, torch
from pathlib import Path
from slipstream.rollout.vllm import VllmEngine
from slipstream.tests import tiny
from slipstream.weightsync.buckets import pack
from slipstream.weightsync.delivery import Rendezvous, meet
from slipstream.weightsync.plan import TransferPlan

async def main(url, folder, when):
    engine = VllmEngine("a", url, vocab_size=tiny.VOCABULARY, max_model_len=tiny.CONTEXT)
    weights = tiny.weights(Path(folder))
    shapes = tuple(tuple(t.shape) for t in weights.values())
    plan = TransferPlan(99, tuple(weights), ("float32",) * len(weights), shapes, 64 << 10)
    group = await meet([engine], Rendezvous("127.0.0.1", "gloo", torch.device("cpu"), 1), "dying", 20.0)
    await engine.pause()
    receiving = asyncio.create_task(engine.receive_weights(plan))
    for count, data in enumerate(pack(list(weights.values()), plan.bucket_bytes)):
        if when == "in the middle" and count == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.to_thread(group.broadcast, data)
    await receiving
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(*sys.argv[1:]))
"""


class Server:
    """One server that can be killed and started again on the same port."""

    def __init__(self, folder: Path, log: Path) -> None:
        self.port = tiny.free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder, self._log = folder, log
        self._stack = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        self.process = self._stack.enter_context(tiny.vllm(self._folder, self.port, self._log))

    def family(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def signal_all(self, number: signal.Signals) -> None:
        for process in self.family():
            process.send_signal(number)

    def close(self) -> None:
        self._stack.close()


class DiesReceiving(VllmEngine):
    """The client of a server that is killed as soon as the broadcast begins, when nobody can know it yet."""

    victim: Server

    async def receive_weights(self, plan: TransferPlan) -> None:
        self.victim.process.kill()
        await super().receive_weights(plan)


class FreezesJoining(VllmEngine):
    """The client of a server that freezes as soon as it is to join a group."""

    victim: Server

    async def join_group(self, plan: GroupPlan) -> None:
        self.victim.signal_all(signal.SIGSTOP)
        await super().join_group(plan)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [tiny.tiny_qwen3(root / f"m{seed}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[PreTrainedModel]:
    return [tiny.load(folder) for folder in folders]


@pytest.fixture(scope="module")
def servers(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    logs = tmp_path_factory.mktemp("log")
    servers = [Server(folders[0], logs / f"{name}.log") for name in "ab"]
    yield servers
    for server in servers:
        server.close()


def client(server: Server, name: str, kind: type[VllmEngine] = VllmEngine) -> VllmEngine:
    return kind(name, server.url, vocab_size=tiny.VOCABULARY, max_model_len=tiny.CONTEXT, request_s=60, push_s=60)


@pytest.fixture
async def engines(servers: list[Server]) -> AsyncIterator[list[VllmEngine]]:
    engines = [client(server, name) for server, name in zip(servers, "ab", strict=True)]
    await asyncio.gather(*(engine.wait_ready(START_S) for engine in engines))
    yield engines
    for engine in engines:
        await engine.close()


def make_publisher(*replicas: VllmEngine, push_s: float = 60.0) -> Publisher:
    return Publisher(
        replicas,
        host="127.0.0.1",
        backend="gloo",
        device=torch.device("cpu"),
        bucket_bytes=64 << 10,
        push_s=push_s,
        canary_tolerance=1e-4,
        dtype="float32",
    )


async def push(publisher: Publisher, folder: Path, model: PreTrainedModel) -> PushReport:
    return await publisher.publish(next(VERSION), tiny.weights(folder).items(), *tiny.canary(model))


async def serves(engine: VllmEngine, model: PreTrainedModel, version: int) -> bool:
    """Whether it samples what `model` would, and labels it `version`."""
    completion = await engine.generate(PROMPT, GREEDY)
    rows = tiny.logprobs(model, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
    return list(completion.token_ids) == rows.argmax(-1).tolist() and completion.version_spans[0].version == version


async def until_somebody_catches_up(publisher: Publisher) -> PushReport:
    while (report := await publisher.catch_up()) is None:
        pass  # it waits by itself for an answer
    return report


async def test_replicas_share_one_group(
    engines: list[VllmEngine], folders: list[Path], models: list[PreTrainedModel]
) -> None:
    publisher = make_publisher(*engines)
    assert await publisher.catch_up() is None  # nothing to bring yet
    report = await push(publisher, folders[1], models[1])
    assert report.pushed == ("a", "b")
    assert await publisher.catch_up() is None  # nobody is behind
    for engine in engines:
        assert await serves(engine, models[1], report.version)
    publisher.close()


@pytest.mark.parametrize("when", ["in the middle", "before the swap"])
async def test_a_learner_that_dies_leaves_the_old_version_serving(
    engines: list[VllmEngine], folders: list[Path], models: list[PreTrainedModel], when: str
) -> None:
    publisher = make_publisher(*engines)
    old = (await push(publisher, folders[0], models[0])).version
    publisher.close()
    command = [sys.executable, "-c", DYING_LEARNER, engines[0].url, str(folders[1]), when]
    learner = await asyncio.create_subprocess_exec(*command)
    assert await asyncio.wait_for(learner.wait(), 60) == -signal.SIGKILL

    assert await engines[0].version() == old
    await engines[0].resume()
    assert await serves(engines[0], models[0], old)

    restarted = make_publisher(*engines)
    report = await push(restarted, folders[1], models[1])
    assert report.pushed == ("a", "b")
    assert await serves(engines[0], models[1], report.version)
    restarted.close()


async def test_a_replica_that_freezes_holds_back_nobody_and_catches_up(
    engines: list[VllmEngine], servers: list[Server], folders: list[Path], models: list[PreTrainedModel]
) -> None:
    freezing = client(servers[1], "b", FreezesJoining)
    freezing.victim = servers[1]  # type: ignore[attr-defined]
    publisher = make_publisher(engines[0], freezing, push_s=10.0)
    began = time.monotonic()
    try:
        report = await push(publisher, folders[0], models[0])
    finally:
        servers[1].signal_all(signal.SIGCONT)
    assert time.monotonic() - began < 11.0
    assert report.pushed == ("a",)
    assert "waited" in report.failed["b"]
    assert await serves(engines[0], models[0], report.version)
    publisher.close()

    # Frozen from the start, it is not even waited for long.
    publisher = make_publisher(*engines, push_s=10.0)
    servers[1].signal_all(signal.SIGSTOP)
    try:
        report = await push(publisher, folders[1], models[1])
    finally:
        servers[1].signal_all(signal.SIGCONT)
    assert report.pushed == ("a",)
    caught_up = await asyncio.wait_for(
        until_somebody_catches_up(publisher), 60
    )  # it still sits in groups that never met
    assert caught_up.pushed == ("b",)
    assert await serves(engines[1], models[1], report.version)
    publisher.close()
    await freezing.close()


async def test_a_killed_server_leaves_nothing_behind_and_its_successor_catches_up(
    engines: list[VllmEngine], servers: list[Server], folders: list[Path], models: list[PreTrainedModel]
) -> None:
    dying = client(servers[1], "b", DiesReceiving)
    dying.victim = servers[1]  # type: ignore[attr-defined]
    family = servers[1].family()
    assert len(family) > 1
    running = asyncio.create_task(engines[1].generate(PROMPT, Sampling(max_tokens=900)))
    await engines[1].generate(PROMPT, Sampling(max_tokens=1))

    publisher = make_publisher(engines[0], dying, push_s=20.0)
    report = await push(publisher, folders[0], models[0])
    assert report.pushed == ("a",)
    assert "not reachable" in report.failed["b"]
    assert await serves(engines[0], models[0], report.version)

    with pytest.raises(EngineError, match=r"b at .* is not reachable"):
        await asyncio.wait_for(running, 5)
    with pytest.raises(EngineError, match=r"b at .* is not reachable"):
        await asyncio.wait_for(engines[1].generate(PROMPT, GREEDY), 5)
    servers[1].process.wait(10)
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10)
    assert alive == []
    publisher.close()

    publisher = make_publisher(*engines, push_s=20.0)
    report = await push(publisher, folders[1], models[1])
    assert (report.pushed, set(report.failed)) == (("a",), {"b"})
    assert await publisher.catch_up() is None  # it does not answer yet
    servers[1].start()
    await engines[1].wait_ready(START_S)
    assert await engines[1].version() is None
    caught_up = await publisher.catch_up()
    assert caught_up is not None
    assert (caught_up.version, caught_up.pushed) == (report.version, ("b",))
    assert await serves(engines[1], models[1], report.version)
    assert (await push(publisher, folders[0], models[0])).pushed == ("a", "b")
    publisher.close()
    await dying.close()


async def test_with_everybody_gone_the_caller_decides(folders: list[Path], models: list[PreTrainedModel]) -> None:
    nobody = VllmEngine(
        "nobody", f"http://127.0.0.1:{tiny.free_port()}", vocab_size=tiny.VOCABULARY, max_model_len=tiny.CONTEXT
    )
    publisher = make_publisher(nobody, push_s=5.0)
    report = await push(publisher, folders[0], models[0])
    assert report.pushed == ()
    assert "not reachable" in report.failed["nobody"]
    await nobody.close()
