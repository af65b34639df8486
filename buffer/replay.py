"""The replay state machine: which group is where, who may play it, what a batch is. Pure: no socket, task, clock or tensor.

            grant            all members settled        take             commit
    (new) ─────────> leased ─────────────────────> ready ─────> batched ─────────> trained
      ^               │  ^                           │ ^           │                  │
      │   lease lost  v  │ grant                     │ └───────────┴── recover ───────┘
      │              open ┘                          v
      └── admission                              discarded (too old, too few members)

Invariants:
- Groups are granted in the order of their ids, which are the indices of their tasks; batches take the oldest ready groups.
- An episode is delivered at most once; one whose lease was lost changes no group any more, its tokens stay discarded.
- `version` never goes back: after a rollback the recovered weights get a number above every one used before, so that a
  version names one set of weights for ever.
- Every change keeps `ledger.closes`; every changed group is in `drain()` until the caller has stored it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from ..errors import StateError
from .admission import Admission
from .ledger import Ledger
from .messages import Lease
from .trajectory import Outcome

OnDeadline = Literal["withhold", "wait", "drop"]
GroupState = Literal["open", "leased", "ready", "batched", "trained", "discarded"]
EpisodeAccount = Literal["in_flight", "ready", "trained", "discarded"]

FAILED = "failed_"
"""Prefix of the discard reasons that are the outcome of the episode itself."""

MIN_MEMBERS = 2
"""A group's mean is a baseline from two members on."""


class Episode(msgspec.Struct):
    """One attempt at one member of a group.

    Attributes:
        id: `group.attempt.member`.
        account: where its tokens are; `trained` covers withheld tokens too.
        generated: tokens sampled so far, as the worker reports them.
        by_version: (policy version, sampled tokens) of the delivered trajectories.
        settled: its end was delivered, or the process that played it is gone: no report about it counts any more.
        trained: tokens that carried loss.
        reason: why it was discarded.
        outcome: how it ended.
    """

    id: str
    account: EpisodeAccount = "in_flight"
    generated: int = 0
    by_version: tuple[tuple[int, int], ...] = ()
    settled: bool = False
    trained: int = 0
    reason: str = ""
    outcome: Outcome | None = None

    @property
    def member(self) -> int:
        return int(self.id.rsplit(".", 1)[1])

    @property
    def sampled(self) -> int:
        return sum(n for _, n in self.by_version)

    @property
    def done(self) -> bool:
        """Whether the member needs no other attempt: it was delivered, or failed while its lease held."""
        return self.settled and (self.account != "discarded" or self.reason.startswith(FAILED))

    def sampled_since(self, version: int) -> int:
        return sum(n for v, n in self.by_version if v >= version)


class Group(msgspec.Struct):
    """The episodes of one task. `leased_at` and `trained_at` are policy versions, `deadline` is in the caller's clock, `wish` is
    the request that the lease answered."""

    id: int
    state: GroupState = "open"
    attempt: int = 0
    worker: str = ""
    wish: str = ""
    leased_at: int = 0
    deadline: float = 0.0
    trained_at: int | None = None
    episodes: dict[str, Episode] = {}

    def in_account(self, account: EpisodeAccount) -> list[Episode]:
        return [e for e in self.episodes.values() if e.account == account]


