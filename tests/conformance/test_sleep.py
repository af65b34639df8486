"""A server that sleeps while the learner steps: its memory is free, its requests wait, and the next push wakes it.

On a CPU, and for our own kinds, it is the server that the suite shares. vLLM frees nothing there, but pauses and wakes as on a GPU,
where a server is started for it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from slipstream.configs.schema import Partial
from slipstream.errors import EngineError
from slipstream.rollout.engines import registry as servers
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.replica import PROMPTS, ROUNDS, Replica, Traffic, Weights
from slipstream.tests.conformance.servers import Server, configure
from slipstream.tests.conformance.test_partial import assert_covered, span_error

OWN = ("transformers", "fake")


@pytest.fixture(scope="module")
def sleeping_server(kind: Kind, request: pytest.FixtureRequest, start: Callable[..., Server]) -> Iterator[Server]:
    on_cpu = servers.serves_on_cpu(configure(kind, Path()))
    if on_cpu:
        kind.needs("sleep")
    if on_cpu or kind.name in OWN:
        yield request.getfixturevalue("server")
        return
    weights: Weights = request.getfixturevalue("weights")
    server = start(kind, weights.folders[0], colocated=True)
    yield server
    server.close()


@pytest.fixture
def mode() -> Partial:
    return "recompute"


@pytest.fixture
async def sleeper(
    kind: Kind, sleeping_server: Server, weights: Weights, mode: Partial, tmp_path: Path
) -> AsyncIterator[Replica]:
    """It serves policy 0, and is awake at the end."""
    await sleeping_server.wait_ready()
    replica = Replica(kind, sleeping_server, weights, tmp_path, mode, sleeps=True)
    await replica.push(0, "shared")
    yield replica
    await replica.push(0, "shared")
    await replica.close()


async def test_it_wakes_with_the_next_version_and_with_the_same(sleeper: Replica) -> None:
    for which in (1, 0):
        await sleeper.sleep()
        assert await sleeper.engine.version() == sleeper.version
        await sleeper.engine.call("GET", "/health" if sleeper.kind.name != "sglang" else "/model_info")
        await sleeper.push(which, "shared")
        assert await sleeper.serves(which)
    await sleeper.sleep()
    await sleeper.wake()
    assert await sleeper.serves(0)


@pytest.mark.parametrize("mode", ["recompute", "abort_resume"])
async def test_requests_under_way_lose_no_token_and_go_on_with_the_next_version(sleeper: Replica) -> None:
    old = sleeper.version
    for _ in range(ROUNDS):
        async with Traffic(sleeper) as traffic:
            await sleeper.sleep()
            waiting = asyncio.create_task(sleeper.generate(PROMPTS[6]))
            done, _ = await asyncio.wait({waiting}, timeout=0.5)
            assert not done  # one that comes while it sleeps waits, too
            new = await sleeper.push(1, "shared")
            completion = await waiting
        assert {span.version for span in completion.version_spans} == {new}
        if traffic.crossing():
            break
        old = await sleeper.push(0, "shared")
    assert traffic.crossing()
    for prompt, whole in traffic.finished:
        assert_covered(whole, 300)
        assert span_error(sleeper, {old or 0: 0, new: 1}, prompt, whole) <= sleeper.tolerance
    assert await sleeper.serves(1)


async def test_a_learner_that_knows_nothing_of_it_wakes_it(kind: Kind, sleeper: Replica, tmp_path: Path) -> None:
    await sleeper.sleep()
    another = Replica(kind, sleeper.server, sleeper.weights, tmp_path, sleeps=True)
    await another.push(1, "shared")
    assert await another.serves(1)
    await another.push(0, "shared")  # one that is awake
    assert await another.serves(0)
    await another.close()


async def test_without_weights_our_servers_neither_step_nor_score(kind: Kind, sleeper: Replica) -> None:
    if kind.name not in OWN:
        pytest.skip(f"{kind.name} trusts its caller")
    await sleeper.sleep()
    await sleeper.engine.sleep()  # it may be asked again
    for _ in range(2):
        with pytest.raises(EngineError, match="it sleeps"):
            await sleeper.engine.score(PROMPTS[0])
        with pytest.raises(EngineError, match="still sleeps"):
            await sleeper.engine.resume()
        await sleeper.engine.wake()
    await sleeper.push(1, "shared")
    assert await sleeper.serves(1)
