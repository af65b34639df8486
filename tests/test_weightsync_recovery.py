"""Rolling pushes over two real servers, while they generate, freeze, die and come back.

What a push does to one server of each kind is in tests/conformance; what the publisher does with many, in milliseconds, in
test_weightsync_publisher.py.
"""

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from slipstream.agents.base import Completion
from slipstream.rollout.engines.base import SamplingParams
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.tests import tiny
from slipstream.weightsync.plan import GroupPlan, PushReport, TransferPlan
from slipstream.weightsync.publisher import Publisher
from transformers import PreTrainedModel

START_S = 180.0
VERSION = itertools.count(1)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPT = [(3 * j) % 440 + 4 for j in range(20)]


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

    def signal_all(self, number: signal.Signals) -> None:
        root = psutil.Process(self.process.pid)
        for process in [root, *root.children(recursive=True)]:
            process.send_signal(number)

    def close(self) -> None:
        self._stack.close()


class DiesReceiving(VllmEngine):
    """The client of a server that is killed once it has begun to receive, before the publisher can know it."""

    victim: Server

    async def receive_weights(self, plan: TransferPlan) -> None:
        await super().receive_weights(plan)
        self.victim.process.kill()


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


@contextlib.contextmanager
def publishing(folder: Path, *replicas: VllmEngine, push_s: float = 60.0, cohort: int = 0) -> Iterator[Publisher]:
    publisher = Publisher(
        replicas,
        transport="broadcast",
        folder=folder,
        spool=folder,
        host="127.0.0.1",
        backend="gloo",
        device=torch.device("cpu"),
        bucket_bytes=64 << 10,
        push_s=push_s,
        canary_tolerance=1e-4,
        cohort=cohort,
    )
    try:
        yield publisher
    finally:
        publisher.close()


async def push(publisher: Publisher, folder: Path, model: PreTrainedModel) -> PushReport:
    return await publisher.publish(next(VERSION), tiny.weights(folder).items(), *tiny.canary(model))


async def serves(engine: VllmEngine, model: PreTrainedModel, version: int) -> bool:
    """Whether it samples what `model` would, and labels it `version`."""
    completion = await engine.generate(PROMPT, GREEDY, version=version)
    rows = tiny.logprobs(model, [*PROMPT, *completion.token_ids])[len(PROMPT) - 1 :]
    return list(completion.token_ids) == rows.argmax(-1).tolist() and completion.version_spans[0].version == version


async def catches_up(publisher: Publisher) -> PushReport:
    while True:
        await asyncio.sleep(publisher.retry_in() or 0)
        if (report := await publisher.catch_up()) is not None and report.pushed:
            return report


async def test_requests_run_through_a_rolling_push(
    engines: list[VllmEngine], folders: list[Path], models: list[PreTrainedModel], tmp_path: Path
) -> None:
    with publishing(tmp_path, *engines) as publisher:
        old = (await push(publisher, folders[0], models[0])).version
        long = SamplingParams(max_tokens=1000)
        running = [asyncio.create_task(e.generate(PROMPT, long, version=old)) for e in engines]
        await asyncio.gather(*(e.generate(PROMPT, GREEDY, version=old) for e in engines))
        report = await push(publisher, folders[1], models[1])
        assert (report.pushed, report.failed) == (("a", "b"), {})
        completions: list[Completion] = await asyncio.wait_for(asyncio.gather(*running), 60)
        for completion in completions:
            assert [span.version for span in completion.version_spans] == [old, report.version]
            assert len(completion.token_ids) == 1000
        for engine in engines:
            assert await serves(engine, models[1], report.version)


async def test_a_server_that_freezes_holds_back_nobody_and_catches_up(
    engines: list[VllmEngine], servers: list[Server], folders: list[Path], models: list[PreTrainedModel], tmp_path: Path
) -> None:
    freezing = client(servers[1], "b", FreezesJoining)
    freezing.victim = servers[1]  # type: ignore[attr-defined]
    with publishing(tmp_path, engines[0], freezing, push_s=16.0, cohort=2) as publisher:
        began = time.monotonic()
        try:
            report = await push(publisher, folders[0], models[0])
        finally:
            servers[1].signal_all(signal.SIGCONT)
        assert time.monotonic() - began < 16.0 + 10.0
        assert report.pushed == ("a",)
        assert "waited" in report.failed["b"]
        assert await serves(engines[0], models[0], report.version)

        publisher.update(engines)
        caught_up = await asyncio.wait_for(catches_up(publisher), 60)  # it still sits in groups that never met
        assert caught_up.pushed == ("b",)
        assert await serves(engines[1], models[0], report.version)
    await freezing.close()


async def test_a_server_killed_while_it_receives_is_succeeded_by_one_that_catches_up(
    engines: list[VllmEngine], servers: list[Server], folders: list[Path], models: list[PreTrainedModel], tmp_path: Path
) -> None:
    dying = client(servers[1], "b", DiesReceiving)
    dying.victim = servers[1]  # type: ignore[attr-defined]
    with publishing(tmp_path, engines[0], dying, push_s=40.0, cohort=2) as publisher:
        report = await push(publisher, folders[1], models[1])
        assert report.pushed == ("a",)
        assert "not reachable" in report.failed["b"]
        assert await serves(engines[0], models[1], report.version)
        caught_up = await publisher.catch_up()
        assert caught_up is not None
        assert "not reachable" in caught_up.failed["b"]

        servers[1].start()
        await engines[1].wait_ready(START_S)
        publisher.update(engines)
        caught_up = await catches_up(publisher)
        assert (caught_up.version, caught_up.pushed) == (report.version, ("b",))
        assert await serves(engines[1], models[1], report.version)
        assert (await push(publisher, folders[0], models[0])).pushed == ("a", "b")
    await dying.close()
