"""What each request does: it changes the state machine, and is answered at once or when its reply is there. Pure, except that it
reads the store, and reserves there where arrays will be.

    request          waits for                                        until
    RequestLease     admission, or a group that lost its worker       LeaseReply; the worker's end, or the time that it names
    TakeBatch        groups_per_batch complete groups                 BatchPlan; the client's deadline

Invariants:
- A request that the state machine forbids, or that its sender may not make (`client_registry`), changes nothing and raises.
- A delivery's frames are checked once and stay as they came: the store writes them, unencoded. Ranks read arrays from its files.
- Memory is bounded: by the limits of the registry, the queue and the cache, what arrived since the last transaction, and one plan.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence

import msgspec

from ..errors import StateError, WireError
from ..rpc.server import RpcRequest, RpcServer
from ..rpc.wire import RpcRefusal
from . import messages as m
from .admission import LiveRules, ReplayCounters
from .client_registry import ClientRegistry, remember
from .encoded import DeliveredTrajectory, EncodedRow
from .group_table import Episode, Group
from .image_files import named_files, received
from .lease_manager import LeaseQueue, LeaseRequest
from .ledger import Withheld
from .replay import Replay
from .segments import segments_path
from .store import CommitRow, Store, WriteBatch
from .task_table import Attempt
from .trajectory import sampled_of

log = logging.getLogger(__name__)

PendingReply = tuple[bytes, int, m.Reply | RpcRefusal]  # the connection, the number of its request, and the reply
CACHE_BYTES = 64 << 20  # of headers that are kept; those of other trajectories are read back from the file


class PendingWrites(msgspec.Struct):
    """What requests changed since the last transaction, besides groups."""

    trajectories: dict[str, list[DeliveredTrajectory]] = {}  # delivered, by episode
    failed: list[DeliveredTrajectory] = []  # branches of failed episodes
    images: dict[str, bytes] = {}  # files that these name, by name
    commits: list[CommitRow] = []
    rolled_back_to: int | None = None  # the commits after this version no longer count


class RequestHandler:
    """All requests to one buffer.

    Args:
        store: for positions of arrays, and for rows that are no longer in memory.
        transport_counts: messages dropped and connections refused so far.
        revision: of the rules that `replay` was made with, see `messages.Configure`.

    Attributes:
        pending: see `PendingWrites`.
        checkpointed: a checkpoint was reported since the owner cleared it, so more groups may be settled.
    """

    def __init__(
        self, replay: Replay, store: Store, transport_counts: Callable[[], tuple[int, int]], revision: int = 0
    ) -> None:
        self.pending = PendingWrites()
        self.checkpointed = False
        self._replay = replay
        self._store = store
        self._transport_counts = transport_counts
        self._revision, self._first_batch = revision, replay.next_batch
        self._replies: list[PendingReply] = []
        self._stored_counters: ReplayCounters | None = None
        self._clients = ClientRegistry()
        self._lease_queue = LeaseQueue(replay.leases)
        self._batch_requests: dict[bytes, tuple[int, int]] = {}
        self._fresh_requests: list[tuple[bytes, int, int, int]] = []
        self._plan: m.BatchPlan[EncodedRow] | None = None  # of the batch that is taken: the same for every rank
        self._recovered: tuple[bytes, int, m.RecoverReply] | None = None
        self._cache = RowCache()

    def drain(self) -> WriteBatch | None:
        """What the next transaction stores: everything that changed since the last call. None when nothing did."""
        table = self._replay.table
        groups, counters = table.drain(), table.counters.copy()
        tasks = self._replay.leases.tasks.drain()
        pending, self.pending = self.pending, PendingWrites()
        changed = (
            groups
            or tasks
            or pending.commits
            or pending.failed
            or pending.rolled_back_to is not None
            or counters != self._stored_counters
        )
        self._stored_counters = counters
        table.prune()
        if not changed:
            return None
        arrived = list(itertools.chain.from_iterable(pending.trajectories.values()))
        others = pending.commits, pending.rolled_back_to, tasks, pending.failed, pending.images
        return WriteBatch.of(counters, groups, arrived, *others)

    def configure(self, revision: int, rules: LiveRules) -> int:
        """Put rules in force, unless newer ones are; the version at which the first batch under those in force is taken."""
        if revision > self._revision:
            self._revision, self._first_batch = revision, self._replay.configure(rules)
        return self._first_batch

    def receive(self, server: RpcServer[m.Request], more: Callable[[], bool]) -> None:
        """Carry out the requests that have arrived, while `more`."""
        for request in server.requests(more):
            self._replay.table.time = time.time()
            try:
                reply = self._handle(request)
            except (StateError, WireError) as error:
                reply = RpcRefusal(str(error))
            if isinstance(request.message, m.FetchImages) and reply is not None:
                server.reply(request.identity, request.number, reply)  # nothing has changed: no transaction to wait for
            elif reply is not None:
                self._replies.append((request.identity, request.number, reply))

    @property
    def due(self) -> float:
        """When the next reply is to be given although nothing has changed, on the monotonic clock."""
        return self._lease_queue.due

    def replies(self) -> list[PendingReply]:
        """The replies that can be given since the last call; they may be sent once what `drain` returns is stored."""
        replies, self._replies = self._replies, []
        self._replay.table.time = time.time()
        return [
            *replies,
            *self._lease_queue.grant(time.monotonic()),
            *self._batch_replies(),
            *self._fresh_replies(),
        ]

    def _handle(self, received: RpcRequest[m.Request]) -> m.Reply | None:
        """Carry out one request; None when the reply comes later, or never.

        Raises:
            StateError: it is forbidden.
            WireError: its parts contradict each other.
        """
        replay, clients, identity, request = self._replay, self._clients, received.identity, received.message
        if received.sender is not None:
            clients.require_name(identity, received.sender)
        match request:
            case m.RequestLease(worker, groups, wait_s):
                clients.worker(identity, worker)
                until = math.inf if wait_s is None else time.monotonic() + wait_s
                return self._lease_queue.add(worker, LeaseRequest(identity, received.number, groups, until))
            case m.TakeBatch(version):
                clients.rank(identity)
                remember(self._batch_requests, identity, (received.number, version))
                return None
            case m.FetchImages(names):
                clients.rank(identity)
                return m.ImagesReply(self._store.images.first(names))
            case m.ReportProgress(worker, generated, slot_s, idle_slot_s):
                client = clients.worker(identity, worker)
                for episode_id in generated:
                    self._require_holder(worker, episode_id)
                unwanted = replay.leases.progress(worker, generated, time.monotonic())
                client.slot_s, client.idle_slot_s = slot_s, idle_slot_s
                return m.CancelledEpisodes(tuple(unwanted))
            case m.DeliverEpisode(worker):
                clients.worker(identity, worker)
                self._require_holder(worker, request.episode_id)
                self._deliver(request)
            case m.Register(worker, incarnation):
                if clients.register(identity, worker, incarnation):
                    self._lease_queue.remove(worker)
                    replay.leases.release(worker, "worker_lost")
            case m.Deregister(worker):
                clients.worker(identity, worker)
                self._lease_queue.remove(worker)
                replay.leases.release(worker, "worker_stopped")
            case m.CommitBatch(version, oldest):
                clients.learner(identity)
                self._commit(version, oldest)
            case m.DiscardBatch(version, groups, reason):
                clients.learner(identity)
                replay.discard_batch(version, groups, reason)
                self._plan = None
            case m.SetAside(version, groups, reason):
                clients.rank(identity)
                return self._set_aside(replay.set_aside(version, groups), reason)
            case m.StepFailed(version, reason):
                clients.rank(identity)
                return self._set_aside(replay.step_failed(version), reason)
            case m.MarkCheckpointed(version):
                clients.learner(identity)
                replay.mark_checkpointed(version)
                self.checkpointed = True
            case m.Recover(version, publish_as):
                clients.learner_recovers(identity)
                if self._recovered is None or self._recovered[:2] != (identity, version):
                    self._recovered = identity, version, self._recover(version, publish_as)
                return self._recovered[2]
            case m.RequestFresh(version, limit):
                clients.rank(identity)
                self._fresh_requests.append((identity, received.number, version, limit))
                return None
            case m.RequestStats():
                return self._stats()
            case m.Configure(revision, rules):
                clients.require_supervisor(identity)
                return m.Configured(self.configure(revision, rules))
        return m.Ack()

    def _require_holder(self, worker: str, episode_id: str) -> None:
        """Raises StateError when another worker holds the episode's lease."""
        group = self._replay.table.group_of(episode_id)
        episode = group.episodes.get(episode_id) if group is not None else None
        if episode is not None and episode.worker != worker:
            raise StateError(f"episode {episode_id} is leased to {episode.worker}, not to {worker}")

    def _deliver(self, request: m.DeliverEpisode) -> None:
        if request.failed_branches and (request.trajectories or request.outcome.trainable):
            raise WireError(
                f"episode {request.episode_id!r} did not fail, or is trained on, and came with failed branches"
            )
        encoded = request.trajectories
        branches = [one.decode() for one in encoded]
        kept, reward, attempt = sampled_of(request.episode_id, branches), None, None
        images = received(request.images)
        files = named_files(images, branches)
        if branches:
            first, reward = branches[0], branches[0].reward
            # A reward model's score has no part in whether a task is solved.
            attempt = Attempt(first.task_id, first.metrics.get("reward_environment", reward))
        if self._replay.leases.deliver(request.episode_id, request.outcome, request.generated, kept, reward, attempt):
            came = sorted(zip(branches, encoded, strict=True), key=lambda pair: pair[0].branch)
            arrived = [
                DeliveredTrajectory.of(request.episode_id, *branch, self._store.reserve(branch[1].arrays.nbytes))
                for branch in came
            ]
            self.pending.trajectories[request.episode_id] = arrived
            self.pending.images |= files
            self._cache.add(request.episode_id, [one.row for one in arrived])
        if request.failed_branches:
            self._keep_failed(request, images)

    def _keep_failed(self, request: m.DeliverEpisode, images: dict[str, bytes]) -> None:
        """What a failed episode sampled; nothing where it is no valid trajectory: a record that is damaged ends no worker."""
        encoded = request.failed_branches
        try:
            branches = [one.decode() for one in encoded]
            sampled_of(request.episode_id, branches)
            files = named_files(images, branches)
        except WireError as error:
            log.warning("the tokens of a failed episode are not kept: %s", error)
            return
        self.pending.failed += map(DeliveredTrajectory.of, itertools.repeat(request.episode_id), branches, encoded)
        self.pending.images |= files

    def _commit(self, version: int, oldest: int) -> None:
        groups = len(self._replay.table.in_state("batched"))
        before, rule = self._replay.version, self._replay.taken_under
        self._replay.commit(version, oldest)
        self._plan = None
        if self._replay.version != before:
            row = CommitRow(self._replay.version, time.time(), groups, rule.max_staleness, rule.groups_per_batch)
            self.pending.commits.append(row)

    def _set_aside(self, groups: Sequence[Group], reason: str) -> m.GroupsSetAside:
        """`groups` are discarded, and the batch is no more; none where the batch stays as it is."""
        for group in groups:
            log.error("group %d is set aside, it cannot be trained on: %s", group.id, reason)
            self._plan = None
        return m.GroupsSetAside(tuple(group.id for group in groups))

    def _recover(self, version: int, publish_as: int | None) -> m.RecoverReply:
        recovered = self._replay.recover(version, publish_as)
        self._plan = None
        self._batch_requests.clear()
        self.pending.rolled_back_to = version
        return m.RecoverReply(recovered)

    def _batch_replies(self) -> list[PendingReply]:
        """To each rank whose batch is there now."""
        replies = list[PendingReply]()
        for identity, (number, version) in list(self._batch_requests.items()):
            try:
                groups = self._replay.take(version)
            except StateError as error:
                replies.append((identity, number, RpcRefusal(str(error))))
            else:
                if groups is None:
                    continue
                self._plan = self._plan or self._make_plan(version, groups)
                self._cache.retain(self._may_be_batched)
                replies.append((identity, number, self._plan))
            del self._batch_requests[identity]
        return replies

    def _make_plan(self, version: int, groups: list[Group]) -> m.BatchPlan[EncodedRow]:
        oldest = self._replay.taken_under.oldest_trainable(version)
        rows = tuple(tuple(itertools.chain(*map(self._rows, members_of(group)))) for group in groups)
        withheld: dict[str, Withheld] = {e.id: e.withheld for g in groups for e in g.in_account("ready") if e.withheld}
        arrays = segments_path(self._store.path).absolute()
        return m.BatchPlan(version, oldest, rows, withheld, self._stats(), str(arrays))

    def _rows(self, episode: Episode) -> Sequence[EncodedRow]:
        """Of its branches, in order."""
        return self._cache.get(episode.id) or [one.row for one in self._branches(episode)]

    def _branches(self, episode: Episode) -> Sequence[DeliveredTrajectory]:
        return self.pending.trajectories.get(episode.id) or self._store.episode(episode.id)

    def _may_be_batched(self, episode_id: str) -> bool:
        group = self._replay.table.group_of(episode_id)
        return group is not None and group.state in ("open", "leased", "ready")

    def _fresh_replies(self) -> list[PendingReply]:
        replies = list[PendingReply]()
        for identity, number, version, limit in self._fresh_requests:
            found = (one.encoded for e in self._replay.fresh(version)[:limit] for one in self._branches(e))
            replies.append((identity, number, m.TrajectoriesReply(tuple(itertools.islice(found, limit)))))
        self._fresh_requests.clear()
        return replies

    def _stats(self) -> m.Stats:
        (slot_s, idle_slot_s), (dropped, refused) = self._clients.slots(), self._transport_counts()
        table, counters = self._replay.table, self._replay.table.counters
        return m.Stats(
            version=counters.version,
            ledger=table.ledgers.total.copy(),
            leased_groups=len(table.in_state("leased")),
            ready_groups=len(table.in_state("ready", "batched")),
            slot_s=slot_s,
            idle_slot_s=idle_slot_s,
            refilled_groups=counters.refilled,
            outcomes=counters.outcomes.copy(),
            dropped=dropped,
            unusable_batches=counters.unusable,
            refused=refused,
        )


