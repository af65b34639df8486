"""The replay state machine: which group is where, who may play it, what a batch is. Pure: no socket, task, clock or tensor.

            grant          enough members ended       take             commit
    (new) ─────────> leased ─────────────────> ready ─────> batched ─────────> trained
      ^               │  ^                       │ ^           │                  │
      │   lease lost, │  │ grant                 │ └───────────┴── recover ───────┘
      │ a member to   v  │                       v
      │ try again    open ┘                  discarded (too old, too few members, equal rewards, no baseline)
      └── admission

Invariants:
- A group is numbered when it is first leased; batches take the oldest ready groups of each environment.
- `version` never goes back: after a rollback the recovered weights get a number above every one used before, so that a
  version names one set of weights for ever.
- Every change keeps the books closed, see `shelf`.
"""

from __future__ import annotations

from ..errors import StateError
from .group import Episode, Group
from .leases import Leases

STRAGGLER = "straggler"
"""Why an episode is discarded whose group was taken while it ran."""


class Replay(Leases):
    """What workers do (`leases`), and what the learner does."""

    def take(self, version: int) -> list[Group] | None:
        """The batch for `version`, oldest groups first; None when there is not enough, or a late group is waited for.

        Repeating the call returns the same batch until it is committed.
        """
        if version != self.version:
            raise StateError(f"a batch was asked for version {version}, the buffer is at version {self.version}")
        if batch := self.of("batched"):
            return batch
        self._retire(version)
        quotas = list(self.admission.quotas(self.trained))
        if any(self.number("ready", env) < quota for env, quota in enumerate(quotas)):
            return None
        if self.rules.on_deadline == "wait" and self._late(version):
            return None
        for group in self.of("ready"):
            if quotas[group.env]:
                quotas[group.env] -= 1
                for episode in group.in_account("in_flight"):
                    self._discard(group, episode, STRAGGLER)
                self._put(group, "batched")
        return self.of("batched")

    def fresh(self, version: int) -> list[Episode]:
        """Delivered episodes outside of batches that hold tokens of `version`, the youngest first; none that was played greedily:
        what an engine says of such a token is not of the distribution that the others are drawn from."""
        waiting = [e for g in reversed(self.of("open", "leased", "ready")) for e in g.in_account("ready")]
        return [e for e in waiting if e.kept.get(version) and e.withheld != "baseline"]

    def commit(self, version: int) -> None:
        """The batch of `version` is in the weights, which are now `version + 1`. Repeating it changes nothing.

        Raises:
            StateError: there is no such batch, or the ledger does not close; nothing has changed then.
        """
        if version < self.version and self.made(above=version, up_to=version + 1):
            return
        batch = self.of("batched")
        if version != self.version or not batch:
            raise StateError(f"commit of version {version} without a batch; the buffer is at version {self.version}")
        if gap := self.books.gap():
            raise StateError(f"the ledger does not close: {gap}")
        oldest = self.admission.oldest_trainable(version)
        for group in batch:
            self._put(group, "trained", version + 1)
            self.trained[group.env] += 1
            for episode in group.in_account("ready"):
                with self._moving(group, episode):
                    episode.account, episode.loss_from = "trained", None if episode.withheld else oldest
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
        for group in self.made(above=kept):
            for episode in group.in_account("trained"):
                with self._moving(group, episode):
                    episode.account, episode.loss_from = "ready", None
            self.trained[group.env] -= 1
            self._ready(group)
        for group in self.of("batched"):
            self._ready(group)
        if kept != self.version and self.recovered_from != kept:
            self.version, self.recovered_from = self.version + 1, kept
        return self.version

    def forget(self) -> None:
        """Drop from memory the settled groups that no recovery can need."""
        for group in (*self.of("discarded"), *self.made(up_to=self.clock().over)):
            if group.id not in self._changed and all(e.settled for e in group.episodes.values()):
                self._leave(group)

    def _late(self, version: int) -> bool:
        return any(self.admission.last_chance(version, g.leased_at) for g in self.of("open", "leased"))

    def _retire(self, version: int) -> None:
        """Discard what the bound leaves nothing of, and with `drop` whatever it touches. A group that passed is not looked at
        again at the same version: what is delivered to it since is late."""
        oldest, drop = self.admission.oldest_trainable(version), self.rules.on_deadline == "drop"
        looked_at, unseen = self._looked_at, self._unseen
        self._looked_at, self._unseen = version, set()
        for group in self.of("ready"):
            if version != looked_at or group.id in unseen:
                episodes = [e for e in group.in_account("ready") if not e.withheld]
                fresh = sum(e.fresh(oldest) for e in episodes)
                if fresh == 0 or (drop and fresh < sum(sum(e.kept.values()) for e in episodes)):
                    self._discard_group(group, "stale")
        if drop and version != looked_at:
            for group in self.of("open", "leased"):
                if group.leased_at < oldest:
                    self._discard_group(group, "stale")
