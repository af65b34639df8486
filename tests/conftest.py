"""Fixtures that several test files share."""

from pathlib import Path

import pytest
from slipstream.tests import tiny
from slipstream.tests.conformance.kinds import Kind
from transformers import PreTrainedModel


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes test (`-n`), one takes a whole file, or all tests of a kind of server, which it starts once."""
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        kind = parameters.get("kind")
        item.add_marker(pytest.mark.xdist_group(kind.name if isinstance(kind, Kind) else item.path.stem))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies of one architecture, tied embeddings, random weights."""
    root = tmp_path_factory.mktemp("models")
    return [tiny.tiny_qwen3(root / f"m{seed}", seed) for seed in range(2)]


@pytest.fixture
def address() -> str:
    """A ZeroMQ address that nobody listens at."""
    return f"tcp://127.0.0.1:{tiny.free_port()}"


@pytest.fixture(scope="session")
def models(folders: list[Path]) -> list[PreTrainedModel]:
    """What transformers makes of `folders`."""
    return [tiny.load(folder) for folder in folders]
