"""The half of the replay machine that workers see: which group may start, who plays it, what came of it.

Invariants:
- An episode is delivered at most once; one whose lease was lost changes no group any more, its tokens stay discarded.
- All episodes of a group that run are of one lease, and so of one worker.
- A member is granted again only when it has no result: its lease was lost, or it failed with a retry left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ..errors import StateError
from .admission import Admission
from .filtration import left_out
from .group import FAILED, Episode, Group, GroupState
from .ledger import Books, Counts
from .messages import Lease
from .rules import Clock, Rules
from .shelf import Shelf
from .trajectory import Outcome

MIN_MEMBERS = 2
"""A group's mean is a baseline from two members on."""

EQUAL_REWARDS = "equal_rewards"
"""Why a group is discarded whose members all earned the same, under dynamic sampling."""

GREEDY = 0
"""The member that is played greedily, under `Rules.greedy`."""

NO_BASELINE = "no_baseline"
"""Why a group is discarded whose greedy member failed: nothing is left that the others could be compared with."""

HELD: tuple[GroupState, ...] = ("leased", "ready")
"""States of groups of which members may run."""

WAITING: tuple[GroupState, ...] = ("open", "leased", "ready", "batched")
"""States of groups that no version was trained on yet."""


class Leases(Shelf):
    """The state of one buffer, and what workers do to it. Time is whatever the caller passes as `now`, in seconds.

    Args:
        clock, groups, books: what a store kept.

    Raises:
        StateError: the store kept it for other environments.
    """

    def __init__(
        self,
        admission: Admission,
        rules: Rules,
        clock: Clock | None = None,
        groups: Iterable[Group] = (),
        books: Books | None = None,
    ) -> None:
        envs = len(admission.shares)
        clock = clock or Clock()
        for numbers in (clock.cursors, clock.trained):
            if numbers and len(numbers) != envs:
                raise StateError(f"the buffer is of a run with {len(numbers)} environments, this one has {envs}")
        super().__init__(groups, books)
        self.admission = admission
        self.rules = rules
        self.version = clock.version
        self.served = clock.served
        self.next_group = clock.next_group
        self.recovered_from = clock.recovered_from
        self.checkpointed = clock.checkpointed
        self.cursors = list(clock.cursors) or [0] * envs
        self.trained = list(clock.trained) or [0] * envs
        self.refilled = clock.refilled
        self._looked_at = -1  # version at which `_retire` looked at all groups that wait
        self._unseen: set[int] = set()  # ready since

    def clock(self) -> Clock:
        """The numbers as they are, to be stored."""
        return Clock(
            self.version,
            self.served,
            self.next_group,
            self.recovered_from,
            self.checkpointed,
            tuple(self.cursors),
            tuple(self.trained),
            self.refilled,
        )

    # --- what may start -------------------------------------------------------------------------------------------

    def outstanding(self) -> list[int]:
        """Groups of each environment between their first lease and the serving of the version trained on them."""
        waiting = [sum(self.number(state, env) for state in WAITING) for env in range(len(self.cursors))]
        return [here + trained for here, trained in zip(waiting, self._unserved(), strict=True)]

    def granted(self, wish: str) -> Lease | None:
        """The lease that answered `wish` while it holds: a request whose answer was lost must not lease another group."""
        group = self._wishes.get(wish)
        return None if group is None else self._lease(group)

    def grant(self, worker: str, now: float, wish: str = "") -> Lease | None:
        """Lease the oldest group that lost its worker, else a new one if admission allows; None when it does not."""
        if self.served is None or self.served < self.admission.oldest_trainable(self.version):
            return None  # what the engines sample now could not be trained on
        group = next(iter(self.of("open")), None) or self._begin()
        if group is None:
            return None
        final = group.final_members
        group.wish = wish
        self._put(group, "leased")
        group.leased_at, group.deadline = self.served, now + self.rules.lease_s
        for member in range(self.rules.group_size):
            if member not in final:
                episode = Episode(f"{group.id}.{group.attempt}.{member}", worker=worker)
                group.episodes[episode.id] = episode
                self._mark(group, episode)
        return self._lease(group)

    def _begin(self) -> Group | None:
        """A new group of the environment that lacks most of its budget; None when all have theirs."""
        settled = [trained - n for trained, n in zip(self.trained, self._unserved(), strict=True)]
        budgets = self.admission.budgets(settled)
        free = [(b - n) / b if b else 0.0 for b, n in zip(budgets, self.outstanding(), strict=True)]
        if max(free) <= 0:
            return None
        env = free.index(max(free))
        group = Group(self.next_group, env, self.cursors[env])
        self._enter(group)
        self.next_group += 1
        self.cursors[env] += 1
        return group

    def _unserved(self) -> list[int]:
        """Groups of each environment that were trained on and whose version is not served yet."""
        counts = [0] * len(self.cursors)
        for group in self.made(above=-1 if self.served is None else self.served):
            counts[group.env] += 1
        return counts

    # --- what runs ------------------------------------------------------------------------------------------------

    def progress(self, worker: str, generated: Mapping[str, Counts], now: float) -> list[str]:
        """Take a worker's running totals and renew the leases they belong to; returns the episodes that nobody waits for."""
        unwanted = []
        for episode_id, counts in generated.items():
            found = self._find(episode_id, self.next_group)
            if found is None or found[1].settled:
                unwanted.append(episode_id)
                continue
            group, episode = found
            more = {v: n for v, n in counts.items() if n > episode.generated.get(v, 0)}
            if more:
                self._require_versions(episode_id, more)
                self._count(group, episode, {**episode.generated, **more})
            if episode.account != "in_flight":
                unwanted.append(episode_id)
            elif episode.worker == worker:
                group.deadline = now + self.rules.lease_s
        return unwanted

    def deliver(
        self, episode_id: str, outcome: Outcome, generated: Counts, kept: Counts, reward: float | None = None
    ) -> bool:
        """An episode ended; `kept` are the sampled tokens of its trajectories, `reward` is what these say that it earned, the
        penalty of a failure among it. False when there is nothing to keep: it is late, known already, failed, or its group is over.

        Raises:
            StateError: nobody leased it, its counts contradict each other, or it names a version that does not exist.
        """
        found = self._find(episode_id, self.next_group)
        if found is None or found[1].settled:
            return False
        group, episode = found
        self._require_counts(episode, generated, kept)
        again = not outcome.trainable and self._may_retry(group, episode, outcome)
        self._count(group, episode, generated)
        with self._moving(group, episode):
            episode.settled, episode.outcome = True, outcome
            if episode.account == "in_flight":
                episode.final = not again
                if sum(kept.values()) and not again:
                    episode.account, episode.kept, episode.reward = "ready", dict(kept), reward
                    if self._greedy(episode.member):
                        episode.withheld = "baseline"
                    elif group.state == "ready":
                        episode.withheld = "late"
                else:
                    episode.account, episode.reason = "discarded", FAILED + (outcome.reason or "nothing_sampled")
        self._complete(group)
        return episode.account == "ready"

    def _may_retry(self, group: Group, episode: Episode, outcome: Outcome) -> bool:
        failures = group.failures(episode.member, FAILED + outcome.reason)
        return group.state == "leased" and failures < self.rules.retries.get(outcome.reason, 0)

    def _complete(self, group: Group) -> None:
        """See whether a leased group has what it needs, or must be leased again for what it lacks.

        Under dynamic sampling members that all earned the same are not enough, however many: the slow ones are waited for, since
        one of them may be what the task has to teach. So a group is discarded for equal rewards only when nobody is left to differ.
        The greedy member, where there is one, is waited for likewise; where it failed for good, nobody else is.
        """
        if group.state != "leased":
            return
        kept = group.in_account("ready")
        final = group.final_members
        ended = len(final) == self.rules.group_size
        alike = self.rules.dynamic_sampling and len({e.reward for e in kept}) == 1
        lacks = self.rules.greedy and all(e.withheld != "baseline" for e in kept)
        if lacks and GREEDY in final:
            self._discard_group(group, NO_BASELINE)
        elif ended and len(kept) < MIN_MEMBERS:
            self._discard_group(group, "too_few_members")
        elif ended and alike:
            self._discard_group(group, EQUAL_REWARDS)
            self.refilled += 1
        elif ended or (len(kept) >= self.rules.min_members and not alike and not lacks):
            for episode in left_out(group, self.rules.filter):
                with self._moving(group, episode):
                    episode.withheld = "filtered"
            self._ready(group)
        elif not group.running:
            self._reopen(group)

    def release(self, worker: str, reason: str) -> None:
        """A worker left or is another process now: its groups are granted again, its running tokens are discarded."""
        for group in self.groups.values():
            if any(e.worker == worker and not e.settled for e in group.episodes.values()):
                if any(e.worker == worker for e in group.in_account("in_flight")):
                    self._lose(group, reason)
                for episode in group.episodes.values():
                    if episode.worker == worker and not episode.settled:
                        episode.settled = True
                        self._mark(group, episode)

    def expire(self, now: float) -> list[Group]:
        """Take back the leases that were not renewed in time; returns their groups."""
        overdue = [g for state in HELD for g in self._by_state[state].values() if g.deadline < now]
        lost = [g for g in overdue if g.running]
        for group in overdue:
            group.deadline = math.inf  # nobody plays it from here on
        for group in lost:
            self._lose(group, "worker_lost")
        return lost

    # --- helpers --------------------------------------------------------------------------------------------------

    def _greedy(self, member: int) -> bool:
        return self.rules.greedy and member == GREEDY

    def _require_versions(self, episode_id: str, counts: Counts) -> None:
        if max(counts, default=0) > self.version:
            raise StateError(
                f"episode {episode_id} has tokens of version {max(counts)}, the buffer is at version {self.version}"
            )

    def _require_counts(self, episode: Episode, generated: Counts, kept: Counts) -> None:
        self._require_versions(episode.id, generated)
        for version, reported in episode.generated.items():
            if generated.get(version, 0) < reported:
                raise StateError(
                    f"episode {episode.id}: {reported} tokens of version {version} were reported, "
                    f"{generated.get(version, 0)} delivered; totals never fall"
                )
        for version, tokens in kept.items():
            if tokens > generated.get(version, 0):
                raise StateError(
                    f"episode {episode.id}: {generated.get(version, 0)} tokens of version {version} were generated, "
                    f"{tokens} are in its trajectories"
                )

    def _lose(self, group: Group, reason: str) -> None:
        for episode in group.in_account("in_flight"):
            self._discard(group, episode, reason)
        if group.state == "leased":
            self._reopen(group)

    def _ready(self, group: Group) -> None:
        self._put(group, "ready")
        self._unseen.add(group.id)

    def _reopen(self, group: Group) -> None:
        group.attempt += 1
        self._put(group, "open")

    def _lease(self, group: Group) -> Lease:
        prefix = f"{group.id}.{group.attempt}."
        members = tuple(sorted(e.member for e in group.episodes.values() if e.id.startswith(prefix)))
        oldest = self.admission.oldest_trainable(group.leased_at)
        greedy = tuple(member for member in members if self._greedy(member))
        return Lease(group.id, group.attempt, members, group.leased_at, oldest, group.env, group.task, greedy)
