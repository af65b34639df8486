"""The buffer process: a ZeroMQ ROUTER around the replay state machine and the durable store.

    workers ──Hello, WantLease, Progress, Deliver──> ┌─────────┐ <──Take, Commit, Served, Recover── learner ranks
            <──────────────Granted, Done──────────── │ service │ ──────────Batch, Done────────────>
                                                     └────┬────┘
                                          Replay (pure) ──┴── Store (SQLite)

    who waits              for what                                         until
    WantLease              admission, or a group that lost its worker       Granted; the worker's end
    Take                   groups_per_batch complete groups                 Batch; the client's deadline

Invariants:
- Everything a round of messages changed is stored, in one `save`, before any of them is answered.
- A wish for a lease has one answer, however often it is sent; a worker that is another process now gets none.
- A request that the state machine forbids, or that its sender may not make (`peers`), is answered `Refused`; a message that is no
  request is dropped and counted.
- While a round is stored, the one before is answered and the messages of the next change the state already. So rounds are answered
  in their order, and a failed write ends the service: what was acknowledged is in the store, what was not will be sent again.
- Memory is bounded by the limits below, the groups that admission lets be outstanding, and one batch, whoever sends what. One
  thing libzmq does not limit: a message of ever more frames that never ends. Only a peer with the run's keys can send it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zmq
import zmq.asyncio

from ..configs.schema import Buffer, parse_size
from ..curve import Guard, Keys
from ..errors import StateError, StoreError, Waiting, WireError
from . import messages as m
from . import wire
from .accounts import ledgers_of
from .admission import Admission
from .door import Door
from .group import Episode, Group
from .ledger import Books, Withheld
from .peers import Peers
from .recent import Recent
from .replay import Replay
from .rules import Clock, Rules
from .store import Change, CommitRow, Store
from .trajectory import Trajectory, sampled_of
from .wishes import Wish, Wishes, queue

log = logging.getLogger(__name__)

ROUND, ROUND_BYTES = 512, 16 << 20
"""Messages taken in one round, one transaction, and after how many bytes no more are taken. More only delays the first answer."""

BACKLOG = 64
"""Messages of one connection that wait to be read; after that its sender waits."""

STORE_S = 120.0
"""Longest wait for the disk to take one round, which it does in milliseconds. Nobody can break off a write that hangs."""

HANDOVER_S = 1e-3
"""How long the thread that stores waits for the interpreter while the other takes in messages, which it does after every statement.
Python's own 5 ms are as long as a write."""

LINGER_MS = 500
"""For answers that are on their way when the service ends: libzmq aborts a process that drops half of a message."""

Answer = tuple[bytes, int, m.Reply]
"""Who asked, the number of the request, and the reply."""


