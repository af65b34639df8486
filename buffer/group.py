"""A task group and its episodes, and in which account each of their tokens is.

Invariants:
- `Episode.placed` is the one place that says where an episode's tokens are; whoever changes an episode takes its tokens out of the
  books before and puts them back after.
- What a trajectory holds was generated before: `kept` never exceeds `generated`, version by version.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from .ledger import STALE, WITHHELD, Counts, Withheld
from .trajectory import Outcome

GroupState = Literal["open", "leased", "ready", "batched", "trained", "discarded"]
EpisodeAccount = Literal["in_flight", "ready", "trained", "discarded"]

FAILED = "failed_"
"""Prefix of the discard reasons that are the outcome of the episode itself."""

UNUSED = "unused"
"""Why tokens are discarded that were generated for an episode and are in none of its trajectories: of a completion that was cut
off, or that the agent did not wait for."""


class Episode(msgspec.Struct):
    """One attempt at one member of a group.

    Attributes:
        id: `group.attempt.member`.
        worker: who plays it.
        account: where its tokens are; `trained` covers tokens withheld from loss too.
        generated: tokens sampled so far by version, as the worker reports them.
        kept: sampled tokens in the delivered trajectories, by version.
        settled: its end was delivered, or the process that played it is gone: no report about it counts any more.
        final: its member needs no other attempt: it was kept, or failed with no retry left.
        withheld: why none of its tokens carries loss; its reward counts among those of its group. None where they may.
        loss_from: once trained, the oldest version whose tokens carried loss; None where none did.
        reason: why it was discarded.
        outcome: how it ended.
        reward: what it earned, while its trajectories are kept.
    """

    id: str
    worker: str = ""
    account: EpisodeAccount = "in_flight"
    generated: Counts = {}
    kept: Counts = {}
    settled: bool = False
    final: bool = False
    withheld: Withheld | None = None
    loss_from: int | None = None
    reason: str = ""
    outcome: Outcome | None = None
    reward: float | None = None

    @property
    def member(self) -> int:
        return int(self.id.rsplit(".", 1)[1])

    def fresh(self, oldest: int) -> int:
        """Kept tokens of `oldest` and later versions."""
        return sum(n for v, n in self.kept.items() if v >= oldest)

    def placed(self) -> Iterator[tuple[str, Counts]]:
        """(account or discard reason, tokens by version); every generated token once."""
        match self.account:
            case "in_flight":
                yield "in_flight", self.generated
            case "discarded":
                yield self.reason, self.generated
            case _:
                yield UNUSED, {v: n - self.kept.get(v, 0) for v, n in self.generated.items() if n > self.kept.get(v, 0)}
                if self.account == "ready":
                    yield "ready", self.kept
                else:
                    yield "trained", {v: n for v, n in self.kept.items() if self._carried_loss(v)}
                    why = WITHHELD + (self.withheld or STALE)
                    yield why, {v: n for v, n in self.kept.items() if not self._carried_loss(v)}

    def _carried_loss(self, version: int) -> bool:
        return self.loss_from is not None and version >= self.loss_from


class Group(msgspec.Struct):
    """The episodes of one task.

    Attributes:
        id: in the order in which groups were first leased.
        env: which of the run's environments.
        task: index of its task there.
        attempt: how often it was leased before.
        wish: the request that the lease answered.
        leased_at: policy version that the engines served then.
        deadline: when the lease ends, in the caller's clock.
        trained_at: the version that was made from it.
    """

    id: int
    env: int = 0
    task: int = 0
    state: GroupState = "open"
    attempt: int = 0
    wish: str = ""
    leased_at: int = 0
    deadline: float = 0.0
    trained_at: int | None = None
    episodes: dict[str, Episode] = {}

    def in_account(self, account: EpisodeAccount) -> list[Episode]:
        return [e for e in self.episodes.values() if e.account == account]

    @property
    def final_members(self) -> set[int]:
        """Members that need no other attempt."""
        return {e.member for e in self.episodes.values() if e.final}

    @property
    def running(self) -> bool:
        """Whether somebody still plays one of its episodes, and would be missed."""
        return any(e.account == "in_flight" for e in self.episodes.values())

    def failures(self, member: int, reason: str) -> int:
        """How many attempts at `member` failed for this discard reason."""
        return sum(e.member == member and e.reason == reason and e.settled for e in self.episodes.values())


Changed = tuple[Group, Sequence[Episode]]
"""A group, and those of its episodes that are not stored as they are."""
