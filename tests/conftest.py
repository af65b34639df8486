"""Fixtures that several test files share."""

from pathlib import Path

import pytest
from slipstream.tests import tiny
from transformers import PreTrainedModel


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
