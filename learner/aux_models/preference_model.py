"""A reward model that is trained: a critic whose output at the last token of a conversation is its score. It is exported as a
sequence classifier of one label, which `reward.kind=classifier` serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from .. import checkpoint as folders
from ..distributed import all_ranks_agree
from .critic import Critic

TRAINED_AS, SERVED_AS = (
    "ForTokenClassification",
    "ForSequenceClassification",
)  # endings of the names of transformers' classes
BIAS = "score.bias"


class PreferenceModel(Critic):
    """See the module. The bias of the head is the same in both scores of a preference: it has no gradient and stays 0, and the
    exported classifier has none."""

    def export(self, directory: Path) -> None:
        name = type(self._model).__name__.removeprefix("FSDP").removesuffix(TRAINED_AS) + SERVED_AS
        with all_ranks_agree(f"exporting {directory}"):
            folders.export(directory, self._model, self._without_bias(), self._source, name)

    def _without_bias(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in self._gathered(self._as_stored) if name != BIAS)
