"""The fake server under a law: steps take the law's seconds, completions are as long as asked, and it drains before a pause."""

import asyncio
from pathlib import Path

import pytest
from slipstream.rollout.engines.base import SamplingParams
from slipstream.rollout.engines.fake import emulated
from slipstream.rollout.engines.fake.emulated import EmulatedModelRunner
from slipstream.rollout.engines.fake.faults import FaultInjector
from slipstream.rollout.engines.fake.law import BLOCK, VARIABLE, EngineLaw
from slipstream.rollout.engines.server.contract import Sequence
from slipstream.rollout.engines.server.launch import Options
from slipstream.tests import tiny
from slipstream.tests.conformance.servers import Server, configure
from slipstream.tests.test_rollout_fake import FAKE, client

OPTIONS = Options("fake", "", "", 0, "float32", 0, 0, max_concurrent=2, max_tokens=1000)


class StoppedTime:
    """`time`, in which only sleeps pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StoppedTime:
    stopped = StoppedTime()
    monkeypatch.setattr(emulated, "time", stopped)
    return stopped


def runner(**law: float | bool) -> EmulatedModelRunner:
    return EmulatedModelRunner(None, OPTIONS, FaultInjector((), 0), EngineLaw(**law))  # type: ignore[arg-type]


def sequence(id: str, tokens: int, prompt: list[int], salt: str = "1") -> Sequence:
    return Sequence(id, tuple(prompt), SamplingParams(tokens, stop_token_ids=(0, 7)), salt)


def took(clock: StoppedTime, one: EmulatedModelRunner) -> float:
    """Seconds of its next step."""
    before = clock.now
    one.step()
    return clock.now - before


def test_a_step_takes_the_seconds_of_the_law_and_a_completion_is_as_long_as_asked(clock: StoppedTime) -> None:
    one = runner(step_s=1.0, sequence_s=0.25)
    for id, tokens in (("a", 3), ("b", 2), ("c", 1)):
        one.add(sequence(id, tokens, [1, 2]))
    sampled = list(one.step())
    assert clock.now == pytest.approx(101.5)  # two of them have a place
    clock.now += 0.4  # what the process computes between two steps is a part of them
    sampled += one.step()
    assert clock.now == pytest.approx(103.0)
    while one.busy():
        sampled += one.step()
    assert clock.now == pytest.approx(104.5)
    of = {id: [(s.token, s.finish) for s in sampled if s.id == id] for id in "abc"}
    assert of == {"a": [(1, None), (1, None), (0, "stop")], "b": [(1, None), (0, "stop")], "c": [(0, "stop")]}
    clock.now += 10.0  # nothing ran: no step is owed
    one.add(sequence("d", 1, [1]))
    assert took(clock, one) == pytest.approx(1.25)


def test_only_what_is_not_cached_is_prefilled(clock: StoppedTime) -> None:
    one, prompt = runner(step_s=1.0, prefill_s=0.01), list(range(BLOCK + 4))
    one.add(sequence("a", 1, prompt))
    assert took(clock, one) == pytest.approx(1 + 0.01 * (BLOCK + 4))
    one.add(sequence("b", 1, prompt))
    assert took(clock, one) == pytest.approx(1 + 0.01 * 4)
    one.add(sequence("c", 1, prompt, salt="2"))
    assert took(clock, one) == pytest.approx(1 + 0.01 * (BLOCK + 4))
    one.add(sequence("d", 3, prompt))
    one.step()
    one.recompute()
    assert took(clock, one) == pytest.approx(1 + 0.01 * (BLOCK + 5))  # its prompt and one token
    assert took(clock, one) == pytest.approx(1)


def test_one_that_is_held_begins_nothing_and_is_drained_when_nothing_runs(clock: StoppedTime) -> None:
    one = runner(step_s=1.0, drains=True)
    one.add(sequence("a", 2, [1]))
    one.step()
    one.hold()
    one.add(sequence("b", 1, [1]))
    assert not one.drained.is_set()
    assert [s.id for s in one.step()] == ["a"]
    assert one.drained.is_set()
    assert not one.busy()
    one.release()
    assert [s.id for s in one.step()] == ["b"]
    one.hold()
    assert one.drained.is_set()


async def test_a_server_that_drains_ends_what_it_decodes_before_it_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "{step_s: 0.02, drains: true}")
    server = Server(FAKE, configure(FAKE, tiny.tiny_qwen3(tmp_path / "model")), tmp_path / "server.log")
    try:
        await server.wait_ready()
        async with client(server) as engine:
            decoding = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams(100)))  # for two seconds
            async with asyncio.timeout(20):
                while not (await engine.get_load()).running:  # noqa: ASYNC110  (only polling shows it)
                    await asyncio.sleep(0.01)
                await engine.pause("recompute")
                completion = await decoding
            assert len(completion.token_ids) == 100
            assert completion.finish_reason == "length"
            assert (await engine.get_load()).running == 0
            assert len(await engine.score([1, 2, 3])) == 2  # by the model, while it is paused
            later = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams(5)))
            await engine.resume()
            async with asyncio.timeout(20):
                assert len((await later).token_ids) == 5
    finally:
        server.close()