class RowCache:
    """Rows of delivered trajectories by episode, so that the next plan is not read back from the file. At `CACHE_BYTES` it takes no
    more: batches take the oldest groups first."""

    def __init__(self) -> None:
        self._episodes: dict[str, Sequence[EncodedRow]] = {}
        self._bytes = 0

    def add(self, episode_id: str, rows: Sequence[EncodedRow]) -> None:
        """Hold the rows of a delivered episode, if there is room."""
        size = _nbytes(rows)
        if self._bytes + size <= CACHE_BYTES:
            self._episodes[episode_id] = rows
            self._bytes += size

    def get(self, episode_id: str) -> Sequence[EncodedRow]:
        """The rows of an episode; none when they are not held."""
        return self._episodes.get(episode_id, ())

    def retain(self, wanted: Callable[[str], bool]) -> None:
        """Remove the episodes that are not `wanted`."""
        for episode_id in [e for e in self._episodes if not wanted(e)]:
            self._bytes -= _nbytes(self._episodes.pop(episode_id))


def members_of(group: Group) -> list[Episode]:
    """Its episodes that a batch has, in order."""
    return sorted(group.in_account("ready"), key=lambda e: e.member)


def _nbytes(rows: Sequence[EncodedRow]) -> int:
    return sum(len(row.header) for row in rows)
