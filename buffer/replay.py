"""The replay state machine: which group is where, who may play it, what a batch is. Pure: no socket, task, clock or tensor.

            grant          enough members ended       take             commit
    (new) ─────────> leased ─────────────────> ready ─────> batched ─────────> trained
      ^               │  ^                       │ ^           │                  │
      │   lease lost, │  │ grant                 │ └───────────┴── recover ───────┘
      │ a member to   v  │                       v
      │ try again    open ┘                  discarded (too old, too few members)
      └── admission

Invariants:
- A group is numbered when it is first leased; batches take the oldest ready groups of each environment.
- An episode is delivered at most once; one whose lease was lost changes no group any more, its tokens stay discarded.
- `version` never goes back: after a rollback the recovered weights get a number above every one used before, so that a
  version names one set of weights for ever.
- Every change keeps the books closed, see `shelf`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..errors import StateError
from .admission import Admission
from .group import FAILED, Episode, Group, GroupState
from .ledger import Books, Counts
from .messages import Lease
from .rules import Clock, Rules
from .shelf import Shelf
from .trajectory import Outcome

MIN_MEMBERS = 2
"""A group's mean is a baseline from two members on."""

STRAGGLER = "straggler"
"""Why an episode is discarded whose group was taken while it ran."""

WAITING: tuple[GroupState, ...] = ("open", "leased", "ready", "batched")
"""States of groups that no version was trained on yet."""


