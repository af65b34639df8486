"""What workers do to the replay state: leases of groups and the queue for them, progress, deliveries. Pure, like `replay`.

Invariants:
- An episode is delivered at most once; one whose lease was lost no longer changes its group, its tokens stay discarded.
- All running episodes of a group belong to one lease, and so to one worker.
- A member is leased again only when it has no result: its lease was lost, or it failed with a retry left.
- A lease request has one reply, however often it is sent, even where its leases were lost since. A worker has one request, the
  newest. One that waits for so long only is then answered with no lease.
- Memory is bounded, however many workers ask: past `client_registry.KNOWN` the request that waits longest is forgotten and its
  worker asks again, and so is the reply that is oldest; leases that still hold are given again without it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import msgspec

from ..common.outcomes import FAILED
from ..errors import StateError
from .admission import Admission, ReplayConfig
from .client_registry import remember
from .group_table import Episode, Group, GroupState, GroupTable
from .ledger import Counts
from .messages import Lease, LeaseReply
from .sample_filter import dropped
from .task_table import Attempt, SequentialSampler, TaskTable
from .trajectory import UNWANTED, Outcome

MIN_MEMBERS = 2  # a group's mean is a baseline from two members on; groups of one have none and need none
# Discard reason of a group whose members all have the same reward, under dynamic sampling.
EQUAL_REWARDS = "equal_rewards"
GREEDY = 0  # the member that is sampled greedily, under `ReplayConfig.greedy`
NO_BASELINE = "no_baseline"  # discard reason of a group whose greedy member failed: the others have no baseline
# States of groups that no version was trained on yet.
WAITING: tuple[GroupState, ...] = ("open", "leased", "ready", "batched")


class LeaseManager:
    """Leases groups of `table`, and takes in what workers report about them. Time is the `now` of the caller, in seconds.

    Attributes:
        served: version that the fleet serves now; None while no replica serves one.
        tasks: chooses the tasks of new groups and counts their attempts; without one all come in order.

    Raises:
        StateError: the counters of `table` are of a run with other environments, or of another process of the buffer.
    """

    def __init__(
        self, admission: Admission, config: ReplayConfig, table: GroupTable, tasks: TaskTable | None = None
    ) -> None:
        envs, first, counters = len(admission.shares), admission.first_group, table.counters
        if not counters.cursors:
            counters.shard, counters.shards = admission.shard, admission.shards
            counters.next_group = max(first, counters.next_group)
        elif (counters.shard, counters.shards) != (admission.shard, admission.shards):
            raise StateError(
                f"the file is that of process {counters.shard} of a buffer with buffer.shards={counters.shards}; this is process "
                f"{admission.shard} of one with buffer.shards={admission.shards}, which a run cannot change"
            )
        for name, begin in (("cursors", first), ("trained", 0)):
            numbers = getattr(counters, name) or [begin] * envs
            if len(numbers) != envs:
                raise StateError(f"the buffer is of a run with {len(numbers)} environments, this one has {envs}")
            setattr(counters, name, numbers)
        self.served: int | None = None
        self._admission = admission
        self._config = config
        self._table = table
        self.tasks = tasks or TaskTable([SequentialSampler()] * envs)

    def configure(self, admission: Admission, config: ReplayConfig) -> None:
        """Follow other rules. A group that runs and has enough members under them is complete at once."""
        self._admission, self._config = admission, config
        for group in self._table.in_state("leased"):
            self._complete(group)

    # --- leases ---------------------------------------------------------------------------------------------------

    def outstanding(self) -> list[int]:
        """Groups of each environment between their first lease and the serving of the version trained on them."""
        waiting = [
            sum(self._table.count(state, env) for state in WAITING) for env in range(len(self._admission.shares))
        ]
        return [here + trained for here, trained in zip(waiting, self._unserved(), strict=True)]

    def granted(self, request: str) -> Lease | None:
        """The lease that answered `request`, while it holds: a request whose reply was lost must not lease another group."""
        group = self._table.leased_for(request)
        return None if group is None else self._lease(group)

    def grant(self, worker: str, now: float, request: str = "") -> Lease | None:
        """Lease the oldest group that lost its worker, else a new one if admission allows; None when it does not."""
        served = self.served
        if served is None or served < self._admission.oldest_trainable(self._table.counters.version):
            return None  # what the engines sample now could not be trained on
        group = next(iter(self._table.in_state("open")), None) or self._new_group()
        if group is None:
            return None
        final = group.final_members
        group.request = request
        self._table.set_state(group, "leased")
        group.leased_at, group.deadline = served, now + self._config.lease_s
        for member in range(self._config.group_size):
            if member not in final:
                episode = Episode(f"{group.id}.{group.attempt}.{member}", worker=worker)
                group.episodes[episode.id] = episode
                self._table.mark_changed(group, episode)
        return self._lease(group)

    def release(self, worker: str, reason: str) -> None:
        """A worker left or restarted: its groups can be leased again, its running tokens are discarded."""
        for group in self._table.groups.values():
            own = [e for e in group.episodes.values() if e.worker == worker and not e.settled]
            if any(e.account == "in_flight" for e in own):
                self._lose(group, reason)
            for episode in own:
                episode.settled = True
                self._table.mark_changed(group, episode)

    def expire(self, now: float) -> list[Group]:
        """Take back the leases that were not renewed in time; returns their groups."""
        overdue = [g for g in self._table.groups.values() if g.state in ("leased", "ready") and g.deadline < now]
        lost = [g for g in overdue if g.running]
        for group in overdue:
            group.deadline = math.inf  # no worker runs it from here on
        for group in lost:
            self._lose(group, "worker_lost")
        return lost

    # --- reports --------------------------------------------------------------------------------------------------

    def progress(self, worker: str, generated: Mapping[str, Counts], now: float) -> list[str]:
        """Take in a worker's running totals and renew the leases they belong to; returns the episodes to cancel."""
        unwanted = []
        for episode_id, counts in generated.items():
            found = self._table.find(episode_id)
            if found is None or found[1].settled:
                unwanted.append(episode_id)
                continue
            group, episode = found
            more = {v: n for v, n in counts.items() if n > episode.generated.get(v, 0)}
            if more:
                self._require_versions(episode_id, more)
                with self._table.update(group, episode):
                    self._table.set_generated(episode, {**episode.generated, **more})
            if episode.account != "in_flight":
                unwanted.append(episode_id)
            elif episode.worker == worker:
                group.deadline = now + self._config.lease_s
        return unwanted

    def deliver(
        self,
        episode_id: str,
        outcome: Outcome,
        generated: Counts,
        kept: Counts,
        reward: float | None = None,
        attempt: Attempt | None = None,
    ) -> bool:
        """An episode ended; `kept` are the sampled tokens of its trajectories, `reward` is their reward, which for a failure is its
        penalty; `attempt` is what it came to, where it sampled anything. False when its trajectories are not kept: it is late, a
        repetition, failed, or its group is settled.

        Raises:
            StateError: it was never leased, its counts contradict each other, or it names a version that does not exist.
        """
        found = self._table.find(episode_id)
        if found is None or found[1].settled:
            return False
        group, episode = found
        self._require_counts(episode, generated, kept)
        if attempt is not None and outcome.trainable:
            self.tasks.attempted(group.env, group.task, attempt, max(generated, default=-1))
        again = not outcome.trainable and self._may_retry(group, episode, outcome)
        with self._table.update(group, episode):
            self._table.set_generated(episode, generated)
            episode.settled, episode.outcome, episode.delivered_time = True, outcome, self._table.time
            if outcome.reason != UNWANTED:
                ended = self._table.counters.outcomes
                ended[outcome.label] = ended.get(outcome.label, 0) + 1
            if episode.account == "in_flight":
                episode.final = not again
                if sum(kept.values()) and not again:
                    episode.account, episode.kept, episode.reward = "ready", dict(kept), reward
                    if self._is_greedy(episode.member):
                        episode.withheld = "baseline"
                    elif group.state == "ready":
                        episode.withheld = "late"
                else:
                    episode.account, episode.reason = "discarded", FAILED + (outcome.reason or "nothing_sampled")
        if group.state == "leased":
            self._complete(group)
        return episode.account == "ready"

    # --- helpers --------------------------------------------------------------------------------------------------

    def _new_group(self) -> Group | None:
        """A new group of the environment with the largest free share of its budget; None when all budgets are used."""
        counters = self._table.counters
        settled = [trained - n for trained, n in zip(counters.trained, self._unserved(), strict=True)]
        budgets = self._admission.budgets(settled)
        free = [(b - n) / b if b else 0.0 for b, n in zip(budgets, self.outstanding(), strict=True)]
        if max(free) <= 0:
            return None
        env = free.index(max(free))
        group = Group(counters.next_group, env, self.tasks.choose(env, counters.cursors[env]))
        self._table.add(group)
        counters.next_group += self._admission.shards
        counters.cursors[env] += self._admission.shards
        return group

    def _unserved(self) -> list[int]:
        """Groups of each environment that were trained on and whose version is not served yet."""
        served, counts = self._table.counters.served, [0] * len(self._admission.shares)
        for group in self._table.trained_in(above=-1 if served is None else served):
            counts[group.env] += 1
        return counts

    def _may_retry(self, group: Group, episode: Episode, outcome: Outcome) -> bool:
        failures = group.failures(episode.member, FAILED + outcome.reason)
        return group.state == "leased" and failures < self._config.retries.get(outcome.reason, 0)

    def _complete(self, group: Group) -> None:
        """Make a leased group ready, discard it, or reopen it for the members that it lacks, if it is time.

        Under dynamic sampling members with equal rewards are not enough, however many: one of the slow ones may differ, so a group
        is discarded for equal rewards only when all members have ended. The greedy member, where there is one, is waited for
        likewise; where it failed for good, the group is discarded at once.
        """
        kept = group.in_account("ready")
        final = group.final_members
        ended = len(final) == self._config.group_size
        equal = self._config.dynamic_sampling and len({e.reward for e in kept}) == 1
        no_baseline = self._config.greedy and all(e.withheld != "baseline" for e in kept)
        if no_baseline and GREEDY in final:
            self._table.discard_group(group, NO_BASELINE)
        elif ended and len(kept) < min(MIN_MEMBERS, self._config.group_size):
            self._table.discard_group(group, "too_few_members")
        elif ended and equal:
            self._table.discard_group(group, EQUAL_REWARDS)
            self._table.counters.refilled += 1
        elif ended or (len(kept) >= self._config.min_members and not equal and not no_baseline):
            for episode in dropped(group, self._config.filter):
                with self._table.update(group, episode):
                    episode.withheld = "filtered"
            self._table.set_state(group, "ready")
        elif not group.running:
            self._reopen(group)

    def _is_greedy(self, member: int) -> bool:
        return self._config.greedy and member == GREEDY

    def _require_versions(self, episode_id: str, counts: Counts) -> None:
        version = self._table.counters.version
        if max(counts, default=0) > version:
            raise StateError(
                f"episode {episode_id} has tokens of version {max(counts)}, the buffer is at version {version}"
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
            self._table.discard(group, episode, reason)
        if group.state == "leased":
            self._reopen(group)

    def _reopen(self, group: Group) -> None:
        group.attempt += 1
        self._table.set_state(group, "open")

    def _lease(self, group: Group) -> Lease:
        prefix = f"{group.id}.{group.attempt}."
        members = tuple(sorted(e.member for e in group.episodes.values() if e.id.startswith(prefix)))
        oldest = self._admission.oldest_trainable(group.leased_at)
        greedy = tuple(member for member in members if self._is_greedy(member))
        return Lease(group.id, group.attempt, members, group.leased_at, oldest, group.env, group.task, greedy)


class LeaseRequest(msgspec.Struct, frozen=True):
    """For `groups` groups: request `number` of the connection `identity`, which uses no number twice."""

    identity: bytes
    number: int
    groups: int
    until: float = math.inf  # when it has waited long enough, in the caller's clock

    def name(self, group: int) -> str:
        """Names the request for one of the groups."""
        return f"{self.identity.hex()}.{self.number}.{group}"


class LeaseQueue:
    """The lease requests that wait for admission; `leases` grants the groups."""

    def __init__(self, leases: LeaseManager) -> None:
        self._leases = leases
        self._waiting: dict[str, LeaseRequest] = {}
        self._until: dict[str, float] = {}  # of those that do not wait for ever, the first to end first
        # By connection: the number of its last request that was answered, and the reply. The newest reply is last.
        self._answered: dict[bytes, tuple[int, LeaseReply]] = {}

    @property
    def due(self) -> float:
        """When the next request has waited long enough."""
        return next(iter(self._until.values()), math.inf)

    def remove(self, worker: str) -> None:
        """The worker is gone, or another process now."""
        self._waiting.pop(worker, None)
        self._until.pop(worker, None)

    def add(self, worker: str, request: LeaseRequest) -> LeaseReply | None:
        """The earlier reply to this request; None where the request now waits."""
        answered, reply = self._answered.get(request.identity, (-1, None))
        if reply is not None and request.number <= answered:
            # Also when its leases are lost: a second set would have no worker if the first reply is only late.
            return reply if request.number == answered else None
        leases = [lease for i in range(request.groups) if (lease := self._leases.granted(request.name(i)))]
        if leases:  # the buffer answered before it restarted
            return LeaseReply(tuple(leases))
        self._until.pop(worker, None)
        if (forgotten := remember(self._waiting, worker, request)) is not None:
            self._until.pop(forgotten, None)
        if request.until < math.inf:
            self._until[worker] = request.until
        return None

    def grant(self, now: float) -> list[tuple[bytes, int, LeaseReply]]:
        """Grant groups while admission allows, one per worker and turn; returns what to reply, as (connection, number, reply). It
        takes no longer where more wait: what admission does not allow one of them it allows none."""
        granted: dict[str, list[Lease]] = {}
        for worker, name in self._turns():
            lease = self._leases.grant(worker, now, name)
            if lease is None:
                break
            granted.setdefault(worker, []).append(lease)
        for worker, until in self._until.items():
            if until > now:
                break
            granted.setdefault(worker, [])
        replies = list[tuple[bytes, int, LeaseReply]]()
        for worker, leases in granted.items():
            request, reply = self._waiting.pop(worker), LeaseReply(tuple(leases))
            self._until.pop(worker, None)
            self._answered.pop(request.identity, None)
            remember(self._answered, request.identity, (request.number, reply))
            replies.append((request.identity, request.number, reply))
        return replies

    def _turns(self) -> Iterator[tuple[str, str]]:
        """Who may have the next group, and its request's name for that group: one for each worker in turn."""
        for turn in itertools.count():
            asked = False
            for worker, request in self._waiting.items():
                if turn < request.groups:
                    asked = True
                    yield worker, request.name(turn)
            if not asked:
                return
