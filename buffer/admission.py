"""How much may be outstanding, and how old a token may be: the staleness bound as arithmetic.

Invariants:
- At most `(max_staleness + 1) * groups_per_batch` groups are outstanding. A group is outstanding from its first lease until the
  engines *serve* the version that was trained on it (or until it is discarded); a commit alone frees nothing.
- With `max_staleness = 0` therefore no group is in flight while the weights change: synchronous training.
- At version v no token older than `v - max_staleness` carries loss, whatever admission let through.
"""

from __future__ import annotations

import msgspec


class Admission(msgspec.Struct, frozen=True):
    """The bound of one run. `max_staleness` in policy versions, `groups_per_batch` in task groups."""

    max_staleness: int
    groups_per_batch: int

    @property
    def limit(self) -> int:
        """Groups that may be outstanding at once."""
        return (self.max_staleness + 1) * self.groups_per_batch

    def admits(self, outstanding: int) -> bool:
        """Whether one more group may start while `outstanding` are under way."""
        return outstanding < self.limit

    def oldest_trainable(self, version: int) -> int:
        """The oldest policy version whose tokens may carry loss in the batch taken at `version`."""
        return max(0, version - self.max_staleness)

    def last_chance(self, version: int, leased_at: int) -> bool:
        """Whether tokens sampled at `leased_at` are within the bound at `version` and past it at `version + 1`."""
        return leased_at <= version - self.max_staleness
