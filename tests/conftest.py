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


@pytest.fixture(scope="session")
def models(folders: list[Path]) -> list[PreTrainedModel]:
    """What transformers makes of `folders`."""
    return [tiny.load(folder) for folder in folders]
