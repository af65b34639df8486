"""The staleness bound as arithmetic: how many groups may be outstanding, how old a token may be, which environment is next. Pure.

Invariants:
- At most `(max_staleness + 1) * groups_per_batch` groups are outstanding, plus those that a rollback returned. A group is
  outstanding from its first lease until the engines *serve* the version that was trained on it, or until it is discarded; a commit
  alone frees nothing.
- With `max_staleness = 0` no group is in flight while the weights change: synchronous training.
- At version v no token older than `v - max_staleness` carries loss, whatever was admitted.
- The bound may change while a run goes on (`LiveRules`). A batch keeps the bound that it was taken under.
- Every environment has its share of every batch, and of the outstanding groups: fast environments do not crowd out a slow one, and
  versions do not advance without it.
- Each shard of a buffer has a fixed part of every batch, and of the outstanding groups. The parts of all shards are a whole batch,
  so that what holds of each holds of their sum. The clock of several shards has no part.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, structs

from ..configs.schema import Buffer

OnDeadline = Literal["withhold", "wait", "drop"]
Filter = Literal["none", "untruncated", "best", "best_random", "best_worst"]


class Admission(msgspec.Struct, frozen=True):
    """The bound of one run. `max_staleness` in policy versions, `groups_per_batch` in task groups of all shards; `shares` of the
    environments, in any unit. It is applied by process `shard` of the buffer, which has `shards`: the only one is number 0; of
    several, 0 is their clock and the shards count from 1."""

    max_staleness: int
    groups_per_batch: int
    shares: tuple[float, ...] = (1.0,)
    shard: int = 0
    shards: int = 1

    @property
    def first_group(self) -> int:
        """The number of this shard's first group; those that follow are `shards` apart."""
        return max(0, self.shard - 1)

    @property
    def part(self) -> int:
        """Groups of a batch that come from this process."""
        if self.shards == 1:
            return self.groups_per_batch
        return (self.groups_per_batch + self.shards - self.shard) // self.shards if self.shard else 0

    def budgets(self, settled: Sequence[int]) -> tuple[int, ...]:
        """Groups of each environment that may be outstanding here, after `settled` groups of each were trained and served."""
        return self._next(settled, (self.max_staleness + 1) * self.part)

    def quotas(self, trained: Sequence[int]) -> tuple[int, ...]:
        """Groups of each environment here in the next batch, after `trained` groups of each were trained on."""
        return self._next(trained, self.part)

    def _next(self, given: Sequence[int], groups: int) -> tuple[int, ...]:
        """Of `groups` more. Each shard begins where the one before ends its part of the first batch, so that all together take the
        environments in turn; otherwise each would begin with the same one."""
        before = sum(structs.replace(self, shard=other).part for other in range(1, self.shard))
        ahead = _apportion(self.shares, (0,) * len(self.shares), before)
        return _apportion(self.shares, tuple(n + more for n, more in zip(given, ahead, strict=True)), groups)

    def oldest_trainable(self, version: int) -> int:
        """The oldest policy version whose tokens may carry loss in the batch taken at `version`."""
        return max(0, version - self.max_staleness)

    def last_chance(self, version: int, leased_at: int) -> bool:
        """Whether tokens sampled at `leased_at` are within the bound at `version` and past it at `version + 1`."""
        return leased_at <= version - self.max_staleness


@functools.lru_cache(maxsize=16)  # every lease asks; the answer changes only after a step
def _apportion(shares: tuple[float, ...], given: tuple[int, ...], groups: int) -> tuple[int, ...]:
    """`groups` more, one by one, so that no environment is ever a whole group from its share: the quota method (Balinski and Young,
    Amer. Math. Monthly 82, 1975). Each goes to the environment below its share whose next group is due first."""
    whole, counts = sum(shares), list(given)
    for total in range(sum(given) + 1, sum(given) + 1 + groups):
        below = [env for env, share in enumerate(shares) if share * total > whole * counts[env]]
        counts[min(below, key=lambda env: (counts[env] + 1) / shares[env])] += 1
    return tuple(after - before for after, before in zip(counts, given, strict=True))


class ReplayConfig(msgspec.Struct, frozen=True):
    """When a group is complete."""

    group_size: int  # members of a group
    min_members: int  # a group is complete once this many were kept; the others are late
    on_deadline: OnDeadline  # what happens to tokens past the staleness bound
    lease_s: float  # a lease ends after this many seconds without a report
    retries: Mapping[str, int] = {}  # failure reason -> how often a member that failed so is leased again
    # A group whose members all have the same reward is discarded; another one replaces it.
    dynamic_sampling: bool = False
    filter: Filter = "none"  # which of a group's episodes are trained on (`sample_filter`)
    # Member 0 of each group is sampled greedily as the others' baseline; no group is complete without it.
    greedy: bool = False


class LiveRules(msgspec.Struct, frozen=True):
    """What `slipstream set` changes of a buffer that serves: fields of `Admission` and `ReplayConfig`."""

    max_staleness: Annotated[int, Meta(ge=0, lt=1 << 31)]
    groups_per_batch: Annotated[int, Meta(ge=1, lt=1 << 31)]
    min_members: Annotated[int, Meta(ge=1, lt=1 << 31)]
    on_deadline: OnDeadline

    @classmethod
    def of(cls, config: Buffer) -> LiveRules:
        members = config.min_members or config.group_size
        return cls(config.max_staleness, config.groups_per_batch, members, config.on_deadline)


class ReplayCounters(msgspec.Struct):
    """The state machine's own numbers; stored with every transaction."""

    version: int = 0  # of the learner's weights
    served: int | None = None  # newest version that the fleet has served; None before the first push
    next_group: int = 0  # number of the next new group
    # Version of the checkpoint that `version` was recovered from, until the next commit.
    recovered_from: int | None = None
    checkpointed: int = 0  # commits up to this version are in a checkpoint
    cursors: list[int] = []  # the next task of each environment
    trained: list[int] = []  # groups of each environment that were trained on
    refilled: int = 0  # groups that were discarded because their members all had the same reward
    outcomes: dict[
        str, int
    ] = {}  # episodes that ended, by `Outcome.label`; without those that the buffer had cancelled
    recoveries: int = 0  # how often a learner started; how often it did since a step failed is what counts
    # Groups that were in a batch whose step failed -> `recoveries` then; without those that were trained on since.
    suspects: dict[int, int] = {}
    unusable: int = 0  # batches of which groups were set aside, because they cannot be trained on
    taken: Admission | None = None  # what the batch that is taken was taken under; None without a batch
    shard: int = 0  # which process of the buffer they are of, as in `Admission`
    shards: int = 1

    @property
    def settled(self) -> int:
        """The last version that is both served and in a checkpoint: what made it is never rolled back. -1 before there is one."""
        return min(self.checkpointed, -1 if self.served is None else self.served)

    def copy(self) -> ReplayCounters:
        cursors, trained, outcomes = list(self.cursors), list(self.trained), dict(self.outcomes)
        suspects = dict(self.suspects)
        return msgspec.structs.replace(self, cursors=cursors, trained=trained, outcomes=outcomes, suspects=suspects)
