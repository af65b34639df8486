"""The fake server's scripted faults: each happens where, when and as the script says, once, and is told by the right error."""

import asyncio
import contextlib
import math
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from slipstream.errors import ConfigError, DeadlineExceeded, EngineError, WeightSyncError
from slipstream.rollout.engines import http_client
from slipstream.rollout.engines.base import EngineFailure, FalseReply, SamplingParams, VersionClock
from slipstream.rollout.engines.fake.faults import (
    NO_FAULTS,
    VARIABLE,
    Fault,
    FaultInjector,
    Lie,
    read_script,
    reported_logprob,
)
from slipstream.rollout.engines.vllm.client import VllmEngine
from slipstream.tests import tiny
from slipstream.tests.conformance.kinds import KINDS
from slipstream.tests.conformance.replica import PROMPTS, make_publisher
from slipstream.tests.conformance.servers import Server, configure
from slipstream.weightsync.plan import PushReport
from transformers import PreTrainedModel

(FAKE,) = (kind for kind in KINDS if kind.name == "fake")
FOUR = SamplingParams(max_tokens=4, temperature=0.0)
LONG = SamplingParams(max_tokens=900, temperature=0.0)


def test_a_fault_happens_the_nth_time_and_once() -> None:
    faults = FaultInjector([Fault(at="score", do="refuse", nth=2), Fault(at="pause", do="die", nth=1)], replica=0)
    assert faults.passing("score") is None
    assert faults.passing("generate") is None
    assert faults.passing("score") == Fault(at="score", do="refuse", nth=2)
    assert faults.passing("score") is None
    assert faults.passing("pause") == Fault(at="pause", do="die")
    assert faults.passing("pause") is None


def test_a_fault_happens_several_times_in_a_row() -> None:
    faults = FaultInjector(
        [Fault(at="token", do="lie", nth=2, times=3, nats=0.5), Fault(at="token", do="delay", nth=4)], 0
    )
    passed = [faults.passing("token") for _ in range(6)]
    assert [fault and fault.do for fault in passed] == [None, "lie", "lie", "lie", None, None]
    assert [reported_logprob(-1.0, fault) for fault in passed[:2]] == [-1.0, -0.5]
    assert math.isnan(reported_logprob(-1.0, Fault(at="token", do="lie")))


def test_a_fault_of_another_replica_is_none_of_ours() -> None:
    script = [Fault(at="swap", do="die", replica=1), Fault(at="join", do="freeze")]
    assert FaultInjector(script, replica=0).passing("swap") is None
    assert FaultInjector(script, replica=1).passing("swap") == script[0]
    assert all(FaultInjector(script, replica=i).passing("join") == script[1] for i in range(3))


@pytest.mark.parametrize(("at", "do"), sorted(NO_FAULTS))
def test_a_fault_that_means_nothing_is_refused(at: str, do: str) -> None:
    with pytest.raises(ConfigError, match=rf"SLIPSTREAM_FAULTS: do={do} means nothing at={at}; allowed"):
        FaultInjector([msgspec.convert({"at": at, "do": do}, Fault)], replica=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return tiny.load(folder)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("[{at: tokn, do: die}]", ["'tokn'", "$[0].at"]),
        ("[{at: token, do: die}, {at: token, do: dye}]", ["'dye'", "$[1].do"]),
        ("[{at: token, do: die, nht: 3}]", ["unknown field `nht`", "$[0]"]),
        ("[{at: token, do: die}, {at: token}]", ["missing required field `do`", "$[1]"]),
        ("[{at: token, do: delay, nth: 0}]", [">= 1", "$[0].nth"]),
        ("[{at: token, do: die, replica: -5}]", [">= -1", "$[0].replica"]),
        ("[die]", ["$[0]"]),
        ("{at: token, do: die}", ["array"]),
        ("[{at: swap, do: lie, nats: 1}]", ["nats means nothing at=swap do=lie", "allowed at=token do=lie"]),
        ("[{at: health, do: lie}]", ["do=lie means nothing at=health", "die, freeze, refuse, delay"]),
        ("[", ["not valid YAML"]),
    ],
)
def test_a_script_that_means_nothing_is_refused_by_name(
    script: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, script)
    with pytest.raises(ConfigError) as caught:
        read_script()
    assert "\n" not in str(caught.value)
    for part in (VARIABLE, *expected):
        assert part in str(caught.value)


