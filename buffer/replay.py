"""The replay state machine: which state each group is in, which worker may run it, what a batch is. Pure: no socket, task, clock or
tensor.

            grant          enough members ended       take             commit
    (new) ─────────> leased ─────────────────> ready ─────> batched ─────────> trained
      ^               │  ^                       │ ^           │                  │
      │   lease lost, │  │ grant                 │ └───────────┴── recover ───────┘
      │ a member to   v  │                       v           │ discard_batch
      │ try again    open ┘                  discarded <─────┘
      └── admission                            (too old, too few members, equal rewards, no baseline; the critic alone learned)

A step that fails on a batch says nothing yet: the learner starts again and takes it again. Of a batch on which it fails again the
groups that were there both times are discarded as `unusable`; those that a rank proves to be at fault are discarded at once.

Invariants:
- A group is numbered when it is first leased; batches take the oldest ready groups of each environment.
- `version` never decreases: after a rollback the recovered weights get a number above every one used before, so that a version
  names one set of weights for the whole run.
- A batch is trained under the bound that it was taken under, also where the rules change or the buffer restarts meanwhile. Where
  the shards of a buffer took their parts under different ones, the strictest holds for all.
- The clock of several shards has no groups. It counts versions as a shard does, and a shard follows it where they differ.
- Of one batch at most one failure counts between two starts of the learner, however many of its ranks report it.
- No more than `UNUSABLE_BATCHES` batches of a run lose groups as unusable; each of several shards counts those that lost groups of
  its own.
- Every change keeps the ledger balanced, see `group_table`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from ..errors import StateError
from .admission import Admission, LiveRules, ReplayConfig, ReplayCounters
from .group_table import Episode, Group, GroupTable
from .lease_manager import LeaseManager
from .ledger import Unstepped, VersionLedgers
from .task_table import TaskTable

STRAGGLER = "straggler"  # discard reason of an episode that still ran when its group was put into a batch

UNUSABLE = "unusable"  # discard reason of a group that cannot be trained on
# Batches of which groups may be set aside as unusable, in a whole run. Damaged data is rare: where more fail, the cause is the
# config, the code or the machine, and to go on would train on a rest.
UNUSABLE_BATCHES = 16


class Replay:
    """The state of one buffer; its methods are what the learner does.

    Args:
        counters, groups, ledgers: what the store holds.
        tasks: see `LeaseManager`.

    Attributes:
        admission, config: the rules in force, see `configure`.
        table: the groups, the ledger and the counters.
        leases: what workers do.

    Raises:
        StateError: the store is of a run with other environments.
    """

    def __init__(
        self,
        admission: Admission,
        config: ReplayConfig,
        counters: ReplayCounters | None = None,
        groups: Iterable[Group] = (),
        ledgers: VersionLedgers | None = None,
        tasks: TaskTable | None = None,
    ) -> None:
        self.admission = admission
        self.config = config
        self.table = GroupTable(groups, ledgers, counters)
        self.leases = LeaseManager(admission, config, self.table, tasks)
        self._staleness_checked_at = -1

    @property
    def version(self) -> int:
        """Of the learner's weights."""
        return self.table.counters.version

    @property
    def served(self) -> int | None:
        """The version that the fleet serves now; None while no replica serves one, and before that is known after a restart."""
        return self.leases.served

    @property
    def next_batch(self) -> int:
        """The version that the next batch is taken at."""
        return self.version + self._has_batch

    @property
    def taken_under(self) -> Admission:
        """The bound of the batch that is taken; without one the bound in force."""
        return self.table.counters.taken or self.admission

    def configure(self, rules: LiveRules) -> int:
        """Change the rules. A higher bound acts with the next lease. A lower one acts with the next batch, and no new group starts
        until fewer are outstanding than it allows. Returns the version at which the first batch under these rules is taken."""
        replace = msgspec.structs.replace
        self.admission = replace(
            self.admission, max_staleness=rules.max_staleness, groups_per_batch=rules.groups_per_batch
        )
        self.config = replace(self.config, min_members=rules.min_members, on_deadline=rules.on_deadline)
        self.leases.configure(self.admission, self.config)
        self._staleness_checked_at = -1
        return self.next_batch

    def take(self, version: int) -> list[Group] | None:
        """The batch for `version`, oldest groups first; None when there is not enough, or with `wait` while a group is late.

        Repeating the call returns the same batch until it is committed.
        """
        if version != self.version:
            raise StateError(f"a batch was asked for version {version}, the buffer is at version {self.version}")
        if self._has_batch:
            return self.table.in_state("batched")
        self._discard_stale(version)
        quotas = list(self.admission.quotas(self.table.counters.trained))
        if any(self.table.count("ready", env) < quota for env, quota in enumerate(quotas)):
            return None
        if self.config.on_deadline == "wait" and any(
            self.admission.last_chance(version, g.leased_at) for g in self.table.in_state("open", "leased")
        ):
            return None
        for group in self.table.in_state("ready"):
            if quotas[group.env]:
                quotas[group.env] -= 1
                for episode in group.in_account("in_flight"):
                    self.table.discard(group, episode, STRAGGLER)
                self.table.set_state(group, "batched")
        self.table.counters.taken = self.admission
        return self.table.in_state("batched")

    def fresh(self, version: int) -> list[Episode]:
        """Delivered episodes outside of batches that hold tokens of `version`, the newest group first. Without greedy ones: an
        engine's log-prob of a greedy token is not of the distribution that the others are sampled from."""
        waiting = self.table.in_state("open", "leased", "ready")
        episodes = [e for g in reversed(waiting) for e in g.in_account("ready")]
        return [e for e in episodes if e.kept.get(version) and e.withheld != "baseline"]

    def commit(self, version: int, oldest: int = 0) -> None:
        """The batch of `version` is in the weights, which are now `version + 1`. Repeating it changes nothing. No token older than
        `oldest` carried loss, where that is stricter than the bound here.

        Raises:
            StateError: there is no such batch, or the ledger does not balance; nothing has changed then.
        """
        counters = self.table.counters
        if version < self.version and self.table.trained_in(above=version, up_to=version + 1):
            return
        if version + 1 == self.version and counters.recovered_from is None:
            return  # of a process without groups, or whose groups have left memory
        batch = self.table.in_state("batched")
        if version != self.version or not self._has_batch:
            raise StateError(f"commit of version {version} without a batch; the buffer is at version {self.version}")
        if gap := self.table.ledgers.gap():
            raise StateError(f"the ledger does not balance: {gap}")
        oldest = max(oldest, self.taken_under.oldest_trainable(version))
        for group in batch:
            self.table.set_state(group, "trained", version + 1)
            counters.trained[group.env] += 1
            counters.suspects.pop(group.id, None)
            ready = group.in_account("ready")
            with self.table.update(group, *ready):
                for episode in ready:
                    episode.account, episode.loss_from = "trained", None if episode.withheld else oldest
        counters.version, counters.recovered_from, counters.taken = version + 1, None, None

    def discard_batch(self, version: int, groups: Sequence[int], reason: Unstepped) -> None:
        """The batch of `version`, which is `groups`, made no version. No recovery returns it. Repeating it changes nothing.

        Raises:
            StateError: there is no such batch; nothing has changed then.
        """
        counters = self.table.counters
        batch = {group.id: group for group in self.table.in_state("batched")}
        if version != self.version or batch.keys() != set(groups):
            known = [group for one in groups if (group := self.table.groups.get(one)) is not None]
            if all(group.state == "discarded" for group in known) and all(g < counters.next_group for g in groups):
                return
            raise StateError(
                f"groups {', '.join(map(str, groups))} are not the batch of version {version}; the buffer is at version "
                f"{self.version}, its batch is {', '.join(map(str, batch)) or 'empty'}"
            )
        for group in batch.values():
            counters.suspects.pop(group.id, None)
            self.table.discard_group(group, reason)
        counters.taken = None

    def set_aside(self, version: int, groups: Collection[int]) -> list[Group]:
        """Groups of the batch of `version` cannot be trained on, as a rank has proven: they are discarded, the others are ready
        again. Returns those that were not discarded before.

        Raises:
            StateError: the buffer is at another version, or too many batches of this run were unusable; nothing has changed then.
        """
        self._require_version(version)
        counters = self.table.counters
        batch = self.table.in_state("batched")
        found = [group for group in self.table.in_state("batched", "ready") if group.id in groups]
        if not found:
            return []
        if counters.unusable + bool(batch) > UNUSABLE_BATCHES:
            raise StateError(
                f"{UNUSABLE_BATCHES} batches of this run could not be trained on before: the cause is not the data of one"
            )
        counters.unusable += bool(batch)  # ranks may prove one group each
        for group in batch:
            self.table.set_state(group, "ready")
        for group in found:
            counters.suspects.pop(group.id, None)
            self.table.discard_group(group, UNUSABLE)
        counters.taken = None
        return found

    def step_failed(self, version: int) -> list[Group]:
        """A rank failed to step on the batch of `version`, and does not know by which group. Returns the groups that are set aside
        for it: none at the first failure. Raises as `set_aside`."""
        self._require_version(version)
        counters = self.table.counters
        now, suspects = counters.recoveries, counters.suspects
        batch = self.table.in_state("batched")
        if again := [group.id for group in batch if suspects.get(group.id, now) < now]:
            return self.set_aside(version, again)
        suspects |= {group.id: now for group in batch if group.id not in suspects}
        return []

    @property
    def _has_batch(self) -> bool:
        """Whether a batch is taken; that of a clock has no groups."""
        return bool(self.table.in_state("batched")) or self.table.counters.taken is not None

    def _require_version(self, version: int) -> None:
        if version != self.version:
            raise StateError(f"a report about the batch of version {version}; the buffer is at version {self.version}")

    def mark_served(self, version: int | None) -> None:
        """The fleet serves `version`; None: no replica serves one now, so nothing is leased."""
        if version is not None and version > self.version:
            raise StateError(f"version {version} cannot be served; the buffer is at version {self.version}")
        counters = self.table.counters
        self.leases.served = version
        if version is not None:
            counters.served = max(version, -1 if counters.served is None else counters.served)

    def mark_checkpointed(self, version: int) -> None:
        """A checkpoint holds all commits up to `version`."""
        if version > self.version:
            raise StateError(f"a checkpoint of version {version}; the buffer is at version {self.version}")
        counters = self.table.counters
        counters.checkpointed = max(counters.checkpointed, version)

    def recover(self, restored: int, version: int | None = None) -> int:
        """Roll back to weights that contain the commits up to version `restored`; returns the version to publish them under. To a
        shard the clock's is given as `version`.

        Raises:
            StateError: so many commits are not known here, or they are no longer rolled back; or the clock is behind this shard.
        """
        counters = self.table.counters
        if version is not None and version < counters.version:
            raise StateError(f"the clock is at version {version}, this shard at {counters.version}: another run's?")
        if restored > counters.version:
            raise StateError(
                f"the checkpoint is of version {restored}, the buffer is at version {counters.version}: another run's?"
            )
        if restored < counters.checkpointed:
            raise StateError(
                f"weights of version {restored} cannot be resumed from: commits up to {counters.checkpointed} are in a checkpoint "
                "and no longer rolled back; resume from that checkpoint, or start a new run"
            )
        for group in self.table.trained_in(above=restored):
            trained = group.in_account("trained")
            with self.table.update(group, *trained):
                for episode in trained:
                    episode.account, episode.loss_from = "ready", None
            counters.trained[group.env] -= 1
            self.table.set_state(group, "ready")
        for group in self.table.in_state("batched"):
            self.table.set_state(group, "ready")
        counters.taken = None
        counters.recoveries += 1
        if version is None:
            known = restored in (counters.version, counters.recovered_from)
            version = counters.version + (not known)
        if version != counters.version:
            counters.version, counters.recovered_from = version, restored
        return version

    def _discard_stale(self, version: int) -> None:
        """Discard ready groups without a token within the bound, and under `drop` every group with a token past it. A group is
        checked once per version: an episode delivered after that is late and carries no loss."""
        oldest, drop = self.admission.oldest_trainable(version), self.config.on_deadline == "drop"
        first_check = version != self._staleness_checked_at
        unchecked, self.table.newly_ready = self.table.newly_ready, set()
        self._staleness_checked_at = version
        for group in self.table.in_state("ready"):
            if first_check or group.id in unchecked:
                episodes = [e for e in group.in_account("ready") if not e.withheld]
                fresh = sum(e.fresh(oldest) for e in episodes)
                if fresh == 0 or (drop and fresh < sum(sum(e.kept.values()) for e in episodes)):
                    self.table.discard_group(group, "stale")
        if drop and first_check:
            for group in self.table.in_state("open", "leased"):
                if group.leased_at < oldest:
                    self.table.discard_group(group, "stale")