class Replay(Shelf):
    """The state of one buffer. Time is whatever the caller passes as `now`, in seconds.

    Args:
        clock, groups, by_version: what a store kept; `groups` by id.

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
        if clock.cursors and len(clock.cursors) != envs:
            raise StateError(f"the buffer is of a run with {len(clock.cursors)} environments, this one has {envs}")
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
        )

    # --- what may start -------------------------------------------------------------------------------------------

    def outstanding(self) -> list[int]:
        """Groups of each environment between their first lease and the serving of the version trained on them."""
        counts = [0] * len(self.cursors)
        for group in self.groups.values():
            counts[group.env] += group.state in WAITING or self._unserved(group)
        return counts

    def granted(self, wish: str) -> Lease | None:
        """The lease that answered `wish` while it holds: a request whose answer was lost must not lease another group."""
        return next((self._lease(g) for g in self.groups.values() if g.state == "leased" and g.wish == wish), None)

    def grant(self, worker: str, now: float, wish: str = "") -> Lease | None:
        """Lease the oldest group that lost its worker, else a new one if admission allows; None when it does not."""
        if self.served is None or self.served < self.admission.oldest_trainable(self.version):
            return None  # what the engines sample now could not be trained on
        group = next((g for g in self.groups.values() if g.state == "open"), None) or self._begin()
        if group is None:
            return None
        final = group.final_members
        group.state, group.wish = "leased", wish
        group.leased_at, group.deadline = self.served, now + self.rules.lease_s
        for member in range(self.rules.group_size):
            if member not in final:
                episode = Episode(f"{group.id}.{group.attempt}.{member}", worker=worker)
                group.episodes[episode.id] = episode
        self._changed.add(group.id)
        return self._lease(group)

    def _begin(self) -> Group | None:
        """A new group of the environment that lacks most of its budget; None when all have theirs."""
        unserved = [0] * len(self.cursors)
        for group in self.groups.values():
            unserved[group.env] += self._unserved(group)
        settled = [trained - n for trained, n in zip(self.trained, unserved, strict=True)]
        budgets = self.admission.budgets(settled)
        free = [(b - n) / b if b else 0.0 for b, n in zip(budgets, self.outstanding(), strict=True)]
        if max(free) <= 0:
            return None
        env = free.index(max(free))
        group = Group(self.next_group, env, self.cursors[env])
        self.groups[group.id] = group
        self.next_group += 1
        self.cursors[env] += 1
        return group

    def _unserved(self, group: Group) -> bool:
        served = -1 if self.served is None else self.served
        return group.state == "trained" and (group.trained_at or 0) > served

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

    def deliver(self, episode_id: str, outcome: Outcome, generated: Counts, kept: Counts) -> bool:
        """An episode ended; `kept` are the sampled tokens of its trajectories. False when there is nothing to keep: it is late,
        known already, failed, or its group is over.

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
                    episode.account, episode.kept, episode.late = "ready", dict(kept), group.state == "ready"
                else:
                    episode.account, episode.reason = "discarded", FAILED + (outcome.reason or "nothing_sampled")
        self._complete(group)
        return episode.account == "ready"

    def _may_retry(self, group: Group, episode: Episode, outcome: Outcome) -> bool:
        failures = group.failures(episode.member, FAILED + outcome.reason)
        return group.state == "leased" and failures < self.rules.retries.get(outcome.reason, 0)

    def _complete(self, group: Group) -> None:
        """See whether a leased group has what it needs, or must be leased again for what it lacks."""
        if group.state != "leased":
            return
        kept = len(group.in_account("ready"))
        if len(group.final_members) == self.rules.group_size and kept < MIN_MEMBERS:
            self._discard_group(group, "too_few_members")
        elif kept >= self.rules.min_members or len(group.final_members) == self.rules.group_size:
            group.state = "ready"
        elif not group.running:
            group.state, group.attempt = "open", group.attempt + 1

    def release(self, worker: str, reason: str) -> None:
        """A worker left or is another process now: its groups are granted again, its running tokens are discarded."""
        for group in self.groups.values():
            if any(e.worker == worker and not e.settled for e in group.episodes.values()):
                if any(e.worker == worker for e in group.in_account("in_flight")):
                    self._lose(group, reason)
                for episode in group.episodes.values():
                    episode.settled = episode.settled or episode.worker == worker
                self._changed.add(group.id)

    def expire(self, now: float) -> list[Group]:
        """Take back the leases that were not renewed in time; returns their groups."""
        lost = [g for g in self.groups.values() if g.state in ("leased", "ready") and g.deadline < now and g.running]
        for group in lost:
            self._lose(group, "worker_lost")
        return lost

    # --- what is trained ------------------------------------------------------------------------------------------

    def take(self, version: int) -> list[Group] | None:
        """The batch for `version`, oldest groups first; None when there is not enough, or a late group is waited for.

        Repeating the call returns the same batch until it is committed.
        """
        if version != self.version:
            raise StateError(f"a batch was asked for version {version}, the buffer is at version {self.version}")
        batch = [g for g in self.groups.values() if g.state == "batched"]
        if batch:
            return batch
        self._retire(version)
        if self.rules.on_deadline == "wait" and self._late(version):
            return None
        for env, quota in enumerate(self.admission.quotas(self.trained)):
            ready = [g for g in self.groups.values() if g.state == "ready" and g.env == env]
            if len(ready) < quota:
                return None
            batch += ready[:quota]
        for group in batch:
            for episode in group.in_account("in_flight"):
                self._discard(group, episode, STRAGGLER)
            group.state = "batched"
            self._changed.add(group.id)
        return sorted(batch, key=lambda g: g.id)

    def fresh(self, version: int) -> list[Episode]:
        """Delivered episodes outside of batches that hold tokens of `version`, the youngest first."""
        waiting = [g for g in reversed(self.groups.values()) if g.state in ("open", "leased", "ready")]
        return [e for g in waiting for e in g.in_account("ready") if e.kept.get(version)]

    def commit(self, version: int) -> None:
        """The batch of `version` is in the weights, which are now `version + 1`. Repeating it changes nothing.

        Raises:
            StateError: there is no such batch, or the ledger does not close; nothing has changed then.
        """
        if version < self.version and any(g.trained_at == version + 1 for g in self.groups.values()):
            return
        batch = [g for g in self.groups.values() if g.state == "batched"]
        if version != self.version or not batch:
            raise StateError(f"commit of version {version} without a batch; the buffer is at version {self.version}")
        if gap := self.books.gap():
            raise StateError(f"the ledger does not close: {gap}")
        oldest = self.admission.oldest_trainable(version)
        for group in batch:
            group.state, group.trained_at = "trained", version + 1
            self.trained[group.env] += 1
            for episode in group.in_account("ready"):
                with self._moving(group, episode):
                    episode.account, episode.loss_from = "trained", None if episode.late else oldest
        self.version, self.recovered_from = version + 1, None

    def serve(self, version: int) -> None:
        """The engines serve `version`."""
        if version > self.version:
            raise StateError(f"version {version} cannot be served; the buffer is at version {self.version}")
        self.served = version

    def checkpoint(self, version: int) -> None:
        """A checkpoint holds all commits up to `version`."""
        if version > self.version:
            raise StateError(f"a checkpoint of version {version}; the buffer is at version {self.version}")
        self.checkpointed = max(self.checkpointed, version)

    def recover(self, kept: int) -> int:
        """Roll back to weights that contain the commits up to version `kept`; returns the version to publish them under."""
        if kept > self.version:
            raise StateError(
                f"the checkpoint is of version {kept}, the buffer is at version {self.version}: another run's?"
            )
        if kept < self.checkpointed:
            raise StateError(
                f"weights of version {kept} cannot be resumed from: commits up to {self.checkpointed} are in a checkpoint "
                "and no longer rolled back; resume from that checkpoint, or start a new run"
            )
        for group in self.groups.values():
            rolled_back = group.state == "trained" and (group.trained_at or 0) > kept
            if rolled_back or group.state == "batched":
                for episode in group.in_account("trained"):
                    with self._moving(group, episode):
                        episode.account, episode.loss_from = "ready", None
                self.trained[group.env] -= rolled_back
                group.state, group.trained_at = "ready", None
                self._changed.add(group.id)
        if kept != self.version and self.recovered_from != kept:
            self.version, self.recovered_from = self.version + 1, kept
        return self.version

    def forget(self) -> None:
        """Drop from memory the settled groups that no recovery can need."""
        over = min(self.checkpointed, -1 if self.served is None else self.served)
        for group in list(self.groups.values()):
            ended = group.state == "discarded" or (group.state == "trained" and (group.trained_at or 0) <= over)
            if ended and group.id not in self._changed and all(e.settled for e in group.episodes.values()):
                del self.groups[group.id]

    # --- helpers --------------------------------------------------------------------------------------------------

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
            group.state, group.attempt = "open", group.attempt + 1
        self._changed.add(group.id)

    def _lease(self, group: Group) -> Lease:
        prefix = f"{group.id}.{group.attempt}."
        members = tuple(sorted(e.member for e in group.episodes.values() if e.id.startswith(prefix)))
        oldest = self.admission.oldest_trainable(group.leased_at)
        return Lease(group.id, group.attempt, members, group.leased_at, oldest, group.env, group.task)

    def _late(self, version: int) -> bool:
        under_way = (g for g in self.groups.values() if g.state in ("open", "leased"))
        return any(self.admission.last_chance(version, g.leased_at) for g in under_way)

    def _retire(self, version: int) -> None:
        """Discard what the bound leaves nothing of, and with `drop` whatever it touches."""
        oldest, drop = self.admission.oldest_trainable(version), self.rules.on_deadline == "drop"
        for group in list(self.groups.values()):
            if group.state == "ready":
                episodes = [e for e in group.in_account("ready") if not e.late]
                fresh = sum(e.fresh(oldest) for e in episodes)
                if fresh == 0 or (drop and fresh < sum(sum(e.kept.values()) for e in episodes)):
                    self._discard_group(group, "stale")
            elif group.state in ("open", "leased") and drop and group.leased_at < oldest:
                self._discard_group(group, "stale")
