"""One suite for every kind of server: `pytest tests/conformance --engine vllm` runs one kind only."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from slipstream.configs.schema import Partial
from slipstream.rollout.engines import registry as servers
from slipstream.tests import forkserver, tiers
from slipstream.tests.conformance.kinds import KINDS, Kind
from slipstream.tests.conformance.replica import Replica, Weights, make_weights
from slipstream.tests.conformance.servers import HOST, Server, configure


def pytest_addoption(parser: pytest.Parser) -> None:
    names = [kind.name for kind in KINDS]
    parser.addoption("--engine", action="append", choices=names, help="only this kind of server; may be repeated")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--engine", default=None)
        kinds = [kind for kind in KINDS if wanted is None or kind.name in wanted]
        metafunc.parametrize("kind", kinds, ids=[k.name for k in kinds], indirect=True, scope="session")


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest) -> Kind:
    """The kind of server under test. One that is not installed is an error, not a skip; `--engine` leaves kinds out."""
    kind: Kind = request.param
    servers.serves_on_cpu(configure(kind, Path()))
    return kind


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Two policies with tied embeddings."""
    return make_weights(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Server]:
    """Start a server of a kind for a model folder."""
    return lambda kind, folder, **changes: Server(
        kind, configure(kind, folder, **changes), tmp_path_factory.mktemp(kind.name) / "server.log"
    )


def begin_sglang(folder: Path) -> None:
    """What SGLang imports takes long to read from the disk: that begins beside the tests of the kind before it."""
    (sglang,) = (kind for kind in KINDS if kind.name == "sglang")
    config = configure(sglang, folder)
    forkserver.begin(servers.command(config, HOST, 0, seed=0), os.environ | servers.environment(config))


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, kind: Kind, weights: Weights, start: Callable[..., Server]
) -> Iterator[Server]:
    """The server that most tests share. Whatever they do to it, it must go on serving."""
    # SGLang takes a faster path where pushes never keep KV; the other servers of the suite do.
    server = start(kind, weights.folders[0], partial="keep_kv")
    if kind.name == "vllm" and any(tiers.name_of(item).endswith("@sglang") for item in request.session.items):
        begin_sglang(weights.folders[0])
    yield server
    server.close()


@pytest.fixture(scope="module")
def victim(kind: Kind, weights: Weights, start: Callable[..., Server]) -> Iterator[Server]:
    """A second server of the same model, which tests kill. Call `start` to have it back."""
    server = start(kind, weights.folders[0])
    yield server
    server.close()


@pytest.fixture
async def replica(kind: Kind, server: Server, weights: Weights, tmp_path: Path) -> AsyncIterator[Replica]:
    """The shared server, serving policy 0 as some version, and a client of it."""
    await server.wait_ready()
    replica = Replica(kind, server, weights, tmp_path)
    await replica.push(0)
    yield replica
    await replica.close()


@pytest.fixture
async def modal(kind: Kind, server: Server, weights: Weights, mode: Partial, tmp_path: Path) -> AsyncIterator[Replica]:
    """As `replica`, and pushes treat requests under way as the test's `mode` says."""
    await server.wait_ready()
    replica = Replica(kind, server, weights, tmp_path, mode)
    await replica.push(0)
    yield replica
    await replica.close()