@pytest.fixture
def serve(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Start a server with faults."""
    with contextlib.ExitStack() as stack:

        def start(*faults: Fault) -> Server:
            monkeypatch.setenv(VARIABLE, msgspec.json.encode(faults).decode())
            server = Server(FAKE, configure(FAKE, folder), tmp_path / "server.log")
            stack.callback(server.close)
            return server

        yield start


@contextlib.asynccontextmanager
async def client(server: Server, *, request_s: float = 60.0) -> AsyncIterator[VllmEngine]:
    """A client that takes the weights which the server loaded itself for version 0."""
    engine = VllmEngine(
        "fake",
        server.url,
        vocab_size=tiny.VOCABULARY,
        max_model_len=tiny.CONTEXT,
        initial_version=0,
        request_s=request_s,
        access=server.access,
    )
    try:
        yield engine
    finally:
        await engine.close()


async def test_completions_and_scores_that_are_refused_late_or_false(
    serve: Callable[..., Server], model: PreTrainedModel
) -> None:
    server = serve(
        Fault(at="health", do="refuse", nth=2),
        Fault(at="generate", do="refuse"),
        Fault(at="generate", do="lie", nth=2),
        Fault(at="generate", do="delay", nth=3, seconds=1.5),
        Fault(at="token", do="lie", nth=6),  # of the second completion that was computed
        Fault(at="token", do="delay", nth=10, seconds=1.5),  # of the third
        Fault(at="score", do="refuse"),
        Fault(at="score", do="lie", nth=2),
    )
    await server.wait_ready()
    ids, truth = tiny.canary(model)
    async with client(server) as engine:
        with pytest.raises(EngineError, match=r"answered 500: scripted fault: refused at health 2"):
            await engine.call("GET", "/health")
        await engine.call("GET", "/health")
        with pytest.raises(EngineError, match=r"answered 500: scripted fault: refused at generate 1"):
            await engine.generate(PROMPTS[0], FOUR)
        with pytest.raises(EngineError, match=r"1 log-probs for 2 tokens"):
            await engine.generate(PROMPTS[0], FOUR)
        began = time.monotonic()
        late = tiny.untimed(await engine.generate(PROMPTS[0], FOUR))
        assert time.monotonic() - began >= 1.5
        with pytest.raises(EngineError, match="a log-prob of"):
            await engine.generate(PROMPTS[0], FOUR)
        began = time.monotonic()
        assert tiny.untimed(await engine.generate(PROMPTS[0], FOUR)) == late
        assert time.monotonic() - began >= 1.5
        assert tiny.untimed(await engine.generate(PROMPTS[0], FOUR)) == late
        with pytest.raises(EngineError, match=r"answered 500: scripted fault: refused at score 1"):
            await engine.score(ids)
        assert await engine.score(ids) == [-1.0] * len(truth)
        assert await engine.score(ids) == pytest.approx(truth, abs=1e-4)


LIES = {
    "logprobs": "1 log-probs for 2 tokens",
    "token": "outside the vocabulary",
    "version": "version 1000, the newest that exists is 0",
    "old_version": "reports version '-1', which is none",
    "positive": "a log-prob of 1.0",
    "infinite": "a log-prob of -9999.0",
    "falling": "reports version '-1'",
    "longer": "sent 5 tokens of the 4",
    "garbage": "answered something impossible",
}


async def test_every_false_completion_is_found(serve: Callable[..., Server]) -> None:
    assert set(LIES) == set(get_args(Lie))
    faults = [Fault(at="generate", do="lie", nth=n, about=about) for n, about in enumerate(get_args(Lie), start=1)]
    server = serve(*faults, Fault(at="generate", do="lie", nth=len(LIES) + 2, times=3, about="token"))
    await server.wait_ready()
    async with client(server) as engine:
        engine.versions = VersionClock()
        for about in get_args(Lie):
            with pytest.raises(FalseReply, match=LIES[about]):
                await engine.generate(PROMPTS[0], FOUR, version=0)
        await engine.generate(PROMPTS[0], FOUR, version=0)
        for _ in range(3):
            with pytest.raises(FalseReply, match="outside the vocabulary"):
                await engine.generate(PROMPTS[0], FOUR, version=0)
        await engine.generate(PROMPTS[0], FOUR, version=0)


async def test_commands_that_are_refused_or_confirmed_and_not_executed(serve: Callable[..., Server]) -> None:
    server = serve(
        Fault(at="pause", do="lie"),
        Fault(at="pause", do="refuse", nth=2),
        Fault(at="resume", do="lie"),
        Fault(at="resume", do="refuse", nth=2),
    )
    await server.wait_ready()
    async with client(server) as engine:
        await engine.pause("recompute")
        await engine.generate(PROMPTS[0], FOUR)  # it never paused
        with pytest.raises(EngineError, match="refused at pause 2"):
            await engine.pause("recompute")
        await engine.generate(PROMPTS[0], FOUR)
        await engine.pause("recompute")
        await engine.resume()
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], FOUR))
        with pytest.raises(EngineError, match="refused at resume 2"):
            await engine.resume()
        done, _ = await asyncio.wait({waiting}, timeout=1.0)
        assert not done  # it never resumed
        await engine.resume()
        await asyncio.wait_for(waiting, 60)


async def test_pushes_that_are_refused_or_confirmed_and_not_executed(
    serve: Callable[..., Server], folder: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    server = serve(  # a push tries twice
        *(Fault(at="receive", do="refuse", nth=n) for n in (1, 2)),
        *(Fault(at="receive", do="lie", nth=n) for n in (3, 4)),
        *(Fault(at="swap", do="refuse", nth=n) for n in (1, 2)),
        Fault(at="swap", do="delay", nth=3, seconds=1.0),
    )
    await server.wait_ready()
    weights, canary = tiny.weights(folder), tiny.canary(model)
    async with client(server) as engine:
        publisher = make_publisher(engine, folder=tmp_path, push_s=10.0)

        async def push(version: int) -> PushReport:
            return await publisher.publish(version, weights.items(), *canary)

        failed = await push(1)
        assert "refused at receive 2" in failed.failed["fake"]
        failed = await push(2)  # nothing was received, so no ack comes
        assert "no ack" in failed.failed["fake"]
        failed = await push(3)
        assert "refused at swap 2" in failed.failed["fake"]
        assert await engine.version() == 0
        late = await push(4)
        assert late.pushed == ("fake",)
        assert late.pause_ms >= 1000
        publisher.close()


async def test_a_sleep_that_is_refused_and_a_waking_that_is_confirmed_and_not_executed(
    serve: Callable[..., Server], folder: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    server = serve(Fault(at="wake", do="lie", nth=3), Fault(at="sleep", do="refuse", nth=2))
    await server.wait_ready()
    weights, canary = tiny.weights(folder), tiny.canary(model)
    engine = server.client("fake", sleeps=True)
    publisher = make_publisher(engine, folder=tmp_path, push_s=20.0, transport="shared")

    async def push(version: int) -> PushReport:
        return await publisher.publish(version, weights.items(), *canary)

    try:
        assert (await push(1)).pushed == ("fake",)  # woken before, for its weights, and after, for its cache
        await publisher.sleep()
        assert (await push(2)).pushed == ("fake",)  # the swap is refused, as there is no memory, and tried again
        await publisher.sleep()
        assert publisher.serving == ()
        report = await publisher.catch_up()
        assert report is not None
        assert report.pushed == ("fake",)
        assert (await engine.generate(PROMPTS[0], FOUR, version=2)).version_spans[0].version == 2
    finally:
        publisher.close()
        await engine.close()


async def test_a_join_that_is_confirmed_and_not_executed_ends_at_the_deadline(
    serve: Callable[..., Server], folder: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    server = serve(
        *(Fault(at="join", do="refuse", nth=n) for n in (1, 2)), *(Fault(at="join", do="lie", nth=n) for n in (3, 4))
    )
    await server.wait_ready()
    async with client(server) as engine:
        publisher = make_publisher(engine, folder=tmp_path, push_s=8.0)
        for version, says in ((1, "refused at join 2"), (2, "to join a group"), (3, "")):
            report = await publisher.publish(version, tiny.weights(folder).items(), *tiny.canary(model))
            assert says in report.failed.get("fake", "")
        assert report.pushed == ("fake",)
        publisher.close()


async def test_a_swap_that_is_confirmed_and_not_executed_is_found_by_the_canary(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    other = tiny.tiny_qwen3(tmp_path / "other", seed=1)
    server = serve(*(Fault(at="swap", do="lie", nth=n) for n in (1, 2, 3)))
    await server.wait_ready()
    async with client(server) as engine:
        publisher = make_publisher(engine, folder=tmp_path)
        with pytest.raises(WeightSyncError, match=r"fake does not hold version 1: .* nats"):
            await publisher.publish(1, tiny.weights(other).items(), *tiny.canary(tiny.load(other)))
        publisher.close()


async def test_a_death_between_two_tokens_leaves_the_partial(serve: Callable[..., Server]) -> None:
    # What was sampled before it is sent meanwhile, also where the cores are busy.
    server = serve(Fault(at="token", do="delay", nth=49, seconds=1.0), Fault(at="token", do="die", nth=50))
    await server.wait_ready()
    async with client(server) as engine:
        with pytest.raises(EngineFailure) as broken:
            await engine.generate(PROMPTS[0], LONG)
        assert 49 - 16 <= len(broken.value.partial.token_ids) <= 49
        assert await server.ended() == -signal.SIGKILL


async def test_a_death_at_a_request_is_reported_at_once(serve: Callable[..., Server]) -> None:
    server = serve(Fault(at="generate", do="die", nth=2))
    await server.wait_ready()
    async with client(server) as engine:
        await engine.generate(PROMPTS[0], FOUR)
        with pytest.raises(EngineFailure) as broken:
            await asyncio.wait_for(engine.generate(PROMPTS[0], FOUR), 15)
        assert broken.value.partial.token_ids == ()
        assert await server.ended() == -signal.SIGKILL


async def test_a_frozen_server_answers_no_request_until_it_thaws(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "ABORT_S", 1.0)
    server = serve(Fault(at="token", do="freeze", nth=20))
    await server.wait_ready()
    async with client(server, request_s=2.0) as engine:
        running = asyncio.create_task(engine.generate(PROMPTS[0], LONG))
        with pytest.raises(DeadlineExceeded, match=r"fake waited 2 s"):
            await running
        with pytest.raises(DeadlineExceeded, match=r"fake waited 2 s"):
            await engine.version()
        server.thaw()
        engine.request_s = 60.0
        assert await engine.version() == 0


async def test_starts_that_are_late_refused_or_deadly(serve: Callable[..., Server]) -> None:
    refused, dies = serve(Fault(at="start", do="refuse")), serve(Fault(at="start", do="die"))
    async with client(serve(Fault(at="start", do="delay", seconds=60.0))) as engine:
        with pytest.raises(DeadlineExceeded, match="its server to start"):
            await engine.wait_ready(4.0)
    assert await refused.ended() == 1
    assert "EngineError: scripted fault: refused to start" in refused.tail()
    assert await dies.ended() == -signal.SIGKILL
