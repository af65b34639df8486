"""Epochs over an environment's tasks, where they are finitely many: which one an index means. A part is held out for evaluation,
the others come once per epoch.

Invariants:
- With n tasks, indices e * n to (e + 1) * n - 1 are a permutation of them, which follows from the seed and e. The buffer counts
  indices durably, so this holds across restarts.
- What is held out is never trained on, and is the same for every seed.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError
from .simple import Split

Numbers = npt.NDArray[np.int64]

HELD_OUT_SEED = 20  # of the permutation whose beginning is held out, for every run: their evaluations can be compared


class EpochOrder:
    """The order of `numbers`, the tasks of one split."""

    def __init__(self, numbers: Numbers, split: Split, seed: int) -> None:
        self.numbers = numbers
        self._split, self._seed = split, seed
        self._order = functools.lru_cache(maxsize=2)(self._permutation)  # groups of two epochs overlap

    def number(self, index: int) -> int:
        """The number of the `index`-th task."""
        epoch, position = divmod(index, len(self.numbers))
        return int(self.numbers[self._order(epoch)[position]])

    def keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Leave out the others of `numbers`."""
        self.numbers = self.numbers[kept]
        self._order.cache_clear()

    def _permutation(self, epoch: int) -> Numbers:
        return np.random.default_rng([self._seed, int(self._split == "eval"), epoch]).permutation(len(self.numbers))


def numbers_of_split(total: int, evaluation: str | float, split: Split, *, key: str, what: str) -> Numbers:
    """The numbers below `total` that belong to `split`, in order; `evaluation` is the share that is held out, or names others,
    which are all evaluated on. Raises ConfigError naming `key` and `what` they are: none is left."""
    if isinstance(evaluation, str):
        return np.arange(total)
    held_out = max(1, round(evaluation * total)) if evaluation else 0
    shuffled = np.random.default_rng(HELD_OUT_SEED).permutation(total)
    numbers = np.sort(shuffled[:held_out] if split == "eval" else shuffled[held_out:])
    if not len(numbers):
        raise ConfigError(
            f"{key}.evaluation: {evaluation:g} of the {total} {what} leaves none for "
            f"{'evaluation' if split == 'eval' else 'training'}; name another file, or another share"
        )
    return numbers