class Replay:
    """The state of one buffer. Time is whatever the caller passes as `now`, in seconds."""

    def __init__(self, admission: Admission, group_size: int, on_deadline: OnDeadline, lease_s: float) -> None:
        self.admission = admission
        self.group_size = group_size
        self.on_deadline = on_deadline
        self.lease_s = lease_s
        self.groups: dict[int, Group] = {}
        self.ledger = Ledger()
        self.version = 0
        self.served: int | None = None
        self.next_group = 0
        self.recovered_from: int | None = None
        self._changed: set[int] = set()

    # --- what may start -------------------------------------------------------------------------------------------

    def outstanding(self) -> int:
        """Groups between their first lease and the serving of the version trained on them."""
        served = -1 if self.served is None else self.served
        return sum(
            g.state in ("open", "leased", "ready", "batched") or (g.state == "trained" and (g.trained_at or 0) > served)
            for g in self.groups.values()
        )

    def granted(self, wish: str) -> Lease | None:
        """The lease that answered `wish` while it holds: a request whose answer was lost must not lease another group."""
        return next((self._lease(g) for g in self.groups.values() if g.state == "leased" and g.wish == wish), None)

    def grant(self, worker: str, now: float, wish: str = "") -> Lease | None:
        """Lease the oldest group that lost its worker, else a new one if admission allows; None when it does not."""
        if self.served is None or self.served < self.admission.oldest_trainable(self.version):
            return None  # what the engines sample now could not be trained on
        group = next((g for g in self._by_age() if g.state == "open"), None)
        if group is None:
            if not self.admission.admits(self.outstanding()):
                return None
            group = Group(self.next_group)
            self.groups[group.id] = group
            self.next_group += 1
        done = {e.member for e in group.episodes.values() if e.done}
        members = tuple(m for m in range(self.group_size) if m not in done)
        group.state, group.worker, group.wish = "leased", worker, wish
        group.leased_at, group.deadline = self.served, now + self.lease_s
        for member in members:
            episode = Episode(f"{group.id}.{group.attempt}.{member}")
            group.episodes[episode.id] = episode
        self._changed.add(group.id)
        return self._lease(group)

    # --- what runs ------------------------------------------------------------------------------------------------

    def progress(self, worker: str, generated: dict[str, int], now: float) -> None:
        """Take a worker's running totals and renew the leases they belong to."""
        for episode_id, total in generated.items():
            found = self._find(episode_id)
            if found is None or found[1].settled:
                continue
            group, episode = found
            self._count(group, episode, total)
            if group.state == "leased" and group.worker == worker and episode.account == "in_flight":
                group.deadline = now + self.lease_s

    def deliver(self, episode_id: str, generated: int, outcome: Outcome, by_version: dict[int, int]) -> bool:
        """An episode ended; `by_version` are its sampled tokens. False when there is nothing to keep: it is late, known already,
        failed, or its group is discarded.

        Raises:
            StateError: nobody leased it, its counts contradict each other, or it names a version that does not exist.
        """
        found = self._find(episode_id)
        if found is None or found[1].settled:
            return False
        group, episode = found
        sampled = sum(by_version.values())
        if outcome.trainable and sampled != generated:
            raise StateError(
                f"episode {episode_id}: {generated} tokens were generated, {sampled} are in its trajectories"
            )
        if generated < episode.generated:
            raise StateError(
                f"episode {episode_id}: {episode.generated} tokens were reported, {generated} delivered; totals never fall"
            )
        if max(by_version, default=0) > self.version:
            raise StateError(
                f"episode {episode_id} has tokens of version {max(by_version)}, the buffer is at version {self.version}"
            )
        self._count(group, episode, generated)
        episode.settled, episode.outcome = True, outcome
        self._changed.add(group.id)
        if episode.account == "discarded":
            return False
        if outcome.trainable and sampled:
            episode.account, episode.by_version = "ready", tuple(sorted(by_version.items()))
            self.ledger.add("in_flight", -episode.generated)
            self.ledger.add("ready", sampled)
        else:
            self._discard(episode, FAILED + (outcome.reason or "nothing_sampled"))
        if len({e.member for e in group.episodes.values() if e.done}) == self.group_size:
            group.state = "ready"
            if len(group.in_account("ready")) < MIN_MEMBERS:
                self._discard_group(group, "too_few_members")
        return episode.account == "ready"

    def release(self, worker: str, reason: str) -> None:
        """A worker left or is another process now: its groups are granted again, its running tokens are discarded."""
        for group in self.groups.values():
            if group.state == "leased" and group.worker == worker:
                for episode in self._lose(group, reason):
                    episode.settled = True

    def expire(self, now: float) -> list[Group]:
        """Take back the leases that were not renewed in time; returns their groups."""
        lost = [g for g in self.groups.values() if g.state == "leased" and g.deadline < now]
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
        batch = [g for g in self._by_age() if g.state == "batched"]
        if batch:
            return batch
        self._retire(version)
        ready = [g for g in self._by_age() if g.state == "ready"]
        if len(ready) < self.admission.groups_per_batch or (self.on_deadline == "wait" and self._late(version)):
            return None
        batch = ready[: self.admission.groups_per_batch]
        for group in batch:
            group.state = "batched"
            self._changed.add(group.id)
        return batch

    def fresh(self, version: int) -> list[Episode]:
        """Delivered episodes outside of batches that hold tokens of `version`, the youngest first."""
        waiting = [g for g in reversed(self._by_age()) if g.state in ("open", "leased", "ready")]
        return [e for g in waiting for e in g.in_account("ready") if any(v == version for v, _ in e.by_version)]

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
        if not self.ledger.closes:
            raise StateError(
                f"the ledger does not close: {self.ledger.generated} generated, {self.ledger.accounted} accounted for"
            )
        oldest = self.admission.oldest_trainable(version)
        for group in batch:
            group.state, group.trained_at = "trained", version + 1
            for episode in group.in_account("ready"):
                episode.account, episode.trained = "trained", episode.sampled_since(oldest)
                self.ledger.add("ready", -episode.sampled)
                self.ledger.add("trained", episode.trained)
                self.ledger.add("withheld", episode.sampled - episode.trained)
            self._changed.add(group.id)
        self.version, self.recovered_from = version + 1, None

    def serve(self, version: int) -> None:
        """The engines serve `version`."""
        if version > self.version:
            raise StateError(f"version {version} cannot be served; the buffer is at version {self.version}")
        self.served = version

    def recover(self, kept: int) -> int:
        """Roll back to weights that contain the commits up to version `kept`; returns the version to publish them under."""
        if kept > self.version:
            raise StateError(
                f"the checkpoint is of version {kept}, the buffer is at version {self.version}: another run's?"
            )
        for group in self.groups.values():
            if group.state == "batched" or (group.state == "trained" and (group.trained_at or 0) > kept):
                for episode in group.in_account("trained"):
                    self.ledger.add("trained", -episode.trained)
                    self.ledger.add("withheld", episode.trained - episode.sampled)
                    self.ledger.add("ready", episode.sampled)
                    episode.account, episode.trained = "ready", 0
                group.state, group.trained_at = "ready", None
                self._changed.add(group.id)
        if kept != self.version and self.recovered_from != kept:
            self.version, self.recovered_from = self.version + 1, kept
        return self.version

    def forget(self, version: int) -> None:
        """Drop from memory the settled groups that no recovery can need: those in a checkpoint of `version`."""
        served = -1 if self.served is None else self.served
        for group in list(self.groups.values()):
            over = group.state == "discarded" or (
                group.state == "trained" and (group.trained_at or 0) <= min(version, served)
            )
            if over and group.id not in self._changed and all(e.settled for e in group.episodes.values()):
                del self.groups[group.id]

    # --- what changed ---------------------------------------------------------------------------------------------

    def drain(self) -> list[Group]:
        """The groups changed since the last call, to be stored."""
        changed = [self.groups[i] for i in sorted(self._changed)]
        self._changed.clear()
        return changed

    def restore(self, groups: Iterable[Group], ledger: Ledger) -> None:
        """Take over what a store kept."""
        self.groups = {g.id: g for g in groups}
        self.ledger = ledger

    # --- helpers --------------------------------------------------------------------------------------------------

    def _by_age(self) -> list[Group]:
        return [self.groups[i] for i in sorted(self.groups)]

    def _find(self, episode_id: str) -> tuple[Group, Episode] | None:
        """The group and episode of an id; None when the group is over and forgotten."""
        number = episode_id.split(".", 1)[0]
        group_id = int(number) if number.isdecimal() and len(number) < 20 else -1
        group = self.groups.get(group_id)
        if group is not None and episode_id in group.episodes:
            return group, group.episodes[episode_id]
        if group is None and 0 <= group_id < self.next_group:
            return None
        raise StateError(f"episode {episode_id!r} was never leased")

    def _count(self, group: Group, episode: Episode, total: int) -> None:
        more = total - episode.generated
        if more <= 0:
            return
        episode.generated = total
        self.ledger.generated += more
        if episode.account == "in_flight":
            self.ledger.add("in_flight", more)
        else:
            self.ledger.discard(episode.reason, more)
        self._changed.add(group.id)

    def _discard(self, episode: Episode, reason: str) -> None:
        if episode.account == "in_flight":
            self.ledger.add("in_flight", -episode.generated)
            self.ledger.discard(reason, episode.generated)
        else:
            self.ledger.add("ready", -episode.sampled)
            self.ledger.discard(reason, episode.sampled)
        episode.account, episode.reason = "discarded", reason

    def _discard_group(self, group: Group, reason: str) -> None:
        for episode in group.episodes.values():
            if episode.account in ("in_flight", "ready"):
                self._discard(episode, reason)
        group.state = "discarded"
        self._changed.add(group.id)

    def _lose(self, group: Group, reason: str) -> list[Episode]:
        lost = group.in_account("in_flight")
        for episode in lost:
            self._discard(episode, reason)
        group.state, group.attempt, group.worker = "open", group.attempt + 1, ""
        self._changed.add(group.id)
        return lost

    def _lease(self, group: Group) -> Lease:
        prefix = f"{group.id}.{group.attempt}."
        members = tuple(sorted(e.member for e in group.episodes.values() if e.id.startswith(prefix)))
        oldest = self.admission.oldest_trainable(group.leased_at)
        return Lease(group.id, group.attempt, members, group.leased_at, oldest)

    def _late(self, version: int) -> bool:
        under_way = (g for g in self.groups.values() if g.state in ("open", "leased"))
        return any(self.admission.last_chance(version, g.leased_at) for g in under_way)

    def _retire(self, version: int) -> None:
        """Discard what the bound leaves nothing of, and with `drop` whatever it touches."""
        oldest = self.admission.oldest_trainable(version)
        for group in list(self.groups.values()):
            if group.state == "ready":
                episodes = group.in_account("ready")
                fresh = sum(e.sampled_since(oldest) for e in episodes)
                old = sum(e.sampled for e in episodes) - fresh
                if fresh == 0 or (old and self.on_deadline == "drop"):
                    self._discard_group(group, "stale")
            elif group.state in ("open", "leased") and self.on_deadline == "drop" and group.leased_at < oldest:
                self._discard_group(group, "stale")
