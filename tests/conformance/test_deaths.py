"""Servers that die, freeze or were never there: a named error at once, and nothing lost that had arrived."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from slipstream.errors import DeadlineExceeded, EngineError
from slipstream.rollout.engine import Broken, Sampling
from slipstream.tests import tiny
from slipstream.tests.conformance import reference
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.reference import TOLERANCE
from slipstream.tests.conformance.replica import GREEDY, PROMPTS, Replica, Weights, join
from slipstream.tests.conformance.servers import Server, make_client

LONG = Sampling(max_tokens=900, temperature=0.0)


async def test_a_new_server_has_no_version_and_labels_nothing(
    kind: Kind, victim: Server, weights: Weights, tmp_path: Path
) -> None:
    await victim.wait_ready()
    fresh = Replica(kind, victim, weights, tmp_path)
    assert await fresh.engine.version() is None
    with pytest.raises(EngineError, match="version"):
        await fresh.engine.generate(PROMPTS[0], GREEDY)
    ids, expected = tiny.canary(weights.models[0])
    assert await fresh.engine.score(ids) == pytest.approx(expected, abs=TOLERANCE)
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


async def assert_goes_on_elsewhere(broken: Broken, prompt: list[int], doomed: Replica, elsewhere: Replica) -> None:
    """What had arrived is exact, and with the rest from another replica it is what one replica alone would have said."""
    assert broken.partial.finish_reason == "abort"
    assert {span.version for span in broken.partial.version_spans} == {doomed.version}
    rest = Sampling(max_tokens=40, temperature=0.0)
    whole = join(broken.partial, await elsewhere.generate([*prompt, *broken.partial.token_ids], rest))
    rows = reference.rows(elsewhere.weights.models[0], prompt, whole)
    assert reference.greedy(rows, whole.token_ids)
    assert reference.error(rows, whole.token_ids, whole.logprobs) <= TOLERANCE


async def test_a_frozen_server_is_named_at_the_deadline(kind: Kind, doomed: Replica, victim: Server) -> None:
    hasty = victim.client("hasty", request_s=1.0)
    victim.freeze()
    try:
        for question in (hasty.generate(PROMPTS[0], GREEDY, version=1), hasty.pressure()):
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match=r"hasty waited 1 s for"):
                await question
            assert time.monotonic() - began < 7.0
    finally:
        victim.thaw()
        await hasty.close()
    await doomed.running(0, within_s=15)
    assert await doomed.serves(0)


async def test_nobody_listening_is_an_engine_error_at_once(kind: Kind) -> None:
    nobody = make_client(kind.name, "nobody", f"http://127.0.0.1:{tiny.free_port()}")
    for question in (
        nobody.generate(PROMPTS[0], GREEDY),
        nobody.version(),
        nobody.pressure(),
        nobody.pause("recompute"),
    ):
        with pytest.raises(EngineError, match=r"nobody at .* is not reachable"):
            await asyncio.wait_for(question, 1)
    with pytest.raises(DeadlineExceeded, match=r"nobody waited 0.3 s for its server to start"):
        await nobody.wait_ready(0.3)
    await nobody.close()


@pytest.fixture(params=["server", "compute process"])
def killed(kind: Kind, request: pytest.FixtureRequest) -> str:
    """What is killed of a server, where it has such a thing."""
    if request.param != "server":
        kind.needs(request.param)
    return request.param


async def test_a_death_is_told_within_a_second_and_its_requests_go_on_elsewhere(
    killed: str, replica: Replica, doomed: Replica, victim: Server
) -> None:
    family = victim.family()
    running = [asyncio.create_task(doomed.engine.generate(p, LONG, version=doomed.version)) for p in PROMPTS[:4]]
    await doomed.running(4)
    # One that was sent after them has come back with 60 tokens: so much of theirs, less what was not sent yet, is here.
    await doomed.generate(PROMPTS[7], Sampling(max_tokens=60, temperature=0.0))
    if killed == "server":
        victim.die()
    else:
        victim.compute_process().kill()
    began = time.monotonic()
    outcomes = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 10)
    assert time.monotonic() - began < 1.0
    for prompt, broken in zip(PROMPTS, outcomes, strict=False):
        assert isinstance(broken, Broken)
        assert "replica" in str(broken)
        assert len(broken.partial.token_ids) > 10
        await assert_goes_on_elsewhere(broken, prompt, doomed, replica)
    with pytest.raises(EngineError):
        await asyncio.wait_for(doomed.engine.generate(PROMPTS[0], GREEDY, version=doomed.version), 1)
    if killed == "server":
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10)
        assert alive == []  # it leaves nobody behind
    victim.close()
