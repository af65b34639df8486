"""How much may be outstanding, how old a token may be, and whose turn it is: the staleness bound as arithmetic.

Invariants:
- At most `(max_staleness + 1) * groups_per_batch` groups are outstanding, and those that a rollback gave back. A group is
  outstanding from its first lease until the engines *serve* the version that was trained on it (or until it is discarded); a
  commit alone frees nothing.
- With `max_staleness = 0` therefore no group is in flight while the weights change: synchronous training.
- At version v no token older than `v - max_staleness` carries loss, whatever admission let through.
- Every environment has its part of every batch, and may have no more outstanding than its part of the batches that the bound
  covers: a slow one is neither crowded out by fast ones nor made stale by versions that went on without it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec


class Admission(msgspec.Struct, frozen=True):
    """The bound of one run. `max_staleness` in policy versions, `groups_per_batch` in task groups; `shares` of the environments,
    in any unit."""

    max_staleness: int
    groups_per_batch: int
    shares: tuple[float, ...] = (1.0,)

    def budgets(self, settled: Sequence[int]) -> tuple[int, ...]:
        """Groups of each environment that may be outstanding at once, after `settled` groups of each were trained and served."""
        return _apportion(self.shares, tuple(settled), (self.max_staleness + 1) * self.groups_per_batch)

    def quotas(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Groups of each environment in the next batch, after `trained` groups of each were trained on."""
        return _apportion(self.shares, tuple(trained), self.groups_per_batch)

    def oldest_trainable(self, version: int) -> int:
        """The oldest policy version whose tokens may carry loss in the batch taken at `version`."""
        return max(0, version - self.max_staleness)

    def last_chance(self, version: int, leased_at: int) -> bool:
        """Whether tokens sampled at `leased_at` are within the bound at `version` and past it at `version + 1`."""
        return leased_at <= version - self.max_staleness


@functools.lru_cache(maxsize=16)  # asked at every lease, and other only after a step
def _apportion(shares: tuple[float, ...], given: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """`groups` more, one by one, so that nobody is ever a whole group from its share: the quota method (Balinski and
    Young, Amer. Math. Monthly 82, 1975). Of those that are below their share, the one whose next group is due first has it."""
    whole, counts = sum(shares), list(given)
    for total in range(sum(given) + 1, sum(given) + 1 + groups):
        below = [env for env, share in enumerate(shares) if share * total > whole * counts[env]]
        counts[min(below, key=lambda env: (counts[env] + 1) / shares[env])] += 1
    return tuple(after - before for after, before in zip(counts, given, strict=True))
