"""How much may be outstanding, how old a token may be, and whose turn it is: the staleness bound as arithmetic.

Invariants:
- At most `(max_staleness + 1) * groups_per_batch` groups are outstanding. A group is outstanding from its first lease until the
  engines *serve* the version that was trained on it (or until it is discarded); a commit alone frees nothing.
- With `max_staleness = 0` therefore no group is in flight while the weights change: synchronous training.
- At version v no token older than `v - max_staleness` carries loss, whatever admission let through.
- Every environment has its part of every batch, and may have no more outstanding than its part of the batches that the bound
  covers: a slow one is neither crowded out by fast ones nor made stale by versions that went on without it.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Admission(msgspec.Struct, frozen=True):
    """The bound of one run. `max_staleness` in policy versions, `groups_per_batch` in task groups; `shares` of the environments,
    in any unit."""

    max_staleness: int
    groups_per_batch: int
    shares: tuple[float, ...] = (1.0,)

    def budgets(self, settled: Sequence[int]) -> list[int]:
        """Groups of each environment that may be outstanding at once, after `settled` groups of each were trained and served."""
        return self._apportion(settled, (self.max_staleness + 1) * self.groups_per_batch)

    def quotas(self, trained: Sequence[int]) -> list[int]:
        """Groups of each environment in the next batch, after `trained` groups of each were trained on."""
        return self._apportion(trained, self.groups_per_batch)

    def oldest_trainable(self, version: int) -> int:
        """The oldest policy version whose tokens may carry loss in the batch taken at `version`."""
        return max(0, version - self.max_staleness)

    def last_chance(self, version: int, leased_at: int) -> bool:
        """Whether tokens sampled at `leased_at` are within the bound at `version` and past it at `version + 1`."""
        return leased_at <= version - self.max_staleness

    def _apportion(self, given: Sequence[int], groups: int) -> list[int]:
        """`groups` more, one by one to whoever lacks most of its share of the whole."""
        whole, counts = sum(self.shares), list(given)
        for _ in range(groups):
            total = sum(counts) + 1
            lacks = [share / whole * total - count for share, count in zip(self.shares, counts, strict=True)]
            counts[lacks.index(max(lacks))] += 1
        return [after - before for after, before in zip(counts, given, strict=True)]
