"""Architectures that break when weights are loaded a second time: untied embeddings, experts, and a model over two processes."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from slipstream.tests.conformance import reference
from slipstream.tests.conformance.kinds import Kind
from slipstream.tests.conformance.replica import PROMPTS, ROUNDS, Replica, Traffic, Weights, make_weights
from slipstream.tests.conformance.servers import Server

SHAPES = {
    "untied": {"tied": False},
    "moe": {"moe": True},
    "tensor parallel": {},
}
OPTIONS = {"tensor parallel": {"tensor_parallel_size": 2}}
"""`rollout.engine.options` of servers."""


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Weights]:
    return {name: make_weights(tmp_path_factory.mktemp(name), **shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def other_server(kind: Kind, shape: str, others: dict[str, Weights], start: Callable[..., Server]) -> Iterator[Server]:
    kind.needs(shape)
    server = start(kind, others[shape].folders[0], options=OPTIONS.get(shape))
    yield server
    server.close()


@pytest.fixture
async def other(
    kind: Kind, shape: str, others: dict[str, Weights], other_server: Server, tmp_path: Path
) -> AsyncIterator[Replica]:
    await other_server.wait_ready()
    replica = Replica(kind, other_server, others[shape], tmp_path)
    yield replica
    await replica.close()


async def test_pushed_weights_are_served_exactly(other: Replica) -> None:
    assert await other.engine.version() is None
    for which in (0, 1, 0):
        await other.push(which)
        for prompt, completion in zip(PROMPTS, await other.generate_all(PROMPTS), strict=True):
            rows = reference.rows(other.weights.models[which], prompt, completion)
            assert reference.greedy(rows, completion.token_ids, other.tolerance)
            assert reference.error(rows, completion.token_ids, completion.logprobs) <= other.tolerance


async def test_a_push_under_running_requests_is_exact(other: Replica) -> None:
    for _ in range(ROUNDS):
        old = await other.push(1)
        async with Traffic(other) as traffic:
            new = await other.push(0)
        if traffic.crossing():
            break
    assert traffic.crossing()
    for prompt, completion in traffic.finished:
        for span in completion.version_spans:
            rows = reference.rows(other.weights.models[{old: 1, new: 0}[span.version]], prompt, completion)
            part = slice(span.start, span.end)
            assert reference.greedy(rows[part], completion.token_ids[part], other.tolerance)
            assert reference.error(rows[part], completion.token_ids[part], completion.logprobs[part]) <= other.tolerance
