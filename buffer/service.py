"""A buffer process: an RPC server around the replay state machine and the durable store. It is the whole buffer, one of its shards,
or their clock (`client` says how they act together).

    workers ──Register, RequestLease, ReportProgress, DeliverEpisode──> ┌─────────┐ <──────────TakeBatch, CommitBatch── learner
            <────────────────LeaseReply, CancelledEpisodes, Ack──────── │ service │ ──BatchPlan, Ack─────────────────────> ranks
                                                                        └────┬────┘
                                                             Replay (pure) ──┴── Store (SQLite)

Invariants:
- Everything a round of requests changed is stored, in one `save`, before any of them is answered.
- A request that the state machine forbids is refused; a message that is no request is dropped and counted.
- While a round is stored, the round before is answered and requests of the next one already change the state. So rounds are
  answered in order, and a failed write ends the service: what was acknowledged is in the store, what was not is sent again.
- Memory is bounded by the limits below, the RPC server's, the groups that admission lets be outstanding, and one plan.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import zmq

from ..common.tasks import in_thread
from ..configs.schema import Buffer, parse_size
from ..errors import StateError, StoreError, TrackedWait
from ..rpc.security import KeyPair, PeerTable
from ..rpc.server import RpcServer
from . import messages as m
from .admission import Admission, LiveRules, ReplayConfig
from .group_table import Group
from .ledger import VersionLedgers
from .ledger_report import ledgers_by_version
from .replay import Replay
from .request_handler import PendingReply, RequestHandler
from .store import Store
from .task_table import SequentialSampler, TaskSampler, TaskTable

log = logging.getLogger(__name__)
# Messages of one round, one transaction, and the bytes after which it takes no more. More would only delay the first reply.
ROUND, ROUND_BYTES = 512, 16 << 20
# Longest wait for the disk to take one round, which takes milliseconds. A write that hangs cannot be cancelled: the process ends,
# after `common.tasks.EXIT_JOIN_S`, and another one is there before clients give up (`Config.reply_s`).
STORE_S = 30.0
# How long the storing thread waits for the interpreter while the other decodes messages, which it does after every
# statement. Python's default, 5 ms, is as long as a write.
SWITCH_INTERVAL_S = 1e-3
LEASE_S = 60.0  # of a service without a run; in a run leases follow from `launch.heartbeat_s`


class BufferService:
    """Opens `path`, restores what it holds, and serves it at `address` until `stop` is called.

    Args:
        shares: of the run's environments, see `Admission`.
        retries: failure reason -> how often a member that failed so is leased again.
        greedy: one member of each group is sampled greedily, see `ReplayConfig`.
        samplers, tasks: of each environment what chooses its tasks, and how many it has, 0 without end; by default in order.
        revision: of the settings in `config`, see `configure`.
        peers: who may connect; None for a plain socket.
        pair: the buffer's keys, where they are not those of this process.
        lease_s: how long a worker may be silent until it loses its groups, seconds.
        shard: which process of the buffer this is, of `config.shards`; see `Admission`.

    Raises:
        StoreError: the file cannot be opened, read or written.
        StateError: it is of a run with other environments, or of another process of the buffer.
        EnvError: a sampler raised.
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
        samplers: Sequence[TaskSampler] = (),
        tasks: Sequence[int] = (),
        revision: int = 0,
        peers: PeerTable | None = None,
        pair: KeyPair | None = None,
        lease_s: float = LEASE_S,
        shard: int = 0,
    ) -> None:
        self._lease_s, self._shards = lease_s, config.shards
        self._tick_s, self._expires_at = min(1.0, lease_s / 4), 0.0
        self._size_limit = parse_size("buffer.keep", config.keep) // config.shards
        self._address = address
        self._peers, self._pair = peers, pair
        self._store = Store(path)
        counters, groups = self._store.load()
        for group in groups:
            group.deadline = time.monotonic() + lease_s
        replay_config = ReplayConfig(
            config.group_size,
            config.min_members or config.group_size,
            config.on_deadline,
            lease_s,
            dict(retries or {}),
            config.dynamic_sampling,
            config.filter,
            greedy,
        )
        admission = Admission(config.max_staleness, config.groups_per_batch, shares, shard, config.shards)
        ledgers = VersionLedgers(ledgers_by_version(path))
        samplers = samplers or [SequentialSampler()] * len(shares)
        watched = [env for env, sampler in enumerate(samplers) if not isinstance(sampler, SequentialSampler)]
        table = TaskTable(samplers, tasks, self._store.tasks(watched))
        self._replay = Replay(admission, replay_config, counters, groups, ledgers, table)
        self._handler = RequestHandler(self._replay, self._store, self._transport_counts, revision)
        self._round_ends = 0, 0
        self._stored = threading.Event()  # set while no thread is in the store
        self._stored.set()
        self._over_limit = self._store_hangs = self._stopping = False
        self._wake: Callable[[], None] = lambda: None

    def mark_served(self, version: int | None) -> None:
        """The fleet serves `version`; None while no replica serves one. Call it in the loop on every change of the fleet."""
        try:
            self._replay.mark_served(version)
        except StateError as error:
            log.error("nothing is leased: %s", error)
            self._replay.mark_served(None)
        self._wake()

    def configure(self, revision: int, config: Buffer) -> None:
        """Follow changed settings, as the request `Configure` does. Call it in the loop with every revision of them."""
        self._handler.configure(revision, LiveRules.of(config))
        self._wake()

    def gauges(self) -> dict[str, float | dict[str, int] | None]:
        """Groups by state, versions, and tokens by account. From any thread."""
        sizes, ledger = self._replay.table.sizes(), self._replay.table.ledgers.total
        return {
            **{state: sizes[state] for state in ("open", "leased", "ready", "batched")},
            "version": self._replay.version,
            "served": self._replay.served,
            "generated": ledger.generated,
            "in_flight_tokens": ledger.in_flight,
            "ready_tokens": ledger.ready,
            "trained_tokens": ledger.trained,
            "withheld_tokens": ledger.withheld.copy(),
            "discarded_tokens": ledger.discarded.copy(),
            **({"shards": self._shards} if self._shards > 1 else {}),
        }

    def stop(self) -> None:
        """End `serve` after the round in progress."""
        self._stopping = True
        self._wake()

    async def serve(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`. `on_ready` is called once the address is bound."""
        try:
            self._server: RpcServer[m.Request] = RpcServer(
                self._address, "the buffer", m.Request, peers=self._peers, rights=m.RIGHTS, pair=self._pair
            )
        except zmq.ZMQError as error:
            self._store.close()
            raise StoreError(f"the buffer cannot listen at {self._address}: {error}", final=False) from None
        self._wake = self._server.wake
        switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            on_ready()
            stored = list[PendingReply]()
            while stored or not self._stopping:
                stored = await self._round(stored)
        finally:
            sys.setswitchinterval(switch_interval)
            if not self._store_hangs:
                self._stored.wait()  # a save in progress ends
                self._store.close()
            self._server.close()

    async def _round(self, stored: list[PendingReply]) -> list[PendingReply]:
        """Store what has changed; meanwhile send the replies `stored` and take in the next round. Returns the replies to what is
        stored now."""
        for group in self._expired():
            log.warning("group %d: its worker was silent for %g s and loses it", group.id, self._lease_s)
        replies = self._handler.replies()
        self._round_ends = self._server.received + ROUND, self._server.received_bytes + ROUND_BYTES
        write = self._pending_write()
        if write is None:
            self._server.reply_all(stored + replies)
            if self._has_room:
                due_s = max(0.0, self._handler.due - time.monotonic())
                await self._server.poll(min(self._tick_s, due_s))
                self._handler.receive(self._server, lambda: self._has_room)
            return []
        self._stored.clear()
        written = in_thread(write, "store")
        written.add_done_callback(lambda _: self._server.wake())
        self._server.reply_all(stored)
        deadline = time.monotonic() + STORE_S
        with TrackedWait("the buffer", "its disk", STORE_S):
            while not written.done():
                left = deadline - time.monotonic()
                await (self._server.poll(left) if self._has_room else asyncio.wait([written], timeout=left))
                self._handler.receive(self._server, lambda: self._has_room and not self._stored.is_set())
                if time.monotonic() >= deadline and not self._stored.is_set():
                    self._store_hangs = True
                    raise StoreError(
                        f"the disk of {self._store.path} has not taken a round in {STORE_S:g} s", final=False
                    )
        self._over_limit |= await written
        return replies

    def _expired(self) -> list[Group]:
        """The groups that lost their leases; looked for now and then, as every lease is looked at."""
        now = time.monotonic()
        if now < self._expires_at:
            return []
        self._expires_at = now + self._tick_s
        return self._replay.leases.expire(now)

    def _pending_write(self) -> Callable[[], bool] | None:
        """A function that stores what has changed since the last call and shrinks the file; None when there is nothing to do. It
        returns whether there is more to shrink."""
        batch, settled = self._handler.drain(), self._replay.table.counters.settled
        shrink = self._over_limit or self._handler.checkpointed
        self._over_limit = self._handler.checkpointed = False
        if batch is None and not shrink:
            return None
        store, limit = self._store, self._size_limit

        def write() -> bool:
            try:
                if batch is not None:
                    store.save(batch)
                return shrink and store.shrink(limit, settled)
            finally:
                self._stored.set()

        return write

    def _transport_counts(self) -> tuple[int, int]:
        return self._server.dropped, self._server.refused

    @property
    def _has_room(self) -> bool:
        messages, size = self._round_ends
        return not self._stopping and self._server.received < messages and self._server.received_bytes <= size
