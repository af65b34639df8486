"""Token annotations: what the learner computed at each token that it trained on, as the learner hands it to its process.

Invariants:
- A token without loss has no value: NaN in all of them, and no flag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

VALUES = ("log_ratio", "entropy", "advantage", "weight")
"""Of a token in its optimizer step, before the weights changed: log(p / b) of the current policy p and the one that sampled it, b;
the entropy of p in nats; its advantage; and the weight of the correction that multiplied its loss."""
TRAINED, CLIPPED, DROPPED = (
    1,
    2,
    4,
)  # flags: it carried loss; the loss's own clip was active; the correction dropped its loss
TOKEN_BYTES = 2 * len(VALUES) + 1


class TokenAnnotations(msgspec.Struct, frozen=True):
    """Of the first T tokens of a trajectory: none behind them carried loss."""

    id: str  # of the trajectory
    values: NDArray[np.float16]  # float16[4, T], in the order of `VALUES`
    flags: NDArray[np.uint8]  # uint8[T]

    def __len__(self) -> int:
        return len(self.flags)


RecordAnnotations = Callable[[int, Sequence[TokenAnnotations]], None]
"""(the version that the batch made, its trajectories). It never blocks and never raises."""


def no_annotations(version: int, rows: Sequence[TokenAnnotations]) -> None:
    """Where none are recorded."""
