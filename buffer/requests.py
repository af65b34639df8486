"""What the requests of workers and learner ranks do: each is carried out on the state machine, and answered at once or when its
answer is there. Pure but for reads of the store.

    who waits              for what                                         until
    WantLease              admission, or a group that lost its worker       Granted; the worker's end
    Take                   groups_per_batch complete groups                 Batch; the client's deadline

Invariants:
- A wish for a lease has one answer, however often it is sent; a worker that is another process now gets none.
- A request that the state machine forbids, or that its sender may not make (`peers`), changes nothing and raises.
- What is remembered is bounded: the limits of `wishes`, `peers` and `recent`, what came since the last transaction, and one batch.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import msgspec

from ..errors import StateError
from . import messages as m
from .group import Episode, Group
from .ledger import Withheld
from .peers import Peers
from .recent import Recent
from .replay import Replay
from .rows import CommitRow
from .store import Store
from .trajectory import Trajectory, sampled_of
from .wishes import Wish, Wishes, queue

Answer = tuple[bytes, int, m.Reply]
"""Who asked, the number of the request, and the reply."""


class Brought(msgspec.Struct):
    """What requests have brought since the last transaction, beside changes of groups.

    Attributes:
        episodes: delivered, with their branches.
        rolled_back_to: the commits after this version no longer count.
        checkpointed: more groups may have settled.
    """

    episodes: dict[str, tuple[Trajectory, ...]] = {}
    commits: list[CommitRow] = []
    rolled_back_to: int | None = None
    checkpointed: bool = False


class Requests:
    """All of one buffer.

    Args:
        store: where trajectories that are no longer in memory are read.
        turned_away: messages that were dropped, and connections that were refused, so far.
    """

    def __init__(self, replay: Replay, store: Store, turned_away: Callable[[], tuple[int, int]]) -> None:
        self._replay = replay
        self._store = store
        self._turned_away = turned_away
        self._peers = Peers()
        self._wishes = Wishes(replay)
        self._want_batch: dict[bytes, tuple[int, int]] = {}
        self._want_fresh: list[tuple[bytes, int, int, int]] = []
        self._batch: m.Batch | None = None
        self._recovered: tuple[bytes, int, m.Recovered] | None = None
        self._recent = Recent()
        self.brought = Brought()

    def drain(self) -> Brought:
        """What came since the last call."""
        brought, self.brought = self.brought, Brought()
        return brought

    def due(self) -> list[Answer]:
        """Answers to earlier requests that are there now."""
        return [*self._wishes.grant(time.monotonic()), *self._batches(), *self._shown()]

    def handle(self, identity: bytes, envelope: m.Envelope) -> m.Reply | None:
        """Carry out one request; None when it is answered later, or never.

        Raises:
            StateError: it is forbidden.
            WireError: its parts contradict each other.
        """
        replay, peers, request = self._replay, self._peers, envelope.message
        match request:
            case m.WantLease(worker, groups):
                return self._wishes.add(worker, Wish(identity, envelope.number, groups, peers.worker(identity, worker)))
            case m.Take(version):
                peers.rank(identity)
                queue(self._want_batch, identity, (envelope.number, version))
                return None
            case m.Progress(worker, generated, slot_s, idle_slot_s):
                peer = peers.worker(identity, worker)
                for episode_id in generated:
                    self._require_holder(worker, episode_id)
                unwanted = replay.progress(worker, generated, time.monotonic())
                peer.slot_s, peer.idle_slot_s = slot_s, idle_slot_s
                return m.Unwanted(tuple(unwanted))
            case m.Deliver(worker, episode_id, generated, outcome, trajectories):
                peers.worker(identity, worker)
                self._require_holder(worker, episode_id)
                kept, reward = sampled_of(episode_id, trajectories), trajectories[0].reward if trajectories else None
                if replay.deliver(episode_id, outcome, generated, kept, reward):
                    self.brought.episodes[episode_id] = trajectories
                    self._recent.add(episode_id, trajectories)
            case m.Hello(worker, incarnation):
                if peers.hello(identity, worker, incarnation):
                    self._wishes.forget(worker)
                    replay.release(worker, "worker_lost")
            case m.Goodbye(worker):
                peers.worker(identity, worker)
                self._wishes.forget(worker)
                replay.release(worker, "worker_stopped")
            case m.Commit(version):
                peers.learner(identity)
                self._commit(version)
            case m.Served(version):
                peers.learner(identity)
                if replay.served is None or version > replay.served:  # a repeated one comes late
                    replay.serve(version)
            case m.Checkpointed(version):
                peers.learner(identity)
                replay.checkpoint(version)
                self.brought.checkpointed = True
            case m.Recover(version):
                peers.recovers(identity)
                if self._recovered is None or self._recovered[:2] != (identity, version):
                    self._recovered = identity, version, self._recover(version)
                return self._recovered[2]
            case m.WantFresh(version, limit):
                peers.rank(identity)
                self._want_fresh.append((identity, envelope.number, version, limit))
                return None
            case m.WantStats():
                return m.StatsReply(self._stats())
        return m.Done()

    def _require_holder(self, worker: str, episode_id: str) -> None:
        """Raises StateError when another worker plays the episode."""
        group = self._replay.group_of(episode_id)
        episode = group.episodes.get(episode_id) if group is not None else None
        if episode is not None and episode.worker != worker:
            raise StateError(f"episode {episode_id} is played by {episode.worker}, not by {worker}")

    def _commit(self, version: int) -> None:
        groups = len(self._replay.of("batched"))
        before = self._replay.version
        self._replay.commit(version)
        self._batch = None
        if self._replay.version != before:
            self.brought.commits.append(CommitRow(self._replay.version, time.time(), groups))

    def _recover(self, version: int) -> m.Recovered:
        recovered = self._replay.recover(version)
        self._batch = None
        self._want_batch.clear()
        self.brought.rolled_back_to = version
        return m.Recovered(recovered)

    def _batches(self) -> list[Answer]:
        """To whom asked for a batch that is there now."""
        answers = list[Answer]()
        for identity, (number, version) in list(self._want_batch.items()):
            try:
                groups = self._replay.take(version)
            except StateError as error:
                answers.append((identity, number, m.Refused(str(error))))
            else:
                if groups is None:
                    continue
                self._batch = self._batch or self._batch_of(version, groups)
                self._recent.keep(self._waits)
                answers.append((identity, number, self._batch))
            del self._want_batch[identity]
        return answers

    def _batch_of(self, version: int, groups: list[Group]) -> m.Batch:
        """Kept until it is committed: whoever asks for it again gets the same arrays."""
        oldest = self._replay.admission.oldest_trainable(version)
        rows = tuple(tuple(self._trajectories(g)) for g in groups)
        withheld: dict[str, Withheld] = {e.id: e.withheld for g in groups for e in g.in_account("ready") if e.withheld}
        return m.Batch(version, oldest, rows, withheld, self._stats())

    def _trajectories(self, group: Group) -> list[Trajectory]:
        """Of a group that leaves in a batch, by member and branch."""
        episodes = sorted(group.in_account("ready"), key=lambda e: e.member)
        return [t for e in episodes for t in self._branches(e)]

    def _branches(self, episode: Episode) -> Sequence[Trajectory]:
        return self._recent.get(episode.id) or self.brought.episodes.get(episode.id) or self._store.episode(episode.id)

    def _waits(self, episode_id: str) -> bool:
        """Whether the episode's group may still go into a batch."""
        group = self._replay.group_of(episode_id)
        return group is not None and group.state in ("open", "leased", "ready")

    def _shown(self) -> list[Answer]:
        """To whom asked for what is ready, as far as it goes."""
        answers = list[Answer]()
        for identity, number, version, limit in self._want_fresh:
            episodes = self._replay.fresh(version)[:limit]
            found = (t for e in episodes for t in self._branches(e))
            answers.append((identity, number, m.Fresh(tuple(itertools.islice(found, limit)))))
        self._want_fresh.clear()
        return answers

    def _stats(self) -> m.Stats:
        (slot_s, idle_slot_s), (dropped, refused) = self._peers.slots(), self._turned_away()
        return m.Stats(
            version=self._replay.version,
            ledger=self._replay.books.total.copy(),
            leased_groups=len(self._replay.of("leased")),
            ready_groups=len(self._replay.of("ready", "batched")),
            slot_s=slot_s,
            idle_slot_s=idle_slot_s,
            refilled_groups=self._replay.refilled,
            dropped=dropped,
            refused=refused,
        )
