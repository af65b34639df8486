"""What the replay state machine is told once, and what it remembers besides the groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

OnDeadline = Literal["withhold", "wait", "drop"]
Filter = Literal["none", "best", "best_random", "best_worst"]


class Rules(msgspec.Struct, frozen=True):
    """How groups are made complete.

    Attributes:
        group_size: members of a group.
        min_members: a group is complete as soon as so many of them were kept; the others are late.
        on_deadline: what becomes of tokens past the staleness bound.
        lease_s: a lease ends after so many seconds without a report.
        retries: reason of a failure -> how often a member that failed so is granted again.
        dynamic_sampling: a group whose members all earned the same is discarded; another one takes its place.
        filter: which of a group's episodes are trained on, by their rewards (`filtration`).
        greedy: member 0 of each group is played greedily; the others are compared with it, and no group is complete without it.
    """

    group_size: int
    min_members: int
    on_deadline: OnDeadline
    lease_s: float
    retries: Mapping[str, int] = {}
    dynamic_sampling: bool = False
    filter: Filter = "none"
    greedy: bool = False


class Clock(msgspec.Struct, frozen=True):
    """The machine's own numbers.

    Attributes:
        version: of the learner's weights.
        served: version of the engines; None before the first push.
        next_group: number of the group that is leased next.
        recovered_from: version of the checkpoint that `version` was recovered from, until the next commit.
        checkpointed: commits up to here are in a checkpoint.
        cursors: the next task of each environment.
        trained: groups of each environment that were trained on.
        refilled: groups that were discarded because their members all earned the same.
    """

    version: int = 0
    served: int | None = None
    next_group: int = 0
    recovered_from: int | None = None
    checkpointed: int = 0
    cursors: tuple[int, ...] = ()
    trained: tuple[int, ...] = ()
    refilled: int = 0

    @property
    def over(self) -> int:
        """The last version that is both served and in a checkpoint: nothing that made it is rolled back. -1 before there is one."""
        return min(self.checkpointed, -1 if self.served is None else self.served)
