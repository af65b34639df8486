"""Servers that die, freeze or were never started: a named error at once, and no token lost that had arrived."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from slipstream.agents.base import Completion
from slipstream.errors import DeadlineExceeded, EngineError
from slipstream.rollout.engines import http_client
from slipstream.rollout.engines.base import EngineFailure, SamplingParams
from slipstream.tests import tiny
from slipstream.tests.conformance import reference
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.replica import GREEDY, PROMPTS, ROUNDS, Replica, Weights, join
from slipstream.tests.conformance.servers import Server, alive_after, make_client

ABORT_S = 1.0
"""Longest wait for a frozen server to confirm an abort."""

LATE_S = 5.0
"""How much later than planned the test's own process may run: it shares two cores with servers that start and decode."""

LONG = SamplingParams(max_tokens=900, temperature=0.0)


async def test_a_new_server_has_no_version_and_labels_nothing(
    kind: Kind, victim: Server, weights: Weights, tmp_path: Path
) -> None:
    await victim.wait_ready()
    fresh = Replica(kind, victim, weights, tmp_path)
    assert await fresh.engine.version() is None
    with pytest.raises(EngineError, match="version"):
        await fresh.engine.generate(PROMPTS[0], GREEDY)
    ids, expected = tiny.canary(weights.models[0])
    assert await fresh.engine.score(ids) == pytest.approx(expected, abs=fresh.tolerance)
    await fresh.push(1)
    assert await fresh.serves(1)
    await fresh.close()


@pytest.fixture
async def doomed(kind: Kind, victim: Server, replica: Replica, tmp_path: Path) -> AsyncIterator[Replica]:
    """A second replica of the same policy and version as the shared one."""
    victim.start()
    await victim.wait_ready()
    doomed = Replica(kind, victim, replica.weights, tmp_path)
    await doomed.push(0)
    yield doomed
    await doomed.close()


async def assert_goes_on_elsewhere(
    broken: EngineFailure, prompt: list[int], doomed: Replica, elsewhere: Replica
) -> None:
    """What had arrived is exact, and continued on another replica it equals what a single replica would have sampled."""
    assert broken.partial.finish_reason == "abort"
    assert {span.version for span in broken.partial.version_spans} == {doomed.version}
    rest = SamplingParams(max_tokens=40, temperature=0.0)
    whole = join(broken.partial, await elsewhere.generate([*prompt, *broken.partial.token_ids], rest))
    rows = reference.rows(elsewhere.weights.models[0], prompt, whole)
    assert reference.greedy(rows, whole.token_ids, elsewhere.tolerance)
    assert reference.error(rows, whole.token_ids, whole.logprobs) <= elsewhere.tolerance


async def test_a_frozen_server_is_named_at_the_deadline(
    kind: Kind, doomed: Replica, victim: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "ABORT_S", ABORT_S)
    hasty = victim.client("hasty", request_s=1.0)
    victim.freeze()
    try:
        for question in (hasty.generate(PROMPTS[0], GREEDY, version=1), hasty.get_load()):
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"hasty waited 1 s for"):
                await question
            assert time.monotonic() - began < 1.0 + ABORT_S + LATE_S
    finally:
        victim.thaw()
        await hasty.close()
    await doomed.running(0)
    assert await doomed.serves(0)


async def test_an_unreachable_server_is_an_engine_error_at_once(kind: Kind) -> None:
    absent = make_client(kind.name, "absent", f"http://127.0.0.1:{tiny.free_port()}")
    for question in (
        absent.generate(PROMPTS[0], GREEDY),
        absent.version(),
        absent.get_load(),
        absent.pause("recompute"),
    ):
        with pytest.raises(EngineError, match=r"absent at .* is not reachable"):
            await asyncio.wait_for(question, 1 + LATE_S)
    with pytest.raises(DeadlineExceeded, match=r"absent waited 0.3 s for its server to start"):
        await absent.wait_ready(0.3)
    await absent.close()


@pytest.fixture(params=["server", "compute process"])
def killed(kind: Kind, request: pytest.FixtureRequest) -> str:
    """Which process of a server is killed, where it has that one."""
    if request.param != "server":
        kind.needs(request.param)
    return request.param


async def test_a_death_is_reported_within_a_second_and_its_requests_continue_elsewhere(
    killed: str, replica: Replica, doomed: Replica, victim: Server
) -> None:
    for _ in range(ROUNDS):
        family = victim.family()
        running = [asyncio.create_task(doomed.engine.generate(p, LONG, version=doomed.version)) for p in PROMPTS[:4]]
        await doomed.begun(running)
        # One that was sent after them has come back with 60 tokens: so much of theirs, less what was not sent yet, is here.
        await doomed.generate(PROMPTS[7], SamplingParams(max_tokens=60, temperature=0.0))
        if killed == "server":
            victim.die()
        else:
            victim.compute_process().kill()
        began = time.monotonic()
        outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 60)
        assert time.monotonic() - began < 1.0 + LATE_S
        if not any(isinstance(outcome, Completion) for outcome in outcomes):  # the kill was not too late
            break
        victim.close()
        victim.start()
        await victim.wait_ready()
        await doomed.close()
        await doomed.push(0)
    for prompt, broken in zip(PROMPTS, outcomes, strict=False):
        assert isinstance(broken, EngineFailure)
        assert "replica" in str(broken)
        assert len(broken.partial.token_ids) > 10
        await assert_goes_on_elsewhere(broken, prompt, doomed, replica)
    with pytest.raises(EngineError):
        await asyncio.wait_for(doomed.engine.generate(PROMPTS[0], GREEDY, version=doomed.version), 1 + LATE_S)
    if killed == "server":
        assert await asyncio.to_thread(alive_after, 60, family) == []  # no process of it is left
    victim.close()
