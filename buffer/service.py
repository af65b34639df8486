"""The buffer process: a ZeroMQ ROUTER around the replay state machine and the durable store.

    workers ──Hello, WantLease, Progress, Deliver──> ┌─────────┐ <──Take, Commit, Served, Recover── learner ranks
            <──────────────Granted, Done──────────── │ service │ ──────────Batch, Done────────────>
                                                     └────┬────┘
                                          Replay (pure) ──┴── Store (SQLite)

    who waits              for what                                         until
    WantLease              admission, or a group that lost its worker       Granted; the worker's end
    Take                   groups_per_batch complete groups                 Batch; the client's deadline

Invariants:
- Everything a round of messages changed is stored, in one transaction, before any of them is answered.
- A lease is answered once: a repeated wish gets the lease it was granted before, a worker that is another process now gets none.
- A request that the state machine forbids is answered `Refused`; a frame that is no message is dropped and counted.
- A failed write ends the service: what was acknowledged is in the store, what was not will be sent again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import zmq
import zmq.asyncio

from ..configs.schema import Buffer, parse_size
from ..errors import StateError, StoreError, WireError
from . import messages as m
from . import wire
from .accounts import ledgers_of
from .admission import Admission
from .ledger import Books, Counts
from .replay import Replay
from .rules import Clock, Rules
from .store import CommitRow, Store
from .trajectory import Trajectory

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 256 << 20
"""One message: an episode of a million tokens is 9 MB."""

ROUND = 512
"""Messages taken in one round, one transaction. More only delays the first answer."""


class BufferService:
    """Opens `path`, restores what it holds, and serves it at `address` until `stop` is called.

    Args:
        shares: of the run's environments, see `Admission`.
        retries: reason of a failure -> how often a member that failed so is granted again.

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
    ) -> None:
        self._lease_s = config.lease_s
        self._keep = parse_size("buffer.keep", config.keep)
        self._address = address
        self._store = Store(path)
        clock, groups = self._store.load()
        for group in groups:
            group.deadline = time.monotonic() + config.lease_s
        admission = Admission(config.max_staleness, config.groups_per_batch, shares)
        self._replay = Replay(admission, _rules(config, retries), clock, groups, Books(ledgers_of(path)))
        self._incarnations: dict[str, str] = {}
        self._slots: dict[bytes, tuple[float, float]] = {}
        self._want_lease: dict[bytes, tuple[int, str]] = {}
        self._want_batch: dict[bytes, tuple[int, int]] = {}
        self._arrived: list[tuple[str, Trajectory]] = []
        self._commits: list[CommitRow] = []
        self._rolled_back_to: int | None = None
        self._replies: list[tuple[bytes, int, m.Reply]] = []
        self._stored_clock: Clock | None = None
        self._crowded = False
        self._dropped = 0
        self._stopping = False

    def stop(self) -> None:
        """End `serve` after the round in progress."""
        self._stopping = True

    async def serve(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`. `on_ready` is called once the address is bound."""
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects before its old connection is noticed dead
        try:
            try:
                socket.bind(self._address)
            except zmq.ZMQError as error:
                raise StoreError(f"the buffer cannot listen at {self._address}: {error}") from None
            on_ready()
            while not self._stopping:
                await self._round(socket)
        finally:
            socket.close()
            context.term()
            self._store.close()

    async def _round(self, socket: zmq.asyncio.Socket) -> None:
        """Take what came, change the state, store it, answer."""
        tick_ms = max(1, int(min(1.0, self._lease_s / 4) * 1000))
        if await socket.poll(tick_ms):
            for _ in range(ROUND):
                try:
                    identity, *frames = await socket.recv_multipart(zmq.NOBLOCK, copy=True)
                except zmq.Again:
                    break
                self._receive(identity, frames)
        for group in self._replay.expire(time.monotonic()):
            log.warning("group %d: its worker was silent for %g s; the group is granted again", group.id, self._lease_s)
        self._grant_leases()
        self._hand_out_batches()
        self._persist()
        for identity, number, reply in self._replies:
            await socket.send_multipart([identity, *wire.encode(m.ReplyEnvelope(number, reply))], copy=False)
        self._replies.clear()
        if self._crowded:
            clock = self._replay.clock()
            served = -1 if clock.served is None else clock.served
            self._crowded = self._store.shrink(self._keep, min(clock.checkpointed, served))
        await asyncio.sleep(0)

    def _receive(self, identity: bytes, frames: list[bytes]) -> None:
        try:
            envelope = wire.decode(m.Envelope, frames)
        except WireError as error:
            self._dropped += 1
            log.warning("dropped message %d that is not ours: %s", self._dropped, error)
            return
        try:
            reply = self._handle(identity, envelope)
        except (StateError, WireError) as error:
            reply = m.Refused(str(error))
        if reply is not None:
            self._replies.append((identity, envelope.number, reply))

    def _handle(self, identity: bytes, envelope: m.Envelope) -> m.Reply | None:
        """Carry out one request; None when it is answered later."""
        replay, request = self._replay, envelope.message
        match request:
            case m.WantLease(worker):
                lease = replay.granted(_wish(identity, envelope.number))
                if lease is not None:
                    return m.Granted(lease)
                self._want_lease[identity] = (envelope.number, worker)
                return None
            case m.Take(version):
                self._want_batch[identity] = (envelope.number, version)
                return None
            case m.Progress(worker, generated, slot_s, idle_slot_s):
                self._slots[identity] = (slot_s, idle_slot_s)
                return m.Unwanted(tuple(replay.progress(worker, generated, time.monotonic())))
            case m.Deliver():
                self._deliver(request)
            case m.Hello(worker, incarnation):
                if self._incarnations.get(worker) != incarnation:
                    self._forget_wishes(worker)
                    replay.release(worker, "worker_lost")
                self._incarnations[worker] = incarnation
            case m.Goodbye(worker):
                self._forget_wishes(worker)
                replay.release(worker, "worker_stopped")
            case m.Commit(version):
                self._commit(version)
            case m.Served(version):
                replay.serve(version)
            case m.Checkpointed(version):
                replay.checkpoint(version)
                self._crowded = True
            case m.Recover(version):
                return self._recover(version)
            case m.WantFresh(version, limit):
                self._persist()
                episodes = replay.fresh(version)[: max(0, limit)]
                return m.Fresh(tuple(t for e in episodes for t in self._store.episode(e.id))[: max(0, limit)])
            case m.WantStats():
                return m.StatsReply(self._stats())
        return m.Done()

    def _deliver(self, request: m.Deliver) -> None:
        kept: Counts = {}
        if len({trajectory.id for trajectory in request.trajectories}) < len(request.trajectories):
            raise WireError(f"episode {request.episode_id!r} came with the same branch twice")
        for trajectory in request.trajectories:
            trajectory.check()
            ends = f"{trajectory.group_id}.", f".{trajectory.member}"
            belongs = request.episode_id.startswith(ends[0]) and request.episode_id.endswith(ends[1])
            if not belongs or trajectory.id != f"{request.episode_id}.{trajectory.branch}":
                raise WireError(
                    f"trajectory {trajectory.id!r} of group {trajectory.group_id}, member {trajectory.member}, branch "
                    f"{trajectory.branch} came with episode {request.episode_id!r}"
                )
            for span in trajectory.version_spans:
                kept[span.version] = kept.get(span.version, 0) + span.end - span.start
        if self._replay.deliver(request.episode_id, request.outcome, request.generated, kept):
            self._arrived += [(request.episode_id, trajectory) for trajectory in request.trajectories]

    def _commit(self, version: int) -> None:
        groups = sum(g.state == "batched" for g in self._replay.groups.values())
        before = self._replay.version
        self._replay.commit(version)
        if self._replay.version != before:
            self._commits.append(CommitRow(self._replay.version, time.time(), groups))

    def _recover(self, version: int) -> m.Recovered:
        recovered = self._replay.recover(version)
        self._want_batch.clear()
        self._rolled_back_to = version
        return m.Recovered(recovered)

    def _forget_wishes(self, worker: str) -> None:
        self._want_lease = {i: wish for i, wish in self._want_lease.items() if wish[1] != worker}

    def _grant_leases(self) -> None:
        for identity, (number, worker) in list(self._want_lease.items()):
            lease = self._replay.grant(worker, time.monotonic(), _wish(identity, number))
            if lease is None:
                return
            del self._want_lease[identity]
            self._replies.append((identity, number, m.Granted(lease)))

    def _hand_out_batches(self) -> None:
        if not self._want_batch:
            return
        self._persist()
        for identity, (number, version) in list(self._want_batch.items()):
            try:
                groups = self._replay.take(version)
            except StateError as error:
                groups, reply = [], m.Refused(str(error))
            else:
                if groups is None:
                    continue
                oldest = self._replay.admission.oldest_trainable(version)
                rows = tuple(tuple(self._store.trajectories(g.id)) for g in groups)
                late = frozenset(e.id for g in groups for e in g.in_account("ready") if e.late)
                reply = m.Batch(version, oldest, rows, late, self._stats())
            del self._want_batch[identity]
            self._replies.append((identity, number, reply))

    def _persist(self) -> None:
        groups, clock = self._replay.drain(), self._replay.clock()
        if groups or self._commits or self._rolled_back_to is not None or clock != self._stored_clock:
            self._store.save(clock, groups, self._arrived, self._commits, self._rolled_back_to)
        self._stored_clock = clock
        self._arrived, self._commits, self._rolled_back_to = [], [], None
        self._replay.forget()

    def _stats(self) -> m.Stats:
        states = [g.state for g in self._replay.groups.values()]
        return m.Stats(
            version=self._replay.version,
            ledger=self._replay.books.total.copy(),
            leased_groups=states.count("leased"),
            ready_groups=states.count("ready") + states.count("batched"),
            slot_s=sum(total for total, _ in self._slots.values()),
            idle_slot_s=sum(idle for _, idle in self._slots.values()),
        )


def _rules(config: Buffer, retries: Mapping[str, int] | None) -> Rules:
    min_members = config.min_members or config.group_size
    return Rules(config.group_size, min_members, config.on_deadline, config.lease_s, dict(retries or {}))


def _wish(identity: bytes, number: int) -> str:
    """A client's request for a lease; its identity is unique, its numbers are not used twice."""
    return f"{identity.hex()}.{number}"