class BufferService:
    """Opens `path`, restores what it holds, and serves it at `address` until `stop` is called.

    Args:
        shares: of the run's environments, see `Admission`.
        retries: reason of a failure -> how often a member that failed so is granted again.
        greedy: one member of each group is played greedily, see `Rules`.
        keys: of the run, if not this process's own.

    Raises:
        StoreError: the file cannot be opened, read or written.
        StateError: it is of a run with other environments.
    """

    def __init__(
        self,
        config: Buffer,
        path: Path,
        address: str,
        *,
        shares: tuple[float, ...] = (1.0,),
        retries: Mapping[str, int] | None = None,
        greedy: bool = False,
        keys: Keys | None = None,
    ) -> None:
        self._lease_s = config.lease_s
        self._keep = parse_size("buffer.keep", config.keep)
        self._address = address
        self._store = Store(path)
        clock, groups = self._store.load()
        for group in groups:
            group.deadline = time.monotonic() + config.lease_s
        admission = Admission(config.max_staleness, config.groups_per_batch, shares)
        self._replay = Replay(admission, _rules(config, retries, greedy), clock, groups, Books(ledgers_of(path)))
        self._keys = keys
        self._guard: Guard | None = None
        self._peers = Peers()
        self._wishes = Wishes(self._replay)
        self._want_batch: dict[bytes, tuple[int, int]] = {}
        self._batch: m.Batch | None = None
        self._arrived: dict[str, tuple[Trajectory, ...]] = {}
        self._commits: list[CommitRow] = []
        self._rolled_back_to: int | None = None
        self._recovered: tuple[bytes, int, m.Recovered] | None = None
        self._replies: list[Answer] = []
        self._stored_clock: Clock | None = None
        self._messages = self._bytes = 0
        self._recent = Recent()
        self._want_fresh: list[tuple[bytes, int, int, int]] = []
        self._saver = ThreadPoolExecutor(1, "store")
        self._crowded = self._hangs = False
        self._dropped = 0
        self._stopping = False

    def stop(self) -> None:
        """End `serve` after the round in progress."""
        self._stopping = True

    async def serve(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`. `on_ready` is called once the address is bound."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(HANDOVER_S)
        context = zmq.asyncio.Context()
        self._guard = Guard(context, self._keys)
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, wire.FRAME_LIMIT)
        socket.setsockopt(zmq.RCVHWM, BACKLOG)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects before its old connection is noticed dead
        self._guard.protect(socket)
        try:
            try:
                socket.bind(self._address)
            except zmq.ZMQError as error:
                raise StoreError(f"the buffer cannot listen at {self._address}: {error}", final=False) from None
            on_ready()
            door, stored = Door.of(socket), list[Answer]()
            while stored or not self._stopping:
                stored = await self._round(door, stored)
        finally:
            sys.setswitchinterval(interval)
            self._saver.shutdown(wait=not self._hangs)  # a save that was under way ends
            self._guard.close()
            socket.close()
            context.term()
            if not self._hangs:
                self._store.close()

    async def _round(self, door: Door, stored: list[Answer]) -> list[Answer]:
        """Store what has changed; meanwhile give the answers `stored` and take in the next round. Returns the answers that may be
        given now."""
        for group in self._replay.expire(time.monotonic()):
            log.warning("group %d: its worker was silent for %g s and loses it", group.id, self._lease_s)
        self._replies += self._wishes.grant(time.monotonic())
        self._hand_out()
        self._show_fresh()
        replies, self._replies = self._replies, []
        self._messages = self._bytes = 0
        work = self._changes()
        if work is None:
            _send(door, stored + replies)
            if self._roomy:
                await door.ready.poll(max(1, int(min(1.0, self._lease_s / 4) * 1000)))
                self._take_in(door)
            return []
        saving = self._saver.submit(work)
        saved = asyncio.wrap_future(saving)
        _send(door, stored)
        late = time.monotonic() + STORE_S
        with Waiting("the buffer", "its disk", STORE_S):
            while not saving.done():
                coming = [asyncio.ensure_future(door.ready.poll())] if self._roomy else []
                left = late - time.monotonic()
                await asyncio.wait([saved, *coming], timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for poll in coming:
                    poll.cancel()
                self._take_in(door, saving.done)
                if time.monotonic() >= late and not saving.done():
                    self._hangs = True
                    raise StoreError(
                        f"the disk of {self._store.path} has not taken a round in {STORE_S:g} s", final=False
                    )
        more = await saved
        self._crowded = self._crowded or more
        return replies

    def _changes(self) -> Callable[[], bool] | None:
        """How to store what has changed since the last call, and to make room in the file; None where there is nothing to do. It
        returns whether there is more room to make."""
        groups, clock = self._replay.drain(), self._replay.clock()
        changed = groups or self._commits or self._rolled_back_to is not None or clock != self._stored_clock
        if not changed and not self._crowded:
            return None
        arrived = [(episode_id, t) for episode_id, branches in self._arrived.items() for t in branches]
        change = Change.of(clock, groups, arrived, self._commits, self._rolled_back_to) if changed else None
        self._stored_clock = clock
        self._arrived, self._commits, self._rolled_back_to = {}, [], None
        self._replay.forget()
        store, crowded, keep = self._store, self._crowded, self._keep
        self._crowded = False

        def work() -> bool:
            if change is not None:
                store.save(change)
            return crowded and store.shrink(keep, clock.over)

        return work

    def _take_in(self, door: Door, enough: Callable[[], bool] = lambda: False) -> None:
        """Carry out what came, until there is no more, or it is enough for a round."""
        while self._roomy and not enough() and (message := door.read()) is not None:
            identity, *frames = message
            self._messages += 1
            self._bytes += sum(map(len, frames))
            try:
                envelope = wire.decode(m.Envelope, frames)
            except WireError as error:
                self._dropped += 1
                if self._dropped & (self._dropped - 1) == 0:  # at 1, 2, 4, ...: a flood fills no log
                    log.warning("dropped message %d that is no request: %s", self._dropped, error)
                continue
            try:
                reply = self._handle(identity, envelope)
            except (StateError, WireError) as error:
                reply = m.Refused(str(error))
            if reply is not None:
                self._replies.append((identity, envelope.number, reply))

    @property
    def _roomy(self) -> bool:
        return not self._stopping and self._messages < ROUND and self._bytes <= ROUND_BYTES

    def _handle(self, identity: bytes, envelope: m.Envelope) -> m.Reply | None:
        """Carry out one request; None when it is answered later."""
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
                    self._arrived[episode_id] = trajectories
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
                self._crowded = True
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
            self._commits.append(CommitRow(self._replay.version, time.time(), groups))

    def _recover(self, version: int) -> m.Recovered:
        recovered = self._replay.recover(version)
        self._batch = None
        self._want_batch.clear()
        self._rolled_back_to = version
        return m.Recovered(recovered)

    def _hand_out(self) -> None:
        """Answer who asked for a batch that is there now."""
        for identity, (number, version) in list(self._want_batch.items()):
            try:
                groups = self._replay.take(version)
            except StateError as error:
                self._replies.append((identity, number, m.Refused(str(error))))
            else:
                if groups is None:
                    continue
                self._batch = self._batch or self._batch_of(version, groups)
                self._recent.keep(self._waits)
                self._replies.append((identity, number, self._batch))
            del self._want_batch[identity]

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
        return self._recent.get(episode.id) or self._arrived.get(episode.id) or self._store.episode(episode.id)

    def _waits(self, episode_id: str) -> bool:
        """Whether the episode's group may still go into a batch."""
        group = self._replay.group_of(episode_id)
        return group is not None and group.state in ("open", "leased", "ready")

    def _show_fresh(self) -> None:
        for identity, number, version, limit in self._want_fresh:
            episodes = self._replay.fresh(version)[:limit]
            found = (t for e in episodes for t in self._branches(e))
            self._replies.append((identity, number, m.Fresh(tuple(itertools.islice(found, limit)))))
        self._want_fresh.clear()

    def _stats(self) -> m.Stats:
        slot_s, idle_slot_s = self._peers.slots()
        return m.Stats(
            version=self._replay.version,
            ledger=self._replay.books.total.copy(),
            leased_groups=len(self._replay.of("leased")),
            ready_groups=len(self._replay.of("ready", "batched")),
            slot_s=slot_s,
            idle_slot_s=idle_slot_s,
            refilled_groups=self._replay.refilled,
            dropped=self._dropped,
            refused=self._guard.refused if self._guard else 0,
        )


def _rules(config: Buffer, retries: Mapping[str, int] | None, greedy: bool) -> Rules:
    min_members = config.min_members or config.group_size
    return Rules(
        config.group_size,
        min_members,
        config.on_deadline,
        config.lease_s,
        dict(retries or {}),
        config.dynamic_sampling,
        config.filter,
        greedy,
    )


def _send(door: Door, answers: list[Answer]) -> None:
    """A ROUTER never waits: whoever does not read loses the answer, and asks again."""
    for identity, number, reply in answers:
        door.plain.send_multipart([identity, *wire.encode(m.ReplyEnvelope(number, reply))], copy=False)
